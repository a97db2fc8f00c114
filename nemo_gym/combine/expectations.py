"""What the runs behind the shards asked for: how many rollouts of whom, and which of them are not there.

A shard whose manifest counts as many rollouts as it has is complete, and nothing else is read. Otherwise, and where
some are no longer asked for, its materialized inputs say which rollouts are missing. Keys are kept in arrays, so that
millions of them fit into little memory.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.columns import is_index
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import Indices, Keys, RecordIndex
from nemo_gym.runs.manifest import Expected, RunManifest
from nemo_gym.runs.read import records
from nemo_gym.runs.record import RolloutKey, agent_name_of
from nemo_gym.runs.repeats import not_needed_in

logger = logging.getLogger(__name__)

MISSING_NAMED = 10


@dataclass(frozen=True)
class Missing:
    """Rollouts that should be there and are not."""

    number: int = 0
    first: tuple[RolloutKey, ...] = ()
    """The first few of them, in key order."""


class KeyTable:
    """A set of (agent, task, rollout)."""

    def __init__(self) -> None:
        self._agents: dict[str, int] = {}
        self._agent_ids = array("q")
        self._tasks = array("q")
        self._rollouts = array("q")
        self._odd: set[tuple[str, RolloutKey]] = set()
        """Those whose indices are not whole numbers."""

    def add(self, agent: str, key: RolloutKey) -> None:
        """Put one rollout in; again changes nothing."""
        if not (is_index(key.task_index) and is_index(key.rollout_index)):
            self._odd.add((agent, key))
            return
        self._agent_ids.append(self._agents.setdefault(agent, len(self._agents)))
        self._tasks.append(key.task_index)
        self._rollouts.append(key.rollout_index)

    def add_many(self, agent: str, keys: Keys) -> None:
        """Put rollouts of one agent in."""
        if len(keys.tasks):
            agent_id = self._agents.setdefault(agent, len(self._agents))
            self._agent_ids.frombytes(np.full(len(keys.tasks), agent_id, np.int64).tobytes())
            self._tasks.frombytes(keys.tasks.tobytes())
            self._rollouts.frombytes(keys.rollouts.tobytes())
        self._odd.update((agent, key) for key in keys.odd)

    def update(self, other: "KeyTable") -> None:
        """Put everything of `other` in."""
        own_id = [self._agents.setdefault(agent, len(self._agents)) for agent in other._agents]
        self._agent_ids.extend(own_id[number] for number in other._agent_ids)
        self._tasks.extend(other._tasks)
        self._rollouts.extend(other._rollouts)
        self._odd |= other._odd

    def per_agent(self) -> dict[str, Expected]:
        """How many tasks and rollouts each agent has."""
        agents, tasks, rollouts = map(_numbers, (self._agent_ids, self._tasks, self._rollouts))
        agents, tasks, rollouts = distinct(agents, tasks, rollouts)
        rollouts_of = np.bincount(agents, minlength=len(self._agents)).tolist()
        tasks_of = np.bincount(distinct(agents, tasks)[0], minlength=len(self._agents)).tolist()
        found = {
            agent: Expected(rollouts=rollouts_of[number], tasks=tasks_of[number])
            for agent, number in self._agents.items()
        }
        odd_rollouts: Counter[str] = Counter(agent for agent, _ in self._odd)
        odd_tasks: Counter[str] = Counter(agent for agent, _ in {(agent, key.task_index) for agent, key in self._odd})
        for agent, count in odd_rollouts.items():
            of_agent = found.setdefault(agent, Expected())
            of_agent.rollouts += count
            of_agent.tasks += odd_tasks[agent]
        return found

    def missing_from(self, given: Keys, named: int) -> Missing:
        """Which keys of this table are not among those given; the first `named` of them by name."""
        tasks, rollouts, odd = given
        own_tasks, own_rollouts = _numbers(self._tasks), _numbers(self._rollouts)
        is_own = np.concatenate([np.zeros(len(tasks), np.int64), np.ones(len(own_tasks), np.int64)])
        all_tasks, all_rollouts = np.concatenate([tasks, own_tasks]), np.concatenate([rollouts, own_rollouts])
        order = np.lexsort((is_own, all_rollouts, all_tasks))
        is_own, all_tasks, all_rollouts = is_own[order], all_tasks[order], all_rollouts[order]
        # Where a key is given, the given one comes first of its run.
        lacking = np.flatnonzero(_begins(all_tasks, all_rollouts) & (is_own == 1))
        odd_lacking = sorted({key for _, key in self._odd} - odd, key=repr)
        pairs = zip(all_tasks[lacking[:named]].tolist(), all_rollouts[lacking[:named]].tolist(), strict=True)
        first = [*(RolloutKey(task, rollout) for task, rollout in pairs), *odd_lacking][:named]
        return Missing(len(lacking) + len(odd_lacking), tuple(first))


def distinct(*columns: Indices) -> tuple[Indices, ...]:
    """The different rows of a table of numbers, sorted by the first column, then the second, and so on."""
    order = np.lexsort(columns[::-1])
    ordered = tuple(column[order] for column in columns)
    begins = _begins(*ordered)
    return tuple(column[begins] for column in ordered)


def _begins(*ordered: Indices) -> NDArray[np.bool_]:
    """Where a row differs from the one before."""
    begins = np.zeros(len(ordered[0]), bool)
    begins[:1] = True
    for column in ordered:
        begins[1:] |= column[1:] != column[:-1]
    return begins


def _numbers(values: "array[Any]") -> Indices:
    return np.array(values, np.int64)


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
    index: RecordIndex,
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
        if manifest is not None and manifest.is_narrowed and inputs.exists():
            _add_inputs(table, inputs)
        elif manifest is not None and sum(of.rollouts for of in there.values()) == manifest.expected_rollouts:
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
    given = _with_those_not_needed(index.keys(order), manifests.values())
    found.missing = table.missing_from(given, MISSING_NAMED)
    return found


def _with_those_not_needed(given: Keys, manifests: Iterable[RunManifest]) -> Keys:
    """The same and what nobody misses: repeats of tasks that were decided without them."""
    keys = [key for each in manifests for of_agent in not_needed_in(each.not_needed).values() for key in of_agent]
    if not keys:
        return given
    tasks, rollouts = np.array(keys, np.int64).T
    return given._replace(
        tasks=np.concatenate([given.tasks, tasks]), rollouts=np.concatenate([given.rollouts, rollouts])
    )


def _keys_of_shard(index: RecordIndex, shard: int) -> KeyTable:
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

    def count(_: object) -> None:
        nonlocal unusable
        unusable += 1

    for key, line, row in records(path, "skip", on_skipped=count):
        agent = agent_name_of(row)
        if agent is None:
            count(line)
        else:
            table.add(agent, key)
    if unusable:
        logger.warning("%s: %d lines do not say which rollout of which agent they ask for", path, unusable)
