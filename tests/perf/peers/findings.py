"""From what commands used to what a rollout costs, and by how much that differs: ratios of one round, their median."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from tests.perf.peers.contenders import OURS
from tests.perf.peers.meter import Usage


class Spread(NamedTuple):
    """Several readings of one figure."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, readings: Iterable[float]) -> "Spread":
        """The median, and the smallest and the largest."""
        found = sorted(readings)
        return cls(statistics.median(found), found[0], found[-1])


@dataclass(frozen=True)
class Round:
    """One contender at one task, measured once: a run of a single rollout and a run of many, one after the other."""

    rollouts: int
    calling_s: float
    """From the first model call of the many to the last."""
    one: Usage
    many: Usage

    @property
    def cpu_ms(self) -> float:
        """CPU per additional rollout; starting and stopping falls out."""
        return 1000 * (self.many.cpu_s - self.one.cpu_s) / (self.rollouts - 1)

    @property
    def per_s(self) -> float:
        """Rollouts per second while the model was called; starting and stopping falls out."""
        return self.rollouts / self.calling_s


METRICS: dict[str, Callable[[Round], float]] = {
    "cpu_ms": lambda found: found.cpu_ms,
    "per_s": lambda found: found.per_s,
    "peak_mb": lambda found: found.many.peak_mb,
    "first_result_s": lambda found: found.one.first_result_s,
}


@dataclass
class Findings:
    """All rounds of all contenders, by task."""

    versions: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, int] = field(default_factory=dict)
    """Of the runs of many."""
    in_flight: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, dict[str, list[Round]]] = field(default_factory=dict)
    """By task and contender, in the order of the rounds."""
    cores: int = 0
    stolen_share: float = 0.0
    """Of the time of this machine's cores, what its hypervisor gave to others meanwhile."""
    load: float = 0.0
    """Processes that wanted to run when the measurement began, beside it: noise in all of this."""

    def add(self, task: str, contender: str, found: Round) -> None:
        """One more round of a contender."""
        self.rounds.setdefault(task, {}).setdefault(contender, []).append(found)

    def spread(self, task: str, contender: str, metric: str) -> Spread:
        """A figure of a contender, over the rounds."""
        return Spread.of(map(METRICS[metric], self.rounds[task][contender]))

    def ratio(self, task: str, contender: str, metric: str) -> Spread:
        """By which factor we are better: theirs over ours, for a rate ours over theirs; within each round."""
        mine = map(METRICS[metric], self.rounds[task][OURS])
        theirs = map(METRICS[metric], self.rounds[task][contender])
        pairs = zip(theirs, mine, strict=True)
        return Spread.of(own / other if metric == "per_s" else other / own for other, own in pairs)

    def as_json(self) -> dict[str, Any]:
        """For programs: the readings, and what was made of them."""
        made = {
            task: {
                name: {
                    metric: {
                        "found": self.spread(task, name, metric)._asdict(),
                        "ratio": self.ratio(task, name, metric)._asdict(),
                    }
                    for metric in METRICS
                }
                for name in by_name
            }
            for task, by_name in self.rounds.items()
        }
        return {**asdict(self), "figures": made}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Findings":
        """What `as_json` wrote."""
        kept = {name: value for name, value in found.items() if name != "figures"}
        kept["rounds"] = {
            task: {
                name: [Round(**{**one, "one": Usage(**one["one"]), "many": Usage(**one["many"])}) for one in rounds]
                for name, rounds in by_name.items()
            }
            for task, by_name in found["rounds"].items()
        }
        return cls(**kept)
