"""What the measurements are held against."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.perf.side_by_side.files import Cost

MOST_CPU = 2.0
LEAST_RATE = 0.5
MOST_ADDED_MS = 5.0
MOST_KB_IN_FLIGHT = 100.0
MOST_PASSES = 4.0
MOST_EXPONENT = 1.15
"""1 is linear; what is above it is noise at these sizes."""
TOLERANCE = 1.1
"""How much worse 1,024 in flight may look than 64 before it counts: two runs of the same differ by that."""


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

    @property
    def cpu_ratio(self) -> float:
        """CPU per rollout over the floor's."""
        return self.cpu_ms / self.floor_cpu_ms


@dataclass
class Findings:
    """Everything one run of the benchmark found."""

    loads: list[Load] = field(default_factory=list)
    large: list[Load] = field(default_factory=list)
    """The same with rollouts of 100 KB."""
    endpoint_per_s: float = 0.0
    """Requests per second that the endpoint alone answers."""
    added_ms: dict[int, float] = field(default_factory=dict)
    kb_in_flight: float = 0.0
    start_up: dict[str, float] = field(default_factory=dict)
    files: list[Cost] = field(default_factory=list)
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
            Cost(cost["name"], tuple(cost["sizes"]), tuple(cost["cpu_s"]), cost["pass_s"]) for cost in found["files"]
        ]
        return cls(**kept)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        targets = [{"target": name, "found": found, "is_met": is_met} for name, found, is_met in self.verdicts()]
        return {**asdict(self), "targets": targets}

    def verdicts(self) -> list[tuple[str, str, bool]]:
        """Each target, what was found, and whether it is met."""
        at = {(load.in_flight, load.delay_ms, load.replicas): load for load in self.loads}
        base, wide = at[64, 0, 1], at[1024, 0, 1]
        best = max((load for load in self.loads if load.delay_ms == 0), key=lambda load: load.per_s)
        rate_ratio = best.per_s / max(load.floor_per_s for load in self.loads)
        rows = [
            (
                f"CPU per rollout at most {MOST_CPU:g} x the floor (64 in flight)",
                f"{base.cpu_ratio:.2f} x",
                base.cpu_ratio <= MOST_CPU,
            ),
            (
                f"most rollouts/s at least {LEAST_RATE:g} x the floor's most",
                f"{rate_ratio:.2f} x ({best.per_s:.0f}/s, {best.in_flight} in flight, {best.replicas} replicas)",
                rate_ratio >= LEAST_RATE,
            ),
            (
                "1,024 in flight no worse than 64 (CPU per rollout over the floor's)",
                f"{wide.cpu_ratio:.2f} x against {base.cpu_ratio:.2f} x",
                wide.cpu_ratio <= TOLERANCE * base.cpu_ratio,
            ),
            (
                f"added to a rollout of a 200 ms model, median under {MOST_ADDED_MS:g} ms (64 in flight)",
                f"{self.added_ms[64]:.1f} ms; with 256 in flight {self.added_ms[256]:.1f} ms",
                self.added_ms[64] < MOST_ADDED_MS,
            ),
            (
                f"memory per rollout in flight under {MOST_KB_IN_FLIGHT:g} KB",
                f"{self.kb_in_flight:.0f} KB",
                self.kb_in_flight < MOST_KB_IN_FLIGHT,
            ),
        ]
        for cost in self.files:
            found = f"{cost.ratio:.1f} x, exponent {cost.exponent:.2f}"
            is_met = cost.ratio <= MOST_PASSES and cost.exponent <= MOST_EXPONENT
            rows.append((f"{cost.name}: linear, at most {MOST_PASSES:g} x one orjson pass", found, is_met))
        return rows
