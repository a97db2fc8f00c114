"""Numbers with their errors, and what they say about a target: on a busy machine no reading is exact."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import psutil

_T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
"""Student's t for 95 %, by degrees of freedom; 2 beyond."""
MOST_OF_OTHERS = 0.1
"""Of the processors: where others take more, it is their noise as well that missed a target."""


class Outcome(StrEnum):
    """What became of a target."""

    MET = "met"
    UNDECIDED = "undecided"
    MISSED = "missed"


@dataclass(frozen=True)
class Estimate:
    """A number, and half the width of the interval that holds the true one with 95 %."""

    value: float
    error: float = 0.0

    @classmethod
    def of(cls, readings: Sequence[float]) -> "Estimate":
        """The median of some readings of the same; of a single one nobody knows how good it is."""
        middle = statistics.median(readings)
        if len(readings) < 2:
            return cls(middle)
        spread = statistics.stdev(readings) / math.sqrt(len(readings))
        return cls(middle, _T_95.get(len(readings) - 1, 2.0) * spread)

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" \N{PLUS-MINUS SIGN} {self.error:.2f}" if self.error else "")

    def over(self, other: "Estimate") -> "Estimate":
        """The quotient; errors add up as those of independent numbers do."""
        relative = math.hypot(self.error / self.value, other.error / other.value)
        quotient = self.value / other.value
        return Estimate(quotient, abs(quotient) * relative)

    def at_most(self, bound: float) -> Outcome:
        """Whether it keeps to a bound; beyond it by less than the error, that is not decided."""
        if self.value <= bound:
            return Outcome.MET
        return Outcome.UNDECIDED if self.value - self.error <= bound else Outcome.MISSED

    def at_least(self, bound: float) -> Outcome:
        """The same the other way round."""
        return Estimate(-self.value, self.error).at_most(-bound)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> Estimate:
    """1 when costs grow as sizes do: the slope of a line through all of them, both axes logarithmic, and its error."""
    x, y = list(map(math.log, sizes)), list(map(math.log, costs))
    line = statistics.linear_regression(x, y)
    freedom = len(x) - 2
    if freedom < 1:
        return Estimate(line.slope)
    residuals = sum((each_y - line.slope * each_x - line.intercept) ** 2 for each_x, each_y in zip(x, y, strict=True))
    middle = statistics.fmean(x)
    deviation = math.sqrt(residuals / freedom / sum((each - middle) ** 2 for each in x))
    return Estimate(line.slope, _T_95.get(freedom, 2.0) * deviation)


class Others:
    """What other programs, and other machines on the same hardware, take of the processors from now on."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    @property
    def share(self) -> float:
        """Of all processors, so far; nothing is known of less than a second."""
        passed_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        theirs_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, theirs_s / passed_s) if passed_s >= (os.cpu_count() or 1) else 0.0


def _busy_s() -> float:
    """Processor time of everybody on this machine."""
    times = psutil.cpu_times()
    at_rest = ("idle", "iowait", "guest", "guest_nice")  # guests are in `user` already
    return sum(times) - sum(getattr(times, name, 0.0) for name in at_rest)


def _own_s() -> float:
    """Processor time of this process and of all that it has started."""
    own = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            own += sum(child.cpu_times()[:4])
    return own


@dataclass
class Target:
    """A bound that readings of one figure are held against; either is enough."""

    name: str
    most: float = math.inf
    least: float = -math.inf
    readings: list[float] = field(default_factory=list)
    others: float = 0.0
    """What others took of the processors meanwhile."""

    @property
    def outcome(self) -> Outcome:
        """What became of it so far; where others take much of the machine, nothing is missed for sure."""
        found = Estimate.of(self.readings)
        outcome = worst(found.at_most(self.most), found.at_least(self.least))
        return Outcome.UNDECIDED if outcome is Outcome.MISSED and self.others > MOST_OF_OTHERS else outcome

    def __str__(self) -> str:
        bound = f"at most {self.most:g}" if self.most < math.inf else f"at least {self.least:g}"
        meanwhile = f" while others took {self.others:.0%} of the processors" if self.others > MOST_OF_OTHERS else ""
        return f"{self.name}: {Estimate.of(self.readings)}{meanwhile}, {bound}: {self.outcome}"


def hold(
    take: Callable[[], Sequence[float]],
    *targets: Target,
    rounds: int = 3,
    more: int = 0,
    others: Others | None = None,
) -> None:
    """Take a reading for each target in each of some rounds, and in some more while one is not met.

    A target that is missed by more than the error of its readings fails; one that is missed within it, or while others
    (since this call, unless they are given) kept the machine busy, is undecided.
    """
    others = others or Others()
    while len(targets[0].readings) < rounds + more:
        for target, reading in zip(targets, take(), strict=True):
            target.readings.append(reading)
        if len(targets[0].readings) >= rounds and all(target.outcome is Outcome.MET for target in targets):
            break
    share = others.share
    for target in targets:
        target.others = share
    print("", *targets, sep="\n")
    missed = [str(target) for target in targets if target.outcome is Outcome.MISSED]
    assert not missed, "; ".join(missed)


def worst(*outcomes: Outcome) -> Outcome:
    """What becomes of a target that several numbers have to meet."""
    return max(outcomes, key=list(Outcome).index)
