"""What a run left behind, compared with what it should have: found, duplicated, lost, and scored wrongly."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int]


@dataclass
class Tally:
    """Of one scenario."""

    expected: int = 0
    found: int = 0
    duplicated: int = 0
    lost: int = 0
    wrong: int = 0
    """Rollouts that a fault turned into a wrong answer, which they were not."""
    longest_wait_s: float = 0.0
    """The longest time in which no rollout finished while a collector was at work."""
    injected: int = 0
    """Faults that really struck."""
    note: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled or invented, and nothing else went wrong."""
        return not (self.lost or self.duplicated or self.wrong or self.problems) and self.found == self.expected


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file that must be sound."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def key_of(record: dict[str, Any]) -> Key:
    """Task and rollout."""
    return record["_ng_task_index"], record["_ng_rollout_index"]


def count(path: Path, expected: set[Key], tally: Tally, right_reward: float | None = 1.0) -> None:
    """Fill in what `path`, the rollouts file, says about the expected keys."""
    records = read_lines(path)
    seen = Counter(key_of(record) for record in records)
    tally.expected += len(expected)
    tally.found += len(expected & seen.keys())
    tally.lost += len(expected - seen.keys())
    tally.duplicated += sum(times - 1 for times in seen.values())
    if seen.keys() - expected:
        tally.problems.append(f"{len(seen.keys() - expected)} rollouts nobody asked for")
    if right_reward is not None:
        tally.wrong += sum(record.get("reward") != right_reward for record in records)
