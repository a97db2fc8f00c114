"""Runs of a million to a billion rollouts over up to ten thousand nodes, simulated: what becomes the limit, and when.

    python tests/perf/simulate_scale.py            # the tables of docs/scaling.md
    python tests/perf/simulate_scale.py mine.json  # with costs measured elsewhere (scale_costs.py)

Discrete events: shards start, read the input, collect in portions, drain, and end; nodes fail and come back. What the
code costs is measured; what a model, a node and a file system do is assumed, and named in `Scenario`.
"""

import heapq
import json
import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

COSTS = Path(__file__).parent / "data" / "scale_costs.json"
_PORTIONS = 10
_SYNC_EVERY_S = 5.0
_REPORTS_PER_S = 400
_LOOKS_PER_S = 2.0
_INDEX_BYTES = 48
_NORMAL = NormalDist()


class Costs(NamedTuple):
    """Measured; see scale_costs.py."""

    row_s: float
    row_bytes: float
    rollout_cpu_s: float
    shard_start_s: float
    aggregate_s: float
    report_s: float
    look_s_per_shard: float


@dataclass(frozen=True)
class Scenario:
    """A run, and assumptions about what it runs on."""

    rollouts: int
    nodes: int
    shards_per_node: int = 1
    repeats: int = 16
    mean_s: float = 60.0
    """A rollout, while the endpoint is not overloaded."""
    sigma: float = 1.0
    """Of the logarithm of its duration: one in a hundred takes 6 times the mean, one in a million 70 times."""
    timeout_s: float = 1_800.0
    rollout_bytes: float = 20_000.0
    slots_per_node: int = 256
    """Rollouts a shard may have in flight."""
    endpoint_slots: int | None = None
    """Rollouts that all endpoints together serve at full speed; None when they grow with the nodes."""
    storage_bytes_per_s: float = 50e9
    """Of the shared file system; one node reads and writes at `node_bytes_per_s`."""
    node_bytes_per_s: float = 2e9
    node_fails_every_s: float = 2 * 365 * 86_400.0
    node_back_after_s: float = 600.0
    splits_input: bool = False
    """Whether the input was cut beforehand, so that a shard reads only its own rows."""

    @property
    def shards(self) -> int:
        return self.nodes * self.shards_per_node

    @property
    def tasks(self) -> int:
        return max(1, self.rollouts // self.repeats)


@dataclass
class Outcome:
    """How a simulated run went."""

    scenario: Scenario
    costs: Costs
    collected_s: float = 0.0
    """Until the last shard ended."""
    failures: int = 0
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Node time by what it was spent on."""

    @property
    def ideal_s(self) -> float:
        """All rollouts at full speed on all slots, and nothing else."""
        slots = self.scenario.nodes * self.scenario.slots_per_node
        served = min(slots, self.scenario.endpoint_slots or slots)
        return self.scenario.rollouts * self.scenario.mean_s / served

    @property
    def merge_s(self) -> float:
        """The driver's merge and metrics: one core, and three times over the data."""
        data_s = 3 * self.scenario.rollouts * self.scenario.rollout_bytes / self.scenario.node_bytes_per_s
        return max(self.scenario.rollouts * self.costs.aggregate_s, data_s)

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.collected_s

    @property
    def limit(self) -> str:
        """What most of the time beyond the ideal went into."""
        waste = {name: spent for name, spent in self.busy_s.items() if name != "rollouts"}
        if self.merge_s > self.collected_s:
            return "merge"
        name = max(waste, key=waste.__getitem__)
        return name if waste[name] > 0.1 * sum(self.busy_s.values()) else "endpoints"


class _Rates(NamedTuple):
    """Rollouts per second of a shard, by what could hold it up."""

    endpoint: float
    processor: float
    storage: float


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, costs: Costs, seed: int = 0) -> None:
        self._scenario, self._costs = scenario, costs
        self._random = random.Random(seed)
        self._mu = math.log(scenario.mean_s) - scenario.sigma**2 / 2
        self._events: list[tuple[float, int, int, int]] = []
        """(when, order, node, the attempt it belongs to)"""
        self._order = 0
        self._waiting = deque(self._shares())
        self._left: list[int] = [0] * scenario.nodes
        self._attempt: list[int] = [0] * scenario.nodes
        self._running = 0
        self._outcome = Outcome(scenario, costs)
        self._ended_s: list[float] = [0.0] * scenario.nodes

    def run(self) -> Outcome:
        """Play it to its end."""
        scenario, outcome = self._scenario, self._outcome
        for node in range(scenario.nodes):
            self._next_shard(node, 0.0)
        while self._events:
            now_s, _, node, attempt = heapq.heappop(self._events)
            if attempt == self._attempt[node]:
                outcome.collected_s = max(outcome.collected_s, now_s)
                self._portion(node, now_s)
        outcome.busy_s["stragglers"] += sum(outcome.collected_s - ended_s for ended_s in self._ended_s)
        return outcome

    def _shares(self) -> Iterator[int]:
        """Rollouts of each shard: tasks are dealt out one by one, with all their repeats."""
        scenario = self._scenario
        for shard in range(scenario.shards):
            yield (scenario.tasks // scenario.shards + (shard < scenario.tasks % scenario.shards)) * scenario.repeats

    def _next_shard(self, node: int, now_s: float) -> None:
        if not self._waiting:
            self._ended_s[node] = now_s
            return
        self._left[node] = self._waiting.popleft()
        self._running += 1
        reading_s = self._costs.shard_start_s + self._reading_s()
        self._outcome.busy_s["input"] += reading_s
        self._schedule(node, now_s + reading_s)

    def _reading_s(self) -> float:
        """Two passes over the input, all shards of a round at the same time."""
        scenario, costs = self._scenario, self._costs
        rows = scenario.tasks / (scenario.shards if scenario.splits_input else 1)
        share = min(scenario.node_bytes_per_s, scenario.storage_bytes_per_s / scenario.nodes)
        return max(rows * costs.row_s, 2 * rows * costs.row_bytes / share)

    def _portion(self, node: int, now_s: float) -> None:
        """The rollouts of a shard go on by a portion, or end, or are lost with their node."""
        scenario, outcome = self._scenario, self._outcome
        left = self._left[node]
        if left <= 0:
            self._running -= 1
            self._next_shard(node, now_s)
            return
        size = min(left, max(1, -(-left // 2) if left > 2 * scenario.slots_per_node else left))
        size = min(size, max(scenario.slots_per_node, scenario.rollouts // scenario.shards // _PORTIONS))
        rates = self._rates()
        rate = min(rates)
        spread = self._random.gauss(0.0, 1.0) * math.sqrt((math.exp(scenario.sigma**2) - 1) / size)
        steady_s = max(0.1, size / rate * (1 + spread))
        drain_s = self._drain_s(size) if size == left else 0.0
        lives_s = self._random.expovariate(1 / scenario.node_fails_every_s)
        if lives_s < steady_s + drain_s:
            written = int(size * min(1.0, lives_s / steady_s)) - scenario.slots_per_node
            self._left[node] = left - max(0, written)
            self._fail(node, now_s + lives_s)
            return
        outcome.busy_s["rollouts"] += steady_s * rate / rates.endpoint
        outcome.busy_s["processor" if rate == rates.processor else "storage"] += steady_s * (1 - rate / rates.endpoint)
        outcome.busy_s["stragglers"] += drain_s
        self._left[node] = left - size
        self._schedule(node, now_s + steady_s + drain_s)

    def _rates(self) -> _Rates:
        scenario = self._scenario
        slots = float(scenario.slots_per_node)
        if scenario.endpoint_slots is not None:
            slots = min(slots, scenario.endpoint_slots / max(1, self._running))
        storage = scenario.storage_bytes_per_s / max(1, self._running) / scenario.rollout_bytes
        return _Rates(slots / scenario.mean_s, 1 / self._costs.rollout_cpu_s, storage)

    def _drain_s(self, size: int) -> float:
        """How long the slowest of the rollouts in flight takes beyond an average one, when no new ones start."""
        in_flight = min(size, self._scenario.slots_per_node)
        quantile = self._random.random() ** (1 / in_flight)
        slowest_s = math.exp(self._mu + self._scenario.sigma * _NORMAL.inv_cdf(min(quantile, 1 - 1e-12)))
        return max(0.0, min(slowest_s, self._scenario.timeout_s) - self._scenario.mean_s / 2)

    def _fail(self, node: int, now_s: float) -> None:
        """What was in flight is lost; the shard goes to whoever is free, this node when it is back."""
        self._outcome.failures += 1
        self._attempt[node] += 1
        self._running -= 1
        self._waiting.append(self._left[node])
        self._next_shard(node, now_s + self._scenario.node_back_after_s)

    def _schedule(self, node: int, when_s: float) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, node, self._attempt[node]))


def read_costs(path: Path = COSTS) -> Costs:
    """What scale_costs.py has measured."""
    return Costs(**json.loads(path.read_text()))


def simulate(scenario: Scenario, costs: Costs) -> Outcome:
    """Play one run."""
    return Simulation(scenario, costs).run()


def tables(costs: Costs) -> str:
    """Every table of the page, in Markdown."""
    from tests.perf.scale_tables import all_tables

    return all_tables(costs)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    print(tables(read_costs(*map(Path, sys.argv[1:]))))
