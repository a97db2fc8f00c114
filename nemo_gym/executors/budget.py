"""Budgets that hold for all shards of a run together: what is left is divided evenly among those that run.

As with caps, a shard gets more only as others give it up, so what all may use never exceeds the limits. What is said
can be pickled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.collect.summary import RunSummary
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.read import records
from nemo_gym.runs.spending import Meter, prices_of


@dataclass(frozen=True)
class Budgets:
    """What all shards of a run may use together, and what they had used before; by option, as all amounts here."""

    limits: Mapping[str, float] = field(default_factory=dict)
    spent: Mapping[Shard, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class _Spender:
    spent: Mapping[str, float] = field(default_factory=dict)
    granted: dict[str, float] = field(default_factory=dict)
    in_force: Mapping[str, float] = field(default_factory=dict)
    is_here: bool = False

    def holds(self, name: str) -> float:
        used = self.spent.get(name, 0.0)
        return max(used, self.granted.get(name, 0.0), self.in_force.get(name, 0.0)) if self.is_here else used


class BudgetShares:
    """Who may use how much."""

    def __init__(self, budget: Budgets) -> None:
        self._limits = budget.limits
        self._spenders = {shard: _Spender(spent) for shard, spent in budget.spent.items()}

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Go on with other limits; what was granted beyond a lower one is not taken back, but no more is granted."""
        self._limits = {name: limits.get(name, limit) for name, limit in self._limits.items()}

    def exchange(self, shard: Shard, spent: Mapping[str, float], in_force: Mapping[str, float]) -> dict[str, float]:
        """What a shard says it has used and goes by, and what it may use from now on; the first time it joins."""
        own = self._spenders.setdefault(shard, _Spender())
        own.is_here = True
        own.spent, own.in_force = {**own.spent, **spent}, in_force
        here = sum(spender.is_here for spender in self._spenders.values())
        for name, limit in self._limits.items():
            used = own.spent.get(name, 0.0)
            left = limit - sum(spender.spent.get(name, 0.0) for spender in self._spenders.values())
            others = sum(spender.holds(name) for spender in self._spenders.values() if spender is not own)
            own.granted[name] = max(used, min(used + max(0.0, left) / here, limit - others))
        return dict(own.granted)

    def leave(self, shard: Shard) -> None:
        """A shard is over; what it has used stays used."""
        if shard in self._spenders:
            self._spenders[shard].is_here = False
            self._spenders[shard].granted = {}


def spent_before(config: RolloutCollectionConfig) -> dict[Shard, dict[str, float]]:
    """What the shards of a run to resume have used of its budgets: some of them may wait long before they start."""
    if not (config.budgets and config.resume_from_cache and config.num_shards):
        return {}
    found = {}
    for shard in (Shard(index, config.num_shards) for index in range(config.num_shards)):
        paths = RolloutPaths(shard.file(Path(config.output_jsonl_fpath)))
        manifest = read_manifest(paths.manifest)
        meter = Meter(prices_of(config.prices, () if manifest is None else manifest.models))
        for path in (paths.rollouts, paths.failures):
            for _, _, record in records(path, "skip", may_lack_key=True):
                meter.add(record)
        found[shard] = meter.amounts(config.budgets)
    return found


def add_spending(
    summary: RunSummary,
    config: RolloutCollectionConfig,
    ends: Mapping[Shard, Mapping[str, Any] | None],
    budget: Budgets,
) -> None:
    """What the shards have cost since this start, and used of the budgets in all, as the summaries of shards say."""
    summary.meter.prices = prices_of(config.prices)
    summary.budgets = dict(budget.limits)
    summary.counted_elsewhere = dict.fromkeys(config.budgets, 0.0)
    for shard, end in ends.items():
        if end is not None:
            summary.meter.cost_usd += end["cost_usd"] or 0.0
        for name in config.budgets:
            before = budget.spent.get(shard, {}).get(name, 0.0)
            summary.counted_elsewhere[name] += before if end is None else end["budgets"][name]["used"]
