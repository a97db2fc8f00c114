"""The metrics of a run: each agent is asked for those of its rollouts, and one file holds the answers.

Only finished rollouts take part. Beside the four parts that the agents' answers make up, every entry
says how much of the run it rests on (`coverage`).
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym.errors import GymError
from nemo_gym.jsonl import write_aside
from nemo_gym.rollouts.manifest import Expected
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Result, agent_name_of, key_or_none
from nemo_gym.rollouts.stored import StoredRollouts, sendable, stripped
from nemo_gym.schemas.metrics import AggregateMetrics, AggregateMetricsRequest

logger = logging.getLogger(__name__)

AGGREGATE_PATH = "/aggregate_metrics"
_LOGGED_TYPES = (bool, int, float, str, type(None))

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


@dataclass
class AgentMetrics:
    """The metrics of one agent, as the file has them."""

    agent: str
    metrics: AggregateMetrics
    coverage: dict[str, Any] | None = None

    def as_entry(self) -> dict[str, Any]:
        """One object of the metrics file."""
        entry: dict[str, Any] = {
            "agent_ref": {"name": self.agent},
            "agent_metrics": self.metrics.agent_metrics,
            "key_metrics": self.metrics.key_metrics,
            "group_level_metrics": self.metrics.group_level_metrics,
        }
        return entry if self.coverage is None else {**entry, "coverage": self.coverage}


def group_by_agent(records: Iterable[Mapping[str, Any]]) -> dict[str, AgentRecords]:
    """Stripped records of each agent; those that name no agent are left out."""
    groups: dict[str, list[Result]] = {}
    for record in records:
        agent = agent_name_of(record)
        if agent is not None:
            groups.setdefault(agent, []).append(stripped(record))
    return {agent: AgentRecords(of_agent) for agent, of_agent in groups.items()}


def add_failures(groups: Mapping[str, AgentRecords], failures: Iterable[Mapping[str, Any]]) -> None:
    """Note which rollouts failed, for `coverage`."""
    for failure in failures:
        agent, key = agent_name_of(failure), key_or_none(failure)
        group = groups.get(agent) if agent is not None else None
        if group is not None and key is not None and isinstance(key.task_index, int):
            group.failed.add((key.task_index, key.rollout_index))


def request_arguments(records: Collection[Result]) -> dict[str, Any]:
    """The request for metrics of `records`, as an HTTP client takes it; stored rollouts are sent as they are read."""
    if not isinstance(records, StoredRollouts):
        return {"json": AggregateMetricsRequest(verify_responses=[orjson.loads(sendable(it)) for it in records])}
    headers = {"Content-Type": "application/json", "Content-Length": str(records.body_bytes)}
    return {"data": records.body(), "headers": headers}


async def ask_agents(groups: Mapping[str, AgentRecords], ask: Ask) -> list[AgentMetrics]:
    """Every agent's metrics, all asked at once, sorted by the agents' names.

    An agent without any records is not asked, and none of them makes for no metrics at all.

    Raises:
        AggregationError: agents failed, or answered with something else; all of them are named.
    """
    asked = [agent for agent in sorted(groups) if len(groups[agent].records)]
    if not asked:
        return []
    answers = await asyncio.gather(*(_ask(agent, groups[agent].records, ask) for agent in asked))
    problems = [answer for answer in answers if isinstance(answer, AggregationError)]
    if problems:
        raise AggregationError("; ".join(map(str, problems))) from problems[0]
    metrics = dict(zip(asked, answers, strict=True))
    return [
        AgentMetrics(agent, metrics.get(agent) or AggregateMetrics(), _coverage(groups[agent]))
        for agent in sorted(groups)
    ]


async def _ask(agent: str, records: Collection[Result], ask: Ask) -> Any:
    """The agent's metrics, or the AggregationError that tells why there are none."""
    try:
        return AggregateMetrics.model_validate(await ask(agent, records))
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
    from nemo_gym.metrics.coverage import compute_coverage  # loads numpy

    scored = group.records.table if isinstance(group.records, StoredRollouts) else group.records
    return compute_coverage(scored, group.failed, group.expected.rollouts, group.expected.tasks)


def write_metrics(metrics: Iterable[AgentMetrics], path: Path) -> None:
    """Replace the metrics file in one step."""
    entries = [of_agent.as_entry() for of_agent in metrics]
    with write_aside(path) as file:
        file.write(orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def read_metrics(path: Path) -> list[AgentMetrics] | None:
    """What `write_metrics` wrote; None when it is not there or was written by something else."""
    try:
        return [
            AgentMetrics(entry["agent_ref"]["name"], AggregateMetrics.model_validate(entry), entry.get("coverage"))
            for entry in orjson.loads(path.read_bytes())
        ]
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None


def current_metrics(paths: RolloutPaths) -> list[AgentMetrics] | None:
    """The metrics on disk, if nothing they rest on was written after them; none for a run without a single rollout."""
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
        if isinstance(value, dict) and name in ("expected", "scored", "failed", "missing"):
            flat |= {f"coverage/{of_agent.agent}/{name}_{unit}": count for unit, count in value.items()}
        elif not isinstance(value, dict):
            flat[f"coverage/{of_agent.agent}/{name}"] = value
    return flat
