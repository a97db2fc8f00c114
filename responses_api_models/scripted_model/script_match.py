"""`match:` of a script: which requests a rule or a fault is for. All conditions given must hold."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from responses_api_models.scripted_model.conversation import Conversation, Entry, Said
from responses_api_models.scripted_model.tokens import entry_text

ANY_TOOL = "*"


class StrictModel(BaseModel):
    """A part of a script: unknown keys are errors, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
"""One text or several, of which one is enough. Upper and lower case are the same."""
Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression; named groups become variables of the reply."""


class Match(StrictModel):
    """Conditions on a request; none means every request."""

    last_user_contains: Texts | None = None
    last_user_regex: Pattern | None = None
    instructions_contain: Texts | None = None
    """In a system or developer message."""
    conversation_contains: Texts | None = None
    """Anywhere, tool calls and outputs included."""
    tool_available: Texts | None = None
    after_user: bool | None = None
    """Whether the user spoke last."""
    after_tool: Texts | None = None
    """The conversation ends with the output of this tool; `*` is any tool."""
    tool_output_contains: Texts | None = None
    """In the outputs the conversation ends with."""
    tool_output_regex: Pattern | None = None
    turn: Annotated[tuple[int, ...], BeforeValidator(_as_list)] | None = None
    """The model's turns count from 1."""

    def variables(self, conversation: Conversation) -> dict[str, str] | None:
        """The named groups of the patterns if every condition holds, else None."""
        if not all(self._holds(conversation)):
            return None
        outputs = "\n".join(text for _, text in conversation.fresh_results)
        found: dict[str, str] = {}
        for pattern, text in ((self.last_user_regex, conversation.last_user), (self.tool_output_regex, outputs)):
            if pattern is None:
                continue
            match = re.search(pattern, text)
            if match is None:
                return None
            found |= {name: value or "" for name, value in match.groupdict().items()}
        return found

    def _holds(self, conversation: Conversation) -> list[bool]:
        fresh = conversation.fresh_results
        return [
            _has_any(self.last_user_contains, conversation.last_user),
            self.instructions_contain is None or _has_any(self.instructions_contain, conversation.instructions),
            self.conversation_contains is None or _has_any(self.conversation_contains, _everything(conversation)),
            self.tool_available is None or any(tool.name in self.tool_available for tool in conversation.tools),
            self.after_user is None or self.after_user == _is_user(conversation.entries[-1:]),
            self.after_tool is None or any(ANY_TOOL in self.after_tool or name in self.after_tool for name, _ in fresh),
            self.tool_output_contains is None or any(_has_any(self.tool_output_contains, text) for _, text in fresh),
            self.turn is None or conversation.turn in self.turn,
        ]


def _has_any(wanted: tuple[str, ...] | None, text: str) -> bool:
    return wanted is None or any(item.lower() in text.lower() for item in wanted)


def _everything(conversation: Conversation) -> str:
    return "\n".join(entry_text(entry) for entry in conversation.entries)


def _is_user(last: tuple[Entry, ...]) -> bool:
    return any(isinstance(entry, Said) and entry.role == "user" for entry in last)
