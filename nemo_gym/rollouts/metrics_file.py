"""Writing the metrics file task by task: the profiles of a million rollouts are never all in memory.

The bytes are those of `nemo_gym.rollouts.aggregate.write_metrics`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.jsonl import write_aside
from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.schemas.metrics import AggregateMetrics

_OPTIONS = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
_INDENT = b"  "


@dataclass
class AgentAnswer:
    """The metrics of one agent."""

    agent: str
    agent_metrics: Mapping[str, Any]
    key_metrics: Mapping[str, Any]
    groups: Iterable[Mapping[str, Any]]
    """One per task; read once, when the file is written."""
    coverage: Mapping[str, Any]

    def without_groups(self) -> AgentMetrics:
        """What is shown of them."""
        metrics = AggregateMetrics(agent_metrics=dict(self.agent_metrics), key_metrics=dict(self.key_metrics))
        return AgentMetrics(self.agent, metrics, dict(self.coverage))


def write_answers(answers: Iterable[AgentAnswer], path: Path) -> None:
    """Replace the metrics file in one step."""
    with write_aside(path) as file:
        file.writelines(_array((_entry(answer) for answer in answers), depth=0))


def _entry(answer: AgentAnswer) -> Iterator[bytes]:
    head = {
        "agent_ref": {"name": answer.agent},
        "agent_metrics": answer.agent_metrics,
        "key_metrics": answer.key_metrics,
    }
    yield _dumped(head, depth=1).removesuffix(b"\n  }")
    yield b',\n    "group_level_metrics": '
    yield from _array(([_dumped(group, depth=3)] for group in answer.groups), depth=2)
    yield b',\n    "coverage": ' + _dumped(answer.coverage, depth=2) + b"\n  }"


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
    return orjson.dumps(value, option=_OPTIONS).replace(b"\n", b"\n" + _INDENT * depth)
