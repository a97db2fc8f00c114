"""The metrics of a run: each agent is asked for those of its rollouts, and one file holds the answers.

Only finished rollouts take part. Beside the four parts that the agents' answers make up, every entry
says how much of the run it rests on (`coverage`), how long its rollouts took and what they used (`percentiles`).
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym.errors import GymError
from nemo_gym.jsonl import array_portions
from nemo_gym.metrics.aggregate import ANSWER_START, for_uneven_repeats
from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.metrics.intervals import compute_coverage
from nemo_gym.paths import write_aside
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import StoredRollouts, sendable, stripped
from nemo_gym.runs.manifest import Expected
from nemo_gym.runs.record import NG_FAILURE_CLASS_KEY, FailureClass, Result, agent_name_of, key_or_none
from nemo_gym.runs.spending import Percentiles, Prices
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest

logger = logging.getLogger(__name__)

AGGREGATE_PATH = "/aggregate_metrics"
_LOGGED_TYPES = (bool, int, float, str, type(None))
_INDENT = b"  "
_BEFORE_GROUPS, _AFTER_GROUPS = ANSWER_START, b'],"agent_metrics":'
_LARGE_BYTES = 1_000_000
_GROUPS_AT_A_TIME = 256
_END_OF_GROUPS = b"\n    ]"
_COUNTED = ("expected", "scored", "failed", "missing", "stragglers", "not_needed")
Ask = Callable[[str, Collection[Result]], Awaitable[object]]
"""(agent, stripped records) -> what the agent's `/aggregate_metrics` answered."""


class AggregationError(GymError):
    """An agent could not say what its metrics are; the rollouts are safe."""


@dataclass
class AgentRecords:
    """What one agent's metrics are computed from."""

    records: Collection[Result] = field(default_factory=list)
    """Stripped results: a list, or `StoredRollouts`."""
    failed: set[tuple[int, int]] = field(default_factory=set)
    """Keys of rollouts that failed."""
    expected: Expected | None = None
    repeats: int | None = None
    """How many rollouts of a row were asked for; None when that is not known, or not the same everywhere."""
    stragglers: set[tuple[int, int]] = field(default_factory=set)
    """Those of the failed that were too slow for the run."""
    stops_when: str | None = None
    """The condition under which repeats of a task stop; None where all are made."""
    not_needed: set[tuple[int, int]] = field(default_factory=set)
    """Keys of repeats that were not made because of it."""
    percentiles: Percentiles = field(default_factory=Percentiles)


@dataclass
class AgentMetrics:
    """The metrics of one agent, as the file has them."""

    agent: str
    metrics: AggregateMetrics
    coverage: dict[str, Any] | None = None
    groups: Iterable[Mapping[str, Any]] | None = None
    """In place of `metrics.group_level_metrics`: one per task, read once, when the file is written."""
    percentiles: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    """In US dollars, where prices are known."""

    def as_entry(self) -> dict[str, Any]:
        """One object of the metrics file."""
        entry: dict[str, Any] = {
            "agent_ref": {"name": self.agent},
            "agent_metrics": self.metrics.agent_metrics,
            "key_metrics": self.metrics.key_metrics,
            "group_level_metrics": self.metrics.group_level_metrics if self.groups is None else list(self.groups),
        }
        return {**entry, **self.additions()}

    def additions(self) -> dict[str, Any]:
        """What the entry has beside the agent's answer."""
        found = {"coverage": self.coverage, "percentiles": self.percentiles or None, "cost": self.cost}
        return {name: value for name, value in found.items() if value is not None}

    def without_groups(self) -> "AgentMetrics":
        """What is shown of them: all but the part of each task."""
        shown = AggregateMetrics(agent_metrics=self.metrics.agent_metrics, key_metrics=self.metrics.key_metrics)
        return AgentMetrics(self.agent, shown, self.coverage, percentiles=self.percentiles, cost=self.cost)


class LargeAnswer:
    """What an agent answered, with the metrics of tasks left as they came; each iteration reads them."""

    def __init__(self, body: bytes) -> None:
        """Find the metrics of tasks in `body`, and read the rest.

        Raises:
            ValueError: this is no answer that can be taken apart.
        """
        self._body, self._end = body, body.rfind(_AFTER_GROUPS)
        if not body.startswith(_BEFORE_GROUPS) or self._end < 0:
            raise ValueError
        self.rest: dict[str, Any] = orjson.loads(b"{" + body[self._end + len(b"],") :])
        for _ in array_portions(body, len(_BEFORE_GROUPS), self._end):
            pass

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(array_portions(self._body, len(_BEFORE_GROUPS), self._end))


