"""The living line of a run: one bar on a terminal, and a line now and then anywhere else.

Both begin with what is being done (`Collecting rollouts:`) and the percentage, which reaches 100 only when all is done.
Whoever makes the rollouts shows it, and whoever watches from another terminal.
"""

import contextlib
import logging
import os
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from nemo_gym.log import LOGGER_NAME
from nemo_gym.process_inputs import is_dumb_terminal

if TYPE_CHECKING:
    from tqdm import tqdm

COLLECTING, SCORING = "Collecting rollouts", "Scoring rollouts"
_BAR_FORMAT = "{desc}: {whole_percent:3d}%|{bar}| {tail}"
_COUNT_FORMAT = "{desc}: {tail}"
_ROWS = 20
"""tqdm hides bars on terminals that say they have no rows, as some do."""


class Snapshot(NamedTuple):
    """Where a run stands."""

    done: int
    total: int | None
    """None when nobody knows."""
    tail: str
    """Everything behind the bar, made of printable characters."""
    title: str = COLLECTING
    """What is being done."""

    @property
    def whole_percent(self) -> int:
        """Rounded down: 100 means all."""
        return 100 * self.done // self.total if self.total else 100


class View(Protocol):
    """Shows snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the latest."""

    def write(self, text: str) -> None:
        """Show a line of text that stays."""

    def close(self, snapshot: Snapshot) -> None:
        """Show the last one, which stays."""

    def pause_s(self, elapsed_s: float) -> float:
        """Seconds until the next one is to be shown."""


def view_for(stream: TextIO, first: Snapshot) -> View:
    """The bar if `stream` is a terminal that can show it, else lines."""
    return BarView(stream, first) if _is_capable(stream) else LinesView(stream)


class LinesView:
    """A line every ten seconds, and less often as the run gets longer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, snapshot: Snapshot) -> None:
        """Write the line."""
        percent = "" if snapshot.total is None else f" {snapshot.whole_percent:3d}%"
        self.write(f"{snapshot.title}:{percent} {snapshot.tail}")

    def write(self, text: str) -> None:
        """Write any line."""
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, which must not stop the run
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self, snapshot: Snapshot) -> None:
        """Write the last line."""
        self.show(snapshot)

    def pause_s(self, elapsed_s: float) -> float:
        """Seconds until the next line: 10 to 60, more as the run gets longer."""
        return min(60.0, max(10.0, elapsed_s / 10))


class BarView:
    """A tqdm bar that steps aside for log lines."""

    def __init__(self, stream: TextIO, first: Snapshot) -> None:
        self._stream = stream
        self._bar = _make_bar(stream, first)
        self._filter = _ClearsBar(self._bar)
        self._handlers = [*logging.getLogger(LOGGER_NAME).handlers, *logging.getLogger().handlers]
        for handler in self._handlers:
            handler.addFilter(self._filter)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the bar anew."""
        with contextlib.suppress(OSError, ValueError):
            self._set(snapshot)
            self._bar.refresh()

    def write(self, text: str) -> None:
        """Write a line above the bar."""
        with contextlib.suppress(OSError, ValueError):
            self._bar.clear()
            self._stream.write(f"{text}\n")
            self._bar.refresh()

    def close(self, snapshot: Snapshot) -> None:
        """Leave the bar as it is last."""
        for handler in self._handlers:
            handler.removeFilter(self._filter)
        with contextlib.suppress(OSError, ValueError):
            self._set(snapshot)
            self._bar.close()

    def pause_s(self, elapsed_s: float) -> float:
        """How long to wait until the line is drawn again: half a second."""
        return 0.5

    def _set(self, snapshot: Snapshot) -> None:
        self._bar.n, self._bar.total = snapshot.done, snapshot.total
        self._bar.ncols = _columns(self._stream) or self._bar.ncols
        self._bar.__dict__["snapshot"] = snapshot


class _ClearsBar(logging.Filter):
    """Lets every record pass, on a line that is empty."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        super().__init__()
        self._bar = bar

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(OSError, ValueError):
            self._bar.clear()
        return True


def _make_bar(stream: TextIO, first: Snapshot) -> "tqdm[Any]":
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread: whoever shows snapshots keeps the bar alive
        snapshot = first

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            return {**super().format_dict, "whole_percent": self.snapshot.whole_percent, "tail": self.snapshot.tail}

    Bar.set_lock(threading.RLock())
    return Bar(
        total=first.total,
        initial=first.done,
        desc=first.title,
        file=stream,
        ncols=_columns(stream),
        nrows=_ROWS,
        leave=True,
        bar_format=_COUNT_FORMAT if first.total is None else _BAR_FORMAT,
    )


def _is_capable(stream: TextIO) -> bool:
    return stream.isatty() and not is_dumb_terminal() and _columns(stream) > 0


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
