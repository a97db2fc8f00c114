"""Numbers with their errors, and what they say about a target: on a busy machine no reading is exact."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
"""Student's t for 95 %, by degrees of freedom; 2 beyond."""


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


@dataclass
class Target:
    """A bound that readings of one figure are held against; either is enough."""

    name: str
    most: float = math.inf
    least: float = -math.inf
    readings: list[float] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """What became of it so far."""
        found = Estimate.of(self.readings)
        return worst(found.at_most(self.most), found.at_least(self.least))

    def __str__(self) -> str:
        bound = f"at most {self.most:g}" if self.most < math.inf else f"at least {self.least:g}"
        return f"{self.name}: {Estimate.of(self.readings)}, {bound}: {self.outcome}"


def hold(take: Callable[[], Sequence[float]], *targets: Target, rounds: int = 3, more: int = 0) -> None:
    """Take a reading for each target in each of some rounds, and in some more while one is not met.

    A target that is missed by more than the error of its readings fails; one that is missed within it is undecided.
    """
    while len(targets[0].readings) < rounds + more:
        for target, reading in zip(targets, take(), strict=True):
            target.readings.append(reading)
        if len(targets[0].readings) >= rounds and all(target.outcome is Outcome.MET for target in targets):
            break
    print("", *targets, sep="\n")
    missed = [str(target) for target in targets if target.outcome is Outcome.MISSED]
    assert not missed, "; ".join(missed)


def worst(*outcomes: Outcome) -> Outcome:
    """What becomes of a target that several numbers have to meet."""
    return max(outcomes, key=list(Outcome).index)
