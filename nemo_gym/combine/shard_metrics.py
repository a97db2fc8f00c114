"""The metrics of every agent over all shards: where they come from, and what they need of the records.

An agent's metrics come from its server, or from hooks of its class that are at hand. For an agent whose class has
metrics of its own, records are kept as `/aggregate_metrics` gets them while the shards are read; as text where a server
gets them, which takes a tenth of the memory. For all others their numbers are enough.
"""

import logging
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from nemo_gym.collect.metrics import AgentMetrics, AgentRecords, AggregationError, ask_agents, coverage_of
from nemo_gym.combine.expectations import Expectations
from nemo_gym.combine.merge import Merged, OnDuplicate, leave_out_unasked, records_in, settle_duplicates
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.aggregate import aggregate_table, for_uneven_repeats
from nemo_gym.metrics.columns import REWARD, RolloutTable, SortedRollouts
from nemo_gym.metrics.hooks import ComputeMetrics, GetKeyMetrics, Metrics, means_of
from nemo_gym.metrics.profile import pooled_statistics, task_profiles
from nemo_gym.runs.index import Indices, RecordIndex, sendable, stripped
from nemo_gym.runs.record import (
    KeySet,
    Outcome,
    Result,
    has_usable_reward,
    key_or_none,
    outcome_of,
    without_garbage_collection,
)
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics

logger = logging.getLogger(__name__)


class Keeps(Enum):
    """What metrics need of an agent's records."""

    NUMBERS = "numbers"
    RECORDS = "records"
    TEXT = "text"
    """Of the records, to be sent."""


KeepsOf = Callable[[str], Keeps]
_SCORE = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, REWARD)
_HEAD, _TAIL = b'{"verify_responses":[', b"]}"
_AT_A_TIME = 256
_PER_TASK_METRICS = "per_task_metrics"


class Hooks(NamedTuple):
    """What a class adds to the metrics that every agent has."""

    compute_metrics: ComputeMetrics | None = None
    """None when it has no metrics of its own: then the numbers of its records are enough."""
    get_key_metrics: GetKeyMetrics | None = None
    """None for the means."""


class MetricsSource(Protocol):
    """Whoever knows how the agents' metrics are computed."""

    def hooks_of(self, agent: str) -> Hooks | None:
        """The hooks of an agent's class; None when it has to be asked."""

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """What the agent's `/aggregate_metrics` answers to these records."""


def needs_records(source: MetricsSource, agent: str) -> bool:
    """Whether whole records are needed to compute the agent's metrics."""
    hooks = source.hooks_of(agent)
    return hooks is None or hooks.compute_metrics is not None


def keeps_of(source: MetricsSource, agent: str) -> Keeps:
    """What is needed of the agent's records to compute its metrics."""
    if not needs_records(source, agent):
        return Keeps.NUMBERS
    return Keeps.TEXT if source.hooks_of(agent) is None else Keeps.RECORDS


def request_of(records: Collection[Result]) -> dict[str, Any]:
    """The request for metrics, as an HTTP client takes it."""
    texts = records.texts() if isinstance(records, RecordTexts) else map(sendable, records)
    body = _HEAD + b",".join(texts) + _TAIL
    return {"data": body, "headers": {"Content-Type": "application/json"}}


def as_sent(record: Result) -> Result:
    """A record as it arrives at a server."""
    try:
        orjson.dumps(record)
    except orjson.JSONEncodeError:
        arrived: Result = orjson.loads(sendable(record))
        return arrived
    return record


class RecordTexts(Collection[Result]):
    """Stripped records as they are sent, one after the other in one piece of memory; each iteration reads them."""

    def __init__(self) -> None:
        self.scores = RolloutTable()
        """The numbers that coverage rests on, once the records are in order."""
        self._scores: list[Result] = []
        self._text = bytearray()
        self._ends = array("q", (0,))
        self._order = array("q")

    def append(self, record: Result) -> None:
        """Take one more."""
        self._order.append(len(self._order))
        self._text += sendable(record)
        self._ends.append(len(self._text))
        self._scores.append(_score(record))

    def in_order(self, places: list[int]) -> "RecordTexts":
        """The same, brought into that order."""
        self._order = array("q", places)
        self.scores = _read([self._scores[place] for place in places])[0]
        self._scores.clear()
        return self

    def texts(self) -> Iterator[bytes]:
        """Each record as JSON."""
        for place in self._order:
            yield bytes(self._text[self._ends[place] : self._ends[place + 1]])

    def as_request(self) -> dict[str, Any]:
        """The request for metrics, which is sent piece by piece."""
        length = len(_HEAD) + len(self._text) + max(0, len(self) - 1) + len(_TAIL)
        headers = {"Content-Type": "application/json", "Content-Length": str(length)}
        return {"data": self._pieces(), "headers": headers}

    async def _pieces(self) -> AsyncIterator[bytes]:
        texts = self.texts()
        piece = _HEAD
        while some := list(islice(texts, _AT_A_TIME)):
            yield piece + b",".join(some)
            piece = b","
        yield (_HEAD if piece == _HEAD else b"") + _TAIL

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Result]:
        return map(orjson.loads, self.texts())

    def __contains__(self, record: object) -> bool:
        return any(other == record for other in self)


