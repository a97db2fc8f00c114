"""How the model behaves without a script: it uses the tools it is offered and answers from what they say."""

import json
import re
from typing import Any

from responses_api_models.scripted_model.conversation import (
    Called,
    Conversation,
    ModelEntry,
    Returned,
    Said,
    Thought,
    Tool,
)
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.evidence import Evidence
from responses_api_models.scripted_model.schema_values import Values, parsed_output

MAX_TOOLS = 3
"""Different tools used for one user message; of more, the most fitting."""
MAX_PARALLEL_CALLS = 3
_MAX_FACT_LENGTH = 400
_ANSWERS = ("{facts}", "Here is what I found: {facts}", "{facts} Is there anything else you would like to know?")
_SMALL_TALK = (
    "I looked at your message: {gist}",
    "You wrote: {gist}",
    "There is no script and no tool for this, so I can only repeat it: {gist}",
)
_OPTION = re.compile(r"^[^\S\n]*\(?([A-J])[).:]\s+\S", re.MULTILINE)


def use_tools_or_answer(conversation: Conversation, draws: Draws) -> tuple[ModelEntry, ...]:
    """One turn of a sensible tool user."""
    tool = _next_tool(conversation)
    if tool is None:
        action: tuple[ModelEntry, ...] = (Said("assistant", _answer(conversation, draws)),)
        thought = "I have what I need to answer."
    else:
        action = tuple(_calls(tool, conversation, draws))
        thought = f"The user wants something that {tool.name} can tell."
    return (Thought(thought), *action) if conversation.wants_reasoning else action


def arguments_for(tool: Tool | None, conversation: Conversation, draws: Draws) -> dict[str, Any]:
    """Arguments for one call, drawn from the conversation and the tool's schema."""
    if tool is None:
        return {}
    return Values(Evidence(conversation.last_user), _returned(conversation), draws).arguments(tool.parameters)


def _next_tool(conversation: Conversation) -> Tool | None:
    """The tool to call now; None when it is time to answer."""
    if conversation.tool_choice == "none" or not conversation.tools:
        return None
    called = {entry.name for entry in conversation.since_last_user if isinstance(entry, Called)}
    wanted = _fitting_tools(conversation)
    if conversation.tool_choice not in ("auto", "required"):
        wanted = [tool for tool in conversation.tools if tool.name == conversation.tool_choice]
        called = set()
    remaining = [tool for tool in wanted if tool.name not in called]
    if remaining:
        return remaining[0]
    return wanted[0] if conversation.tool_choice == "required" else None


def _fitting_tools(conversation: Conversation) -> list[Tool]:
    """At most `MAX_TOOLS`, in the order they are offered."""
    tools = list(conversation.tools)
    if len(tools) <= MAX_TOOLS:
        return tools
    asked = _words(conversation.last_user)
    by_fit = sorted(tools, key=lambda tool: -len(asked & _words(f"{tool.name} {tool.description}")))
    return [tool for tool in tools if tool in by_fit[:MAX_TOOLS]]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[^\W_]+", text.lower()) if len(word) > 2}


def _calls(tool: Tool, conversation: Conversation, draws: Draws) -> list[Called]:
    """One call, or one for each thing the user named when that is all the tool wants to know."""
    user, returned = Evidence(conversation.last_user), _returned(conversation)
    arguments = [Values(user, returned, draws).arguments(tool.parameters)]
    required = tool.parameters.get("required") or []
    if conversation.parallel_tool_calls and len(required) == 1:
        for skip in range(1, MAX_PARALLEL_CALLS):
            further = Values(user, returned, draws, skip).arguments(tool.parameters)
            if further in arguments:
                break
            arguments.append(further)
    return [
        Called(draws.identifier("call", str(number)), tool.name, json.dumps(values))
        for number, values in enumerate(arguments)
    ]


def _returned(conversation: Conversation) -> list[Any]:
    return [parsed_output(entry.text) for entry in conversation.since_last_user if isinstance(entry, Returned)]


def _answer(conversation: Conversation, draws: Draws) -> str:
    outputs = [entry.text for entry in conversation.since_last_user if isinstance(entry, Returned)]
    if outputs:
        facts = " ".join(dict.fromkeys(_fact(output) for output in outputs))
        return draws.choice("answer", _ANSWERS).format(facts=facts)
    choice = _multiple_choice(conversation.last_user, draws)
    if choice is not None:
        return choice
    gist = conversation.last_user.strip()[:_MAX_FACT_LENGTH] or "nothing"
    return draws.choice("small talk", _SMALL_TALK).format(gist=gist)


def _multiple_choice(question: str, draws: Draws) -> str | None:
    """A guess, in the form the question asks for, when it lists options or wants a box."""
    options = sorted(set(_OPTION.findall(question)))
    wants_box = "\\boxed" in question
    if len(options) >= 2:
        guess = draws.choice("option", options)
    elif wants_box:
        guess = str(draws.choice("number", Evidence(question).numbers or [1]))
    else:
        return None
    return f"\\boxed{{{guess}}}" if wants_box else f"Answer: {guess}"


def _fact(output: str) -> str:
    """The gist of a tool's output: its sentences, else its values, else its text."""
    value = parsed_output(output)
    if isinstance(value, dict):
        sentences = [inner for inner in value.values() if isinstance(inner, str) and " " in inner.strip()]
        pairs = [f"{key}: {_shown(inner)}" for key, inner in value.items()]
        text = " ".join(sentences) or ", ".join(pairs)
    else:
        text = _shown(value)
    return text[:_MAX_FACT_LENGTH]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
