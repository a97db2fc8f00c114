"""A conversation as the model sees it, whichever API it arrived through."""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

import orjson


@dataclass(frozen=True, slots=True)
class Said:
    """A message: of the user, of the model, or instructions (`system`, `developer`)."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning of the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call of the model; the arguments are JSON as text, or meant to be."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Returned:
    """What a tool answered."""

    call_id: str
    text: str


Entry: TypeAlias = Said | Thought | Called | Returned
ModelEntry: TypeAlias = Said | Thought | Called


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]


def canonical_json(value: Any) -> bytes:
    """The same bytes for the same value, whatever the order of its keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # numbers beyond 64 bits
        return json.dumps(value, sort_keys=True).encode()


def is_by_model(entry: Entry) -> bool:
    """Whether the model produced `entry`."""
    return isinstance(entry, Thought | Called) or (isinstance(entry, Said) and entry.role == "assistant")


@dataclass(frozen=True)
class Conversation:
    """Everything an answer may depend on."""

    entries: tuple[Entry, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or the name of the tool that must be called."""
    parallel_tool_calls: bool = True
    wants_reasoning: bool = False
    max_output_tokens: int | None = None
    seed: int | str | None = None

    @cached_property
    def fingerprint(self) -> bytes:
        """The same for the same conversation; ids and sampling settings make no difference."""
        entries = [(type(entry).__name__, *_content(entry)) for entry in self.entries]
        tools = [(tool.name, tool.description, tool.parameters) for tool in self.tools]
        essence = (entries, tools, self.tool_choice)
        return blake2b(canonical_json(essence)).digest()

    @cached_property
    def last_user_index(self) -> int:
        """Where the last user message stands; -1 when there is none."""
        for index in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[index]
            if isinstance(entry, Said) and entry.role == "user":
                return index
        return -1

    @property
    def last_user(self) -> str:
        """The last user message; empty when there is none."""
        entry = self.entries[self.last_user_index] if self.last_user_index >= 0 else None
        return entry.text if isinstance(entry, Said) else ""

    @property
    def since_last_user(self) -> tuple[Entry, ...]:
        """What followed the last user message."""
        return self.entries[self.last_user_index + 1 :]

    @property
    def instructions(self) -> str:
        """All system and developer messages."""
        return "\n".join(
            entry.text for entry in self.entries if isinstance(entry, Said) and entry.role in ("system", "developer")
        )

    @cached_property
    def turn(self) -> int:
        """Which turn of the model is asked for, from 1."""
        mine = [is_by_model(entry) for entry in self.entries]
        return 1 + sum(is_mine and not (i and mine[i - 1]) for i, is_mine in enumerate(mine))

    @property
    def fresh_results(self) -> list[tuple[str, str]]:
        """(tool, output) of the tool outputs the conversation ends with."""
        names = {entry.call_id: entry.name for entry in self.entries if isinstance(entry, Called)}
        fresh: list[tuple[str, str]] = []
        for entry in reversed(self.entries):
            if not isinstance(entry, Returned):
                break
            fresh.insert(0, (names.get(entry.call_id, ""), entry.text))
        return fresh


def _content(entry: Entry) -> tuple[str, ...]:
    if isinstance(entry, Said):
        return entry.role, entry.text
    if isinstance(entry, Called):
        return entry.name, entry.arguments
    return (entry.text,)
