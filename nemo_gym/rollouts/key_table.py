"""Rollout keys with their agents, in little memory: which are expected, and which of them are missing."""

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.metrics.columns import is_index
from nemo_gym.rollouts.manifest import Expected
from nemo_gym.rollouts.record import RolloutKey
from nemo_gym.rollouts.shard_index import Indices, Keys


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
