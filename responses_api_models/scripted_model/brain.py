"""What the model answers: by the first rule that matches, else from the answer file, else by its own wits."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from responses_api_models.scripted_model.answers import AnswerBook
from responses_api_models.scripted_model.conversation import Called, Conversation, ModelEntry, Said, Thought, Tool
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.script import Distribution, Reply, Script, ToolCallReply
from responses_api_models.scripted_model.templates import fill, fill_all
from responses_api_models.scripted_model.tokens import TokenCounts, count_tokens, cut_to
from responses_api_models.scripted_model.tool_user import arguments_for, use_tools_or_answer


@dataclass(frozen=True)
class Answer:
    """One turn of the model, and what is to be said about it in either API."""

    conversation: Conversation
    draws: Draws
    entries: tuple[ModelEntry, ...]
    incomplete: str | None
    """Why it stops early: `max_output_tokens`, `content_filter`, or not at all."""
    counts: TokenCounts
    latency_s: float

    @property
    def is_cut(self) -> bool:
        """Whether the last entry breaks off."""
        return self.incomplete == "max_output_tokens"


class Brain:
    """Answers conversations as a script says."""

    def __init__(self, script: Script, folder: Path) -> None:
        self._script = script
        self._answers = AnswerBook(script.answers, folder) if script.answers else None

    def draws_for(self, conversation: Conversation) -> Draws:
        """The chance that belongs to a request."""
        seed = self._script.seed if conversation.seed is None else conversation.seed
        return Draws(seed, conversation.fingerprint)

    def answer(self, conversation: Conversation, draws: Draws) -> Answer:
        """The model's next turn."""
        entries, incomplete = self._reply(conversation, draws)
        if conversation.max_output_tokens is not None:
            entries, is_cut = cut_to(entries, conversation.max_output_tokens)
            incomplete = "max_output_tokens" if is_cut else incomplete
        is_cut = incomplete == "max_output_tokens" and bool(entries)
        counts = self._claimed(count_tokens(conversation, entries, is_cut=is_cut), draws)
        return Answer(conversation, draws, entries, incomplete, counts, self._latency_s(counts, draws))

    def _reply(self, conversation: Conversation, draws: Draws) -> tuple[tuple[ModelEntry, ...], str | None]:
        for number, rule in enumerate(self._script.rules):
            variables = rule.match.variables(conversation)
            if variables is not None and draws.happens(f"rule {number}", rule.probability):
                return _scripted(rule.reply, conversation, variables, draws), rule.reply.incomplete
        text = self._answers.reply_to(conversation.last_user, draws) if self._answers else None
        if text is not None:
            return (Said("assistant", text),), None
        return use_tools_or_answer(conversation, draws), None

    def _claimed(self, counted: TokenCounts, draws: Draws) -> TokenCounts:
        usage = self._script.usage
        prompt = counted.prompt if usage.input_tokens is None else round(drawn(usage.input_tokens, draws, "input"))
        output = counted.generation
        if usage.output_tokens is not None:
            output = round(drawn(usage.output_tokens, draws, "output"))
        return TokenCounts(prompt, min(counted.cached, prompt), output, min(counted.reasoning, output))

    def _latency_s(self, counts: TokenCounts, draws: Draws) -> float:
        latency = self._script.latency_s
        if latency is None:
            return 0.0
        wait_s = drawn(latency, draws, "latency") + latency.per_output_token * counts.generation
        return wait_s if latency.max is None else min(wait_s, latency.max)


def drawn(distribution: Distribution, draws: Draws, purpose: str) -> float:
    """A number from `distribution`, the same for the same request and seed."""
    if distribution.fixed is not None:
        value = distribution.fixed
    elif distribution.uniform is not None:
        low, high = distribution.uniform
        value = low + (high - low) * draws.uniform(purpose)
    elif distribution.exponential is not None:
        value = -distribution.exponential * math.log(1.0 - draws.uniform(purpose))
    else:
        assert distribution.lognormal is not None
        median, deviation = distribution.lognormal
        value = median * math.exp(min(deviation * draws.normal(purpose), 50.0))
    return value if distribution.max is None else min(value, distribution.max)


def _scripted(reply: Reply, conversation: Conversation, groups: dict[str, str], draws: Draws) -> tuple[ModelEntry, ...]:
    outputs = [text for _, text in conversation.fresh_results]
    variables = {"last_user": conversation.last_user, "tool_output": "\n".join(outputs), **groups}
    entries: list[ModelEntry] = []
    if reply.reasoning is not None:
        entries.append(Thought(fill(reply.reasoning, variables)))
    if reply.text is not None:
        entries.append(Said("assistant", fill(reply.text, variables)))
    for number, call in enumerate(reply.calls):
        name = fill(call.name, variables)
        arguments = _arguments(call, name, conversation, variables, draws)
        entries.append(Called(draws.identifier("call", str(number)), name, arguments))
    return tuple(entries)


def _arguments(
    call: ToolCallReply, name: str, conversation: Conversation, variables: dict[str, str], draws: Draws
) -> str:
    if isinstance(call.arguments, str):
        return fill(call.arguments, variables)
    tool = next((tool for tool in conversation.tools if tool.name == name), None)
    if call.arguments is None:
        return json.dumps(arguments_for(tool, conversation, draws))
    filled = {key: _typed(fill_all(value, variables), key, tool) for key, value in call.arguments.items()}
    return json.dumps(filled)


def _typed(value: Any, key: str, tool: Tool | None) -> Any:
    """A number that arrived as text, where the tool's schema wants a number."""
    kind = (tool.parameters.get("properties") or {}).get(key, {}).get("type") if tool else None
    if not isinstance(value, str) or kind not in ("integer", "number"):
        return value
    try:
        return int(value) if kind == "integer" else float(value)
    except ValueError:
        return value
