"""What the measurements are held against."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.perf.side_by_side.estimates import Estimate, Outcome, worst
from tests.perf.side_by_side.files import Cost
from tests.perf.side_by_side.payloads import PayloadCost

MOST_CPU = 2.0
LEAST_RATE = 0.5
MOST_ADDED_MS = 5.0
MOST_KB_IN_FLIGHT = 100.0
MOST_PASSES = 4.0
MOST_EXPONENT = 1.1
"""1 is linear; sorting and caches that are too small make a little more of it."""
TOLERANCE = 1.1
"""How much worse 1,024 in flight may be than 64: more sockets are more to look after."""


@dataclass
class Load:
    """Floor and product under the same load."""

    in_flight: int
    delay_ms: int
    replicas: int
    floor_per_s: float
    per_s: float
    floor_cpu_ms: float
    cpu_ms: float
    endpoint_cpu_ms: float
    cpu_ratios: list[float] = field(default_factory=list)
    """CPU per rollout over the floor's, round by round: both were measured one after the other."""
    rates: list[float] = field(default_factory=list)
    floor_rates: list[float] = field(default_factory=list)

    @property
    def cpu_ratio(self) -> Estimate:
        """CPU per rollout over the floor's."""
        return Estimate.of(self.cpu_ratios or [self.cpu_ms / self.floor_cpu_ms])

    @property
    def rate(self) -> Estimate:
        """Rollouts per second: the best round, and how far rounds are apart."""
        return Estimate(self.per_s, Estimate.of(self.rates or [self.per_s]).error)

    @property
    def floor_rate(self) -> Estimate:
        """The same of the floor."""
        return Estimate(self.floor_per_s, Estimate.of(self.floor_rates or [self.floor_per_s]).error)


@dataclass
class Findings:
    """Everything one run of the benchmark found."""

    loads: list[Load] = field(default_factory=list)
    large: list[Load] = field(default_factory=list)
    """The same with rollouts of 100 KB."""
    endpoint_per_s: float = 0.0
    """Requests per second that the endpoint alone answers."""
    added_ms: dict[int, list[float]] = field(default_factory=dict)
    """By rollouts in flight, round by round."""
    kb_in_flight: list[float] = field(default_factory=list)
    """Of memory per rollout, round by round."""
    start_up: dict[str, float] = field(default_factory=dict)
    files: list[Cost] = field(default_factory=list)
    payloads: list[PayloadCost] = field(default_factory=list)
    """Rollouts that carry much."""
    measured_again: list[str] = field(default_factory=list)
    """Parts that come from a later run of their own."""
    stolen_share: float = 0.0
    """Of the time of this machine's cores, what its hypervisor gave to others meanwhile: noise in all of the above."""

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Findings":
        """What `as_json` wrote."""
        kept = {name: value for name, value in found.items() if name != "targets"}
        kept["loads"] = [Load(**load) for load in found["loads"]]
        kept["large"] = [Load(**load) for load in found["large"]]
        kept["added_ms"] = {int(in_flight): value for in_flight, value in found["added_ms"].items()}
        kept["files"] = [
            Cost(
                cost["name"], tuple(cost["sizes"]), tuple(cost["cpu_s"]), cost["pass_s"], tuple(cost.get("ratios", ()))
            )
            for cost in found["files"]
        ]
        kept["payloads"] = [PayloadCost(**cost) for cost in found.get("payloads", ())]
        return cls(**kept)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        targets = [{"target": name, "found": found, "outcome": outcome} for name, found, outcome in self.verdicts()]
        return {**asdict(self), "targets": targets}

    def verdicts(self) -> list[tuple[str, str, Outcome]]:
        """Each target, what was found, and what became of it."""
        return [*self._of_loads(), *self._of_payloads(), *self._of_files()]

    def _of_loads(self) -> Iterator[tuple[str, str, Outcome]]:
        at = {(load.in_flight, load.delay_ms, load.replicas): load for load in self.loads}
        base, wide = at[64, 0, 1], at[1024, 0, 1]
        cpu = base.cpu_ratio
        yield f"CPU per rollout at most {MOST_CPU:g} x the floor (64 in flight)", f"{cpu} x", cpu.at_most(MOST_CPU)
        best = max((load for load in self.loads if load.delay_ms == 0), key=lambda load: load.per_s)
        rate = best.rate.over(max((load.floor_rate for load in self.loads), key=lambda rate: rate.value))
        yield (
            f"most rollouts/s at least {LEAST_RATE:g} x the floor's most",
            f"{rate} x ({best.per_s:.0f}/s, {best.in_flight} in flight, {best.replicas} replicas)",
            rate.at_least(LEAST_RATE),
        )
        yield (
            "1,024 in flight no worse than 64 (CPU per rollout over the floor's)",
            f"{wide.cpu_ratio} x against {base.cpu_ratio} x",
            wide.cpu_ratio.over(base.cpu_ratio).at_most(TOLERANCE),
        )
        added = {in_flight: Estimate.of(_readings(found)) for in_flight, found in self.added_ms.items()}
        yield (
            f"added to a rollout of a 200 ms model, median under {MOST_ADDED_MS:g} ms (64 in flight)",
            f"{added[64]} ms; with 256 in flight {added[256]} ms",
            added[64].at_most(MOST_ADDED_MS),
        )
        memory = Estimate.of(_readings(self.kb_in_flight))
        yield (
            f"memory per rollout in flight under {MOST_KB_IN_FLIGHT:g} KB",
            f"{memory} KB",
            memory.at_most(MOST_KB_IN_FLIGHT),
        )

    def _of_payloads(self) -> Iterator[tuple[str, str, Outcome]]:
        for cost in self.payloads:
            if cost.has_tokens:
                ratio = Estimate.of(cost.ratios)
                name = f"{cost.name}: at most {MOST_PASSES:g} x one orjson load and dump"
                yield name, f"{ratio} x", ratio.at_most(MOST_PASSES)

    def _of_files(self) -> Iterator[tuple[str, str, Outcome]]:
        for cost in self.files:
            yield (
                f"{cost.name}: linear, at most {MOST_PASSES:g} x one orjson pass",
                f"{cost.ratio} x, exponent {cost.exponent}",
                worst(cost.ratio.at_most(MOST_PASSES), cost.exponent.at_most(MOST_EXPONENT)),
            )


def _readings(found: Any) -> list[float]:
    return found if isinstance(found, list) else [found]