def large_answer(body: bytes) -> LargeAnswer | None:
    """A long answer to a request for metrics; None when it is short, or has to be read as a whole."""
    if isinstance(body, bytes) and len(body) >= _LARGE_BYTES:  # stand-ins for answers may have text
        with suppress(ValueError):
            return LargeAnswer(body)
    return None


def group_by_agent(records: Iterable[Mapping[str, Any]]) -> dict[str, AgentRecords]:
    """Stripped records of each agent; those that name no agent are left out."""
    groups: dict[str, list[Result]] = {}
    for record in records:
        agent = agent_name_of(record)
        if agent is not None:
            groups.setdefault(agent, []).append(stripped(record))
    return {agent: AgentRecords(of_agent) for agent, of_agent in groups.items()}


def add_failures(groups: Mapping[str, AgentRecords], failures: Iterable[Mapping[str, Any]]) -> None:
    """Note which rollouts failed, for `coverage`, and what that has cost."""
    for failure in failures:
        agent, key = agent_name_of(failure), key_or_none(failure)
        group = groups.get(agent) if agent is not None else None
        if group is None:
            continue
        group.percentiles.add_failed(failure)
        if key is not None and isinstance(key.task_index, int):
            group.failed.add((key.task_index, key.rollout_index))
            is_straggler = failure.get(NG_FAILURE_CLASS_KEY) == FailureClass.STRAGGLER
            (group.stragglers.add if is_straggler else group.stragglers.discard)((key.task_index, key.rollout_index))


def add_costs(metrics: Iterable[AgentMetrics], groups: Mapping[str, AgentRecords], prices: Prices | None) -> None:
    """Say of each agent what its rollouts have cost, if prices are known."""
    if prices is not None:
        for of_agent in metrics:
            of_agent.cost = prices.of_rollouts(groups[of_agent.agent].percentiles)


def request_arguments(records: Collection[Result]) -> dict[str, Any]:
    """The request for metrics of `records`, as an HTTP client takes it; stored rollouts are sent as they are read."""
    if not isinstance(records, StoredRollouts):
        return {"json": AggregateMetricsRequest(verify_responses=[orjson.loads(sendable(it)) for it in records])}
    headers = {"Content-Type": "application/json", "Content-Length": str(records.body_bytes)}
    return {"data": records.body(), "headers": headers}


async def ask_agents(groups: Mapping[str, AgentRecords], ask: Ask) -> list[AgentMetrics]:
    """Every agent's metrics, all asked at once, sorted by the agents' names.

    An agent without any records has none, since readers look for `mean/reward` in every entry.

    Raises:
        AggregationError: agents failed, or answered with something else; all of them are named.
    """
    asked = [agent for agent in sorted(groups) if len(groups[agent].records)]
    answers = await asyncio.gather(*(_ask(agent, groups[agent].records, ask) for agent in asked))
    problems = [answer for answer in answers if isinstance(answer, AggregationError)]
    if problems:
        raise AggregationError("; ".join(map(str, problems))) from problems[0]
    return [
        AgentMetrics(
            agent,
            _evened(groups[agent], metrics),
            _coverage(groups[agent]),
            groups=of_tasks,
            percentiles=groups[agent].percentiles.as_json(),
        )
        for agent, (metrics, of_tasks) in zip(asked, answers, strict=True)
    ]


def _evened(group: AgentRecords, metrics: AggregateMetrics) -> AggregateMetrics:
    """An agent's answer, made fit for tasks that have different numbers of repeats where they do by design."""
    if group.stops_when is None:
        return metrics
    if isinstance(group.records, StoredRollouts):
        return for_uneven_repeats(metrics, group.records.table, group.stops_when)
    table = RolloutTable()
    for record in group.records:
        table.add(record)
    return for_uneven_repeats(metrics, table, group.stops_when)


async def _ask(agent: str, records: Collection[Result], ask: Ask) -> Any:
    """The agent's metrics, those of tasks apart if they are many, or the AggregationError that tells why not."""
    try:
        answer = await ask(agent, records)
        if isinstance(answer, LargeAnswer):
            return AggregateMetrics.model_validate(answer.rest), answer
        return AggregateMetrics.model_validate(answer), None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the answer"
        failure = AggregationError(
            f"agent {agent!r} answered {AGGREGATE_PATH} with something that is no metrics ({where}: {problem['msg']})"
        )
    except Exception as error:  # noqa: BLE001 - whatever a call may raise becomes one message with those of others
        failure = AggregationError(f"agent {agent!r} could not be asked for its metrics: {error}")
        failure.__cause__ = error
    return failure


def _coverage(group: AgentRecords) -> dict[str, Any] | None:
    if group.expected is None:
        return None
    scored = group.records.table if isinstance(group.records, StoredRollouts) else group.records
    return coverage_of(scored, group, group.expected)