class Intake:
    """Takes records one by one; those that name no agent are only counted."""

    def __init__(self, keeps: KeepsOf) -> None:
        self.groups: dict[str, AgentRecords] = {}
        """Every agent, with the keys of what failed; its records only when they are sorted."""
        self.numbers: dict[str, RolloutTable] = {}
        """The numbers of the agents whose records are not needed."""
        self._records: dict[str, list[Result] | RecordTexts] = {}
        self.scored = 0
        """Records that metrics are computed from."""
        self.without_agent = 0
        self.without_reward = 0
        """Records whose reward is no finite number; they are part of no score."""
        self._keeps = keeps
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
        group.percentiles.add(record)
        self.without_reward += not has_usable_reward(record)
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
            places = np.argsort(ranks[np.array(self._positions[agent], np.int64)]).tolist()
            if isinstance(records, RecordTexts):
                self.groups[agent].records = records.in_order(places)
            else:
                self.groups[agent].records = [records[place] for place in places]

    def _new_group(self, agent: str) -> AgentRecords:
        self.groups[agent] = AgentRecords()
        keeps = self._keeps(agent)
        if keeps is Keeps.NUMBERS:
            self.numbers[agent] = RolloutTable()
        else:
            self._records[agent], self._positions[agent] = RecordTexts() if keeps is Keeps.TEXT else [], array("q")
        return self.groups[agent]


def read_shards(
    index: RecordIndex,
    keeps: KeepsOf,
    on_duplicate: OnDuplicate,
    asked: Mapping[int, KeySet] | None = None,
) -> tuple[Merged, Intake]:
    """Read the shards once and keep what the metrics need of the records that count, in key order.

    Only when some of the records do not count, or are bad and will be named, they are read again. `asked` has the
    rollouts that are asked for of the files, by their place, that hold others, too.

    Raises:
        MalformedLineError: a line is not a JSON object.
        DuplicateRolloutError: records of one rollout differ and nobody said which one counts.
    """
    intake = Intake(keeps)
    with without_garbage_collection():
        index.read(intake.take)
        merged = leave_out_unasked(index, settle_duplicates(index, on_duplicate), asked or {})
        if merged.left_out or intake.is_order_visible:
            intake = Intake(keeps)
            for number, record in records_in(index, merged.order):
                intake.take(number, index.agent_of(number), record)
        intake.sort(merged.order)
    return merged, intake


async def compute_metrics(intake: Intake, source: MetricsSource, expectations: Expectations) -> list[AgentMetrics]:
    """The metrics of every agent that has records, sorted by name.

    Raises:
        AggregationError: agents could not say what their metrics are; all of them are named.
    """
    hooks_of = {agent: source.hooks_of(agent) for agent in intake.groups if _has_records(agent, intake)}
    to_ask = {agent: AgentRecords(intake.groups[agent].records) for agent, hooks in hooks_of.items() if hooks is None}
    answers = {of_agent.agent: of_agent for of_agent in await ask_agents(to_ask, source.ask)}
    return [
        _from_answer(agent, answers.get(agent), intake, expectations)
        if hooks is None
        else _from_hooks(agent, hooks, intake, expectations)
        for agent, hooks in sorted(hooks_of.items(), key=lambda item: item[0])
    ]


def _has_records(agent: str, intake: Intake) -> bool:
    table = intake.numbers.get(agent)
    return len(intake.groups[agent].records) > 0 or (table is not None and (len(table) > 0 or table.bad.count > 0))


