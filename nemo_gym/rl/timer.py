"""Named stopwatches: several measurements per name, reduced to one number for the metrics."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "sum": sum,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "count": lambda values: float(len(values)),
}


class Timer:
    """Measures how long named steps take."""

    def __init__(self) -> None:
        self._running: dict[str, float] = {}
        self._measured: dict[str, list[float]] = {}

    def start(self, label: str) -> None:
        """Start a stopwatch.

        Raises:
            ValueError: it is running.
        """
        if label in self._running:
            raise ValueError(f"timer {label!r} is running already; stop it first")
        self._running[label] = time.perf_counter()

    def stop(self, label: str) -> float:
        """Stop a stopwatch and return the seconds it measured.

        Raises:
            ValueError: it is not running.
        """
        if label not in self._running:
            raise ValueError(f"timer {label!r} is not running; start it first")
        elapsed_s = time.perf_counter() - self._running.pop(label)
        self._measured.setdefault(label, []).append(elapsed_s)
        return elapsed_s

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure the block."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def get_elapsed(self, label: str) -> list[float]:
        """Every measurement of a stopwatch, in seconds.

        Raises:
            KeyError: there is none.
        """
        return list(self._measured[label])

    def get_latest_elapsed(self, label: str) -> float:
        """The last measurement of a stopwatch, in seconds."""
        return self._measured[label][-1]

    def reduce(self, label: str, operation: str = "mean") -> float:
        """One number for all measurements of a stopwatch: mean, median, min, max, sum, std or count.

        Raises:
            ValueError: there is no such operation.
        """
        if operation not in _REDUCTIONS:
            raise ValueError(f"{operation!r} is no reduction; choose one of {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[operation](self._measured[label])

    def get_timing_metrics(self, reduction_op: str = "mean") -> dict[str, float]:
        """All stopwatches that measured something, each reduced to one number."""
        return {label: self.reduce(label, reduction_op) for label in self._measured}

    def reset(self, label: str | None = None) -> None:
        """Forget the measurements of one stopwatch, or of all."""
        for name in [label] if label is not None else [*self._running, *self._measured]:
            self._running.pop(name, None)
            self._measured.pop(name, None)
