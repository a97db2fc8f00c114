"""What went wrong in a run, for its last lines: each class of failure, how often, and one example."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym.rollouts.failures import rollout_name
from nemo_gym.rollouts.record import FAILURE_MESSAGE_KEY, FAILURE_SERVER_KEY, FAILURE_STATUS_KEY, NG_FAILURE_CLASS_KEY
from nemo_gym.terminal import shown

_CLASS_LENGTH = 40
_EXAMPLE_LENGTH = 500
_MESSAGE_BEGIN, _MESSAGE_END = 120, 220
_MAX_CLASSES = 50
_REST = "other classes"


@dataclass
class FailuresOfClass:
    """The failures of one class."""

    example: str
    """The first of them, in printable characters."""
    attempts: int = 0
    rollouts: int = 0
    """Those that failed for good."""


class FailureTable:
    """Failures counted as they are recorded, whoever detected them."""

    def __init__(self) -> None:
        self.by_class: dict[str, FailuresOfClass] = {}

    def add(self, row: Mapping[str, Any], record: Mapping[str, Any], *, is_final: bool = True) -> None:
        """Count the sidecar line of one failed attempt; with `is_final` it was the last one at its rollout."""
        name = shown(record.get(NG_FAILURE_CLASS_KEY) or "(none)", _CLASS_LENGTH)
        if name not in self.by_class and len(self.by_class) >= _MAX_CLASSES:
            name = _REST
        if name not in self.by_class:
            self.by_class[name] = FailuresOfClass(_example(row, record))
        of_class = self.by_class[name]
        of_class.attempts += 1
        of_class.rollouts += is_final

    def lines(self) -> list[str]:
        """The table, most frequent class first; empty when nothing failed."""
        if not self.by_class:
            return []
        width = max(len("class"), *map(len, self.by_class))
        ordered = sorted(self.by_class.items(), key=lambda item: (-item[1].attempts, item[0]))
        return [
            f"{'class':<{width}}  attempts  rollouts  example",
            *(
                f"{name:<{width}}  {of_class.attempts:>8}  {of_class.rollouts:>8}  {of_class.example}"
                for name, of_class in ordered
            ),
        ]


def _example(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    where = [rollout_name(row)]
    if record.get(FAILURE_SERVER_KEY) is not None:
        where.append(f"in {record[FAILURE_SERVER_KEY]}")
    if record.get(FAILURE_STATUS_KEY) is not None:
        where.append(f"status {record[FAILURE_STATUS_KEY]}")
    message = str(record.get(FAILURE_MESSAGE_KEY) or "no message")
    if len(message) > _MESSAGE_BEGIN + _MESSAGE_END:  # what failed stands first, and what to do about it last
        message = f"{message[:_MESSAGE_BEGIN]} … {message[-_MESSAGE_END:]}"
    return shown(f"{', '.join(where)}: {message}", _EXAMPLE_LENGTH)