def _from_answer(agent: str, answer: AgentMetrics | None, intake: Intake, expectations: Expectations) -> AgentMetrics:
    metrics = AggregateMetrics() if answer is None else answer.metrics
    group = intake.groups[agent]
    records = group.records
    scores = records.scores if isinstance(records, RecordTexts) else _read(list(map(_score, records)))[0]
    coverage = _coverage(agent, scores, group, expectations)
    if group.stops_when is not None:
        metrics = for_uneven_repeats(metrics, _read([as_sent(record) for record in group.records])[0], group.stops_when)
    of_tasks = None if answer is None else answer.groups
    return AgentMetrics(agent, metrics, coverage, of_tasks, group.percentiles.as_json())


def _from_hooks(agent: str, hooks: Hooks, intake: Intake, expectations: Expectations) -> AgentMetrics:
    group, table = intake.groups[agent], intake.numbers.get(agent)
    usable: list[Result] = []
    if table is None:
        table, usable = _read([as_sent(record) for record in group.records])
    coverage = _coverage(agent, table, group, expectations)
    try:
        if hooks.compute_metrics is None:
            metrics = _from_numbers(agent, table, hooks, coverage)
        else:
            metrics = _from_records(agent, table, usable, hooks, coverage)
    except Exception as error:
        raise AggregationError(f"agent {agent!r}: its class failed to compute its metrics: {error!r}") from error
    if group.stops_when is not None:
        metrics = replace(metrics, metrics=for_uneven_repeats(metrics.metrics, table, group.stops_when))
    return replace(metrics, percentiles=group.percentiles.as_json())


def _read(records: Sequence[Result]) -> tuple[RolloutTable, list[Result]]:
    """The numbers of the records, and those records that have any."""
    table = RolloutTable()
    return table, [record for record in records if table.add(record)]


def _score(record: Result) -> Result:
    """The part of a record that coverage rests on."""
    return {name: record[name] for name in _SCORE if name in record}


def _coverage(agent: str, table: RolloutTable, group: AgentRecords, expectations: Expectations) -> dict[str, Any]:
    return coverage_of(table, group, expectations.of(agent))


def _from_records(
    agent: str, table: RolloutTable, records: list[Result], hooks: Hooks, coverage: dict[str, Any]
) -> AgentMetrics:
    returned: list[Metrics] = []

    def compute(tasks: list[list[Result]]) -> Metrics:
        assert hooks.compute_metrics is not None
        returned.append(dict(hooks.compute_metrics(tasks) or {}))
        return returned[-1]

    metrics = aggregate_table(table, records, compute, hooks.get_key_metrics)
    groups = metrics.group_level_metrics
    if any(_PER_TASK_METRICS in custom for custom in returned):
        groups = _as_over_http(AggregateMetrics.model_construct(group_level_metrics=groups)).group_level_metrics
    rest = _as_over_http(
        AggregateMetrics.model_construct(agent_metrics=metrics.agent_metrics, key_metrics=metrics.key_metrics)
    )
    return AgentMetrics(agent, rest, coverage, groups)


def _from_numbers(agent: str, table: RolloutTable, hooks: Hooks, coverage: dict[str, Any]) -> AgentMetrics:
    """What `compute_aggregate_metrics` answers, with the tasks' profiles made only when they are written."""
    rollouts = SortedRollouts(table)
    agent_metrics: Metrics = pooled_statistics(rollouts) if len(rollouts) else {}
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(hooks, agent_metrics, rollouts) if len(rollouts) else {}
    plain = _as_over_http(AggregateMetrics.model_construct(agent_metrics=agent_metrics, key_metrics=key_metrics))
    return AgentMetrics(agent, plain, coverage, task_profiles(rollouts))


def _headline(hooks: Hooks, agent_metrics: Metrics, rollouts: SortedRollouts) -> Metrics:
    try:
        return (hooks.get_key_metrics or means_of)(agent_metrics)
    except Exception as error:
        if not rollouts.bad.count:
            raise
        logger.warning("get_key_metrics failed on records of which some are bad (%r); reporting the means", error)
        return means_of(agent_metrics)


def _as_over_http(metrics: AggregateMetrics) -> AggregateMetrics:
    """Metrics as they arrive when a server sends them, whatever an author's hooks put into them."""
    sent = metrics.model_dump_json(by_alias=True, warnings=False)
    return AggregateMetrics.model_construct(**orjson.loads(sent))
