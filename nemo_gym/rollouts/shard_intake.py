"""What the metrics need of every record, kept while the shards are read.

For an agent whose class has metrics of its own that is the record as `/aggregate_metrics` gets it; for all
others the numbers are enough.
"""

from array import array
from collections.abc import Callable

import numpy as np

from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.rollouts.aggregate import AgentRecords
from nemo_gym.rollouts.compact import without_garbage_collection
from nemo_gym.rollouts.record import Outcome, Result, key_or_none, outcome_of
from nemo_gym.rollouts.shard_index import Indices, ShardIndex
from nemo_gym.rollouts.shard_merge import Merged, OnDuplicate, records_in, settle_duplicates
from nemo_gym.rollouts.stored import stripped

NeedsRecords = Callable[[str], bool]


class Intake:
    """Takes records one by one; those that name no agent are only counted."""

    def __init__(self, needs_records: NeedsRecords) -> None:
        self.groups: dict[str, AgentRecords] = {}
        """Every agent, with the keys of what failed; its records only when they are sorted."""
        self.numbers: dict[str, RolloutTable] = {}
        """The numbers of the agents whose records are not needed."""
        self._records: dict[str, list[Result]] = {}
        self.scored = 0
        """Records that metrics are computed from."""
        self.without_agent = 0
        self._needs_records = needs_records
        self._positions: dict[str, array[int]] = {}

    @property
    def is_order_visible(self) -> bool:
        """Whether the numbers tell in which order the records came: those of bad records do, by naming them."""
        return any(table.bad.count for table in self.numbers.values())

    def take(self, number: int, agent: str | None, record: Result) -> None:
        """Keep what is needed of one record."""
        if agent is None:
            self.without_agent += 1
            return
        group = self.groups.get(agent)
        if group is None:
            group = self._new_group(agent)
        if outcome_of(record) is not Outcome.SUCCESS:
            key = key_or_none(record)
            if key is not None and isinstance(key.task_index, int):
                group.failed.add((key.task_index, key.rollout_index))
            return
        self.scored += 1
        if agent in self.numbers:
            self.numbers[agent].add(stripped(record))
        else:
            self._records[agent].append(stripped(record))
            self._positions[agent].append(number)

    def sort(self, order: Indices) -> None:
        """Bring the records that were kept into the order of their numbers in `order`."""
        ranks = np.zeros(int(order.max(initial=-1)) + 1, np.int64)
        ranks[order] = np.arange(len(order))
        for agent, records in self._records.items():
            places = np.argsort(ranks[np.array(self._positions[agent], np.int64)])
            self.groups[agent].records = [records[place] for place in places.tolist()]

    def _new_group(self, agent: str) -> AgentRecords:
        self.groups[agent] = AgentRecords()
        if self._needs_records(agent):
            self._records[agent], self._positions[agent] = [], array("q")
        else:
            self.numbers[agent] = RolloutTable()
        return self.groups[agent]


def read_shards(index: ShardIndex, needs_records: NeedsRecords, on_duplicate: OnDuplicate) -> tuple[Merged, Intake]:
    """Read the shards once and keep what the metrics need of the records that count, in key order.

    Only when some of the records do not count, or are bad and will be named, they are read again.

    Raises:
        MalformedLineError: a line is not a JSON object.
        DuplicateRolloutError: records of one rollout differ and nobody said which one counts.
    """
    intake = Intake(needs_records)
    with without_garbage_collection():
        index.read(intake.take)
        merged = settle_duplicates(index, on_duplicate)
        if merged.left_out or intake.is_order_visible:
            intake = Intake(needs_records)
            for number, record in records_in(index, merged.order):
                intake.take(number, index.agent_of(number), record)
        intake.sort(merged.order)
    return merged, intake
