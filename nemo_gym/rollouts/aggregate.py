"""The metrics of a run: each agent is asked for those of its rollouts, and one file holds the answers.

Only finished rollouts take part. Beside the four parts that the agents' answers make up, every entry
says how much of the run it rests on (`coverage`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from nemo_gym.errors import GymError
from nemo_gym.jsonl import write_aside
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.rollouts.manifest import Expected
from nemo_gym.rollouts.record import Result, agent_name_of, key_or_none
from nemo_gym.schemas.metrics import AggregateMetrics

logger = logging.getLogger(__name__)

AGGREGATE_PATH = "/aggregate_metrics"
_NOT_SENT = frozenset(
    {
        RESPONSE_KEY_NAME,
        RESPONSES_CREATE_PARAMS_KEY_NAME,
        "ng_agent_observations",
        "ng_model_call_capture",
        "ng_trajectory",
    }
)
_LOGGED_TYPES = (bool, int, float, str, type(None))

Ask = Callable[[str, list[Result]], Awaitable[Mapping[str, Any]]]
"""(agent, stripped records) -> what the agent's `/aggregate_metrics` answered."""


class AggregationError(GymError):
    """An agent could not say what its metrics are; the rollouts are safe."""


@dataclass
class AgentRecords:
    """What one agent's metrics are computed from."""

    records: list[Result] = field(default_factory=list)
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


def stripped(result: Mapping[str, Any]) -> Result:
    """A result without its bulk: of the response only the token usage is kept."""
    record = {key: value for key, value in result.items() if key not in _NOT_SENT}
    response = result.get(RESPONSE_KEY_NAME)
    usage = response.get("usage") if isinstance(response, dict) else None
    if usage:
        record[RESPONSE_KEY_NAME] = {"usage": usage}
    return record


def group_by_agent(records: Iterable[Mapping[str, Any]]) -> dict[str, AgentRecords]:
    """Stripped records of each agent; those that name no agent are left out."""
    groups: dict[str, AgentRecords] = {}
    for record in records:
        agent = agent_name_of(record)
        if agent is not None:
            groups.setdefault(agent, AgentRecords()).records.append(stripped(record))
    return groups


def add_failures(groups: Mapping[str, AgentRecords], failures: Iterable[Mapping[str, Any]]) -> None:
    """Note which rollouts failed, for `coverage`."""
    for failure in failures:
        agent, key = agent_name_of(failure), key_or_none(failure)
        group = groups.get(agent) if agent is not None else None
        if group is not None and key is not None and isinstance(key.task_index, int):
            group.failed.add((key.task_index, key.rollout_index))


async def ask_agents(groups: Mapping[str, AgentRecords], ask: Ask) -> list[AgentMetrics]:
    """Every agent's metrics, all asked at once, sorted by the agents' names.

    Raises:
        AggregationError: an agent answered with something else.
    """
    agents = sorted(groups)
    answers = await asyncio.gather(*(ask(agent, groups[agent].records) for agent in agents))
    return [
        AgentMetrics(agent, _checked(agent, answer), _coverage(groups[agent]))
        for agent, answer in zip(agents, answers, strict=True)
    ]


def _checked(agent: str, answer: object) -> AggregateMetrics:
    try:
        return AggregateMetrics.model_validate(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the answer"
        raise AggregationError(
            f"agent {agent!r} answered {AGGREGATE_PATH} with something that is no metrics ({where}: {problem['msg']})"
        ) from error


def _coverage(group: AgentRecords) -> dict[str, Any] | None:
    if group.expected is None:
        return None
    from nemo_gym.metrics.coverage import compute_coverage  # loads numpy

    return compute_coverage(group.records, group.failed, group.expected.rollouts, group.expected.tasks)


def write_metrics(metrics: Iterable[AgentMetrics], path: Path) -> None:
    """Replace the metrics file in one step."""
    entries = [of_agent.as_entry() for of_agent in metrics]
    with write_aside(path) as file:
        file.write(orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def values_for_tracking(metrics: Iterable[AgentMetrics]) -> dict[str, Any]:
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