def coverage_of(
    scored: RolloutTable | Collection[Result], group: AgentRecords, expected: Expected | None
) -> dict[str, Any]:
    """The `coverage` entry of one agent."""
    rollouts, tasks = (None, None) if expected is None else (expected.rollouts, expected.tasks)
    return compute_coverage(
        scored,
        group.failed,
        rollouts,
        tasks,
        group.repeats,
        stragglers=group.stragglers,
        not_needed=None if group.stops_when is None else group.not_needed,
    )


def write_metrics(metrics: Iterable[AgentMetrics], path: Path) -> None:
    """Replace the metrics file in one step, task by task: profiles of a million rollouts are never all in memory."""
    with write_aside(path) as file:
        file.writelines(_array((_entry(of_agent) for of_agent in metrics), depth=0))


def _entry(of_agent: AgentMetrics) -> Iterator[bytes]:
    """The bytes of `as_entry`."""
    metrics = of_agent.metrics
    head = {
        "agent_ref": {"name": of_agent.agent},
        "agent_metrics": metrics.agent_metrics,
        "key_metrics": metrics.key_metrics,
    }
    groups = metrics.group_level_metrics if of_agent.groups is None else of_agent.groups
    yield _dumped(head, depth=1).removesuffix(b"\n  }")
    yield b',\n    "group_level_metrics": '
    yield from _dumped_groups(iter(groups))
    for name, value in of_agent.additions().items():
        yield b',\n    "%b": ' % name.encode() + _dumped(value, depth=2)
    yield b"\n  }"


def _dumped_groups(groups: Iterator[Mapping[str, Any]]) -> Iterator[bytes]:
    """The bytes of the list of them, some at a time."""
    separator = b"["
    while portion := list(islice(groups, _GROUPS_AT_A_TIME)):
        yield separator
        yield _dumped(portion, depth=2)[1:].removesuffix(_END_OF_GROUPS)
        separator = b","
    yield b"[]" if separator == b"[" else _END_OF_GROUPS


def _array(items: Iterable[Iterable[bytes]], depth: int) -> Iterator[bytes]:
    """A JSON array of items that are indented already."""
    separator = b"["
    for item in items:
        yield separator + b"\n" + _INDENT * (depth + 1)
        yield from item
        separator = b","
    yield b"[]" if separator == b"[" else b"\n" + _INDENT * depth + b"]"


def _dumped(value: Any, depth: int) -> bytes:
    """JSON as it looks inside other JSON; its texts hold no line breaks."""
    written = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    return written.replace(b"\n", b"\n" + _INDENT * depth)


def read_metrics(path: Path) -> list[AgentMetrics] | None:
    """What `write_metrics` wrote; None when it is not there or was written by something else."""
    try:
        return [
            AgentMetrics(
                entry["agent_ref"]["name"],
                AggregateMetrics.model_validate(entry),
                entry.get("coverage"),
                percentiles=entry.get("percentiles"),
                cost=entry.get("cost"),
            )
            for entry in orjson.loads(path.read_bytes())
        ]
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None


def current_metrics(paths: RolloutPaths) -> list[AgentMetrics] | None:
    """The metrics on disk; None if anything they rest on was written after them, empty for a run without a rollout."""
    if not paths.rollouts.exists() or not paths.rollouts.stat().st_size:
        return []
    if not paths.aggregate_metrics.exists():
        return None
    sources = [path for path in (paths.rollouts, paths.failures, paths.materialized_inputs) if path.exists()]
    if paths.aggregate_metrics.stat().st_mtime_ns < max(path.stat().st_mtime_ns for path in sources):
        return None
    return read_metrics(paths.aggregate_metrics)


def mark_outdated(path: Path) -> None:
    """Let metrics on disk count as older than any rollout, whatever the clock says: more rollouts are to come."""
    with suppress(OSError):
        os.utime(path, (0, 0))


def values_for_tracking(metrics: Sequence[AgentMetrics]) -> dict[str, Any]:
    """Flat values for an experiment tracker; lists and dicts are left out."""
    logged: dict[str, Any] = {}
    for of_agent in metrics:
        flat = {
            **{f"{of_agent.agent}/{name}": value for name, value in of_agent.metrics.agent_metrics.items()},
            **{f"key_metrics/{of_agent.agent}/{name}": value for name, value in of_agent.metrics.key_metrics.items()},
            **_flat_coverage(of_agent),
        }
        logged.update({name: value for name, value in flat.items() if isinstance(value, _LOGGED_TYPES)})
    return logged


def _flat_coverage(of_agent: AgentMetrics) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in (of_agent.coverage or {}).items():
        if isinstance(value, dict) and name in _COUNTED:
            flat |= {f"coverage/{of_agent.agent}/{name}_{unit}": count for unit, count in value.items()}
        elif not isinstance(value, dict):
            flat[f"coverage/{of_agent.agent}/{name}"] = value
    return flat
