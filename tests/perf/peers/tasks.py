"""The two tasks everybody plays, what the canned model does in them, and what makes a rollout right.

Nothing here is imported but the standard library: the programs of the peers use it in environments of their own.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HAND_IN = "extract_synonym_values"


@dataclass(frozen=True)
class Task:
    """A row of an environment's example data, and how the canned model plays it: a tool call per turn, then a text."""

    name: str
    environment: str
    tool_calls: tuple[tuple[str, dict[str, Any]], ...]
    text: str

    @property
    def data(self) -> Path:
        """The environment's example rows; the first is the task."""
        return ROOT / "resources_servers" / self.environment / "data" / "example.jsonl"

    @property
    def row(self) -> dict[str, Any]:
        """The task as it is given to us; the peers get its messages."""
        with self.data.open() as rows:
            row: dict[str, Any] = json.loads(rows.readline())
        return row

    @property
    def messages(self) -> tuple[str, str]:
        """Instructions and question."""
        instructions, question = self.row["responses_create_params"]["input"]
        return instructions["content"], question["content"]

    @property
    def model_calls(self) -> int:
        """One per tool call, and one for the text."""
        return len(self.tool_calls) + 1


TASKS = {
    task.name: task
    for task in (
        Task(
            "single_tool_call",
            "example_single_tool_call",
            (("get_weather", {"city": "Reykjavik"}),),
            "The weather in Reykjavik is cold: yes, take gloves.",
        ),
        Task(
            "multi_step",
            "example_multi_step",
            (
                ("get_synonym_value", {"synonym": "Rapid"}),
                ("get_synonym_value", {"synonym": "Swift"}),
                ("get_synonym_value", {"synonym": "Brisk"}),
                (HAND_IN, {"synonym_values": [496, 525, 507]}),
            ),
            "All values are handed in, in the order of the words.",
        ),
    )
}


def weather_in(city: str) -> str:
    """What the tool of the first task answers."""
    return json.dumps({"city": city, "weather_description": f"The weather in {city} is cold."})


def value_of(word: str) -> str:
    """What the first tool of the second task answers."""
    return json.dumps({"synonym_value": sum(map(ord, word))})


def take_values(values: list[int]) -> str:
    """What the second tool of the second task answers; whether they are right is told by `reward`."""
    return json.dumps({"success": bool(values)})


def reward(task: Task, calls: Iterable[tuple[str, str | dict[str, Any]]]) -> float:
    """The verdict that the environment of the task gives: on tool calls (name, arguments) in their order."""
    if task.name == "single_tool_call":
        return 1.0
    handed_in = [arguments for name, arguments in calls if name.endswith(HAND_IN)]
    if not handed_in:
        return 0.0
    last = handed_in[-1]
    arguments = json.loads(last) if isinstance(last, str) else last
    return float(arguments.get("synonym_values") == task.row["expected_synonym_values"])
