"""What the runs behind the shards asked for: how many rollouts of whom, and which of them are not there.

A shard whose manifest counts as many rollouts as it has is complete, and nothing else is read. Otherwise
its materialized inputs say which rollouts are missing.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.rollouts.key_table import KeyTable, Missing
from nemo_gym.rollouts.manifest import Expected, RunManifest
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import agent_name_of, key_or_none
from nemo_gym.rollouts.shard_index import Indices, ShardIndex

logger = logging.getLogger(__name__)

MISSING_NAMED = 10


@dataclass
class Expectations:
    """What should be there."""

    by_agent: dict[str, Expected] = field(default_factory=dict)
    is_known: bool = True
    """False when a shard has neither manifest nor materialized inputs: then the counts are not all."""
    missing: Missing = field(default_factory=Missing)
    """Rollouts without a result, whether they failed or were never run."""
    missing_unnamed: int = 0
    """How many more are missing of which only the number is known."""

    def of(self, agent: str) -> Expected | None:
        """What one agent was asked for; None when that is not known."""
        return self.by_agent.get(agent, Expected()) if self.is_known else None


def find_expectations(
    index: ShardIndex,
    order: Indices,
    manifests: Mapping[Path, RunManifest],
    without_rollouts: Iterable[RolloutPaths] = (),
) -> Expectations:
    """Compare the records of `order` with what the shards' manifests and materialized inputs ask for."""
    table, found = KeyTable(), Expectations()
    shortfalls: list[tuple[str, Expected]] = []
    for shard, path in enumerate(index.paths):
        manifest, inputs = manifests.get(path), RolloutPaths(path).materialized_inputs
        own = _keys_of_shard(index, shard)
        there = own.per_agent()
        if manifest is not None and sum(of.rollouts for of in there.values()) == manifest.expected_rollouts:
            table.update(own)
        elif inputs.exists():
            _add_inputs(table, inputs)
        elif manifest is not None:
            table.update(own)
            shortfalls += _shortfalls(there, manifest)
        else:
            found.is_known = False
    for paths in without_rollouts:
        _add_inputs(table, paths.materialized_inputs)
    found.by_agent = table.per_agent()
    for agent, shortfall in shortfalls:
        expected = found.by_agent.setdefault(agent, Expected())
        expected.rollouts += shortfall.rollouts
        expected.tasks += shortfall.tasks
        found.missing_unnamed += shortfall.rollouts
    found.missing = table.missing_from(index.keys(order), MISSING_NAMED)
    return found


def _keys_of_shard(index: ShardIndex, shard: int) -> KeyTable:
    table = KeyTable()
    for agent in index.agents:
        if agent is not None:
            table.add_many(agent, index.keys(index.numbers_of(shard, agent)))
    return table


def _shortfalls(there: Mapping[str, Expected], manifest: RunManifest) -> list[tuple[str, Expected]]:
    """How much less there is of each agent than the manifest says."""
    found = []
    for agent, expected in manifest.agents.items():
        own = there.get(agent, Expected())
        rollouts, tasks = expected.rollouts - own.rollouts, expected.tasks - own.tasks
        found.append((agent, Expected(rollouts=max(0, rollouts), tasks=max(0, tasks))))
    return found


def _add_inputs(table: KeyTable, path: Path) -> None:
    unusable = 0
    for line in iter_lines(path):
        try:
            row = parse(line.content)
        except ValueError:
            row = None
        agent, key = (agent_name_of(row), key_or_none(row)) if isinstance(row, dict) else (None, None)
        if agent is None or key is None:
            unusable += 1
        else:
            table.add(agent, key)
    if unusable:
        logger.warning("%s: %d lines do not say which rollout of which agent they ask for", path, unusable)
