"""Prompts of token ids: what the model has seen and said stays as it was, and only what is new is written.

An earlier answer carries its prompt's ids, its own, and a digest of the conversation it answered. If the conversation
up to that answer is still the same, the new prompt is those ids, followed by what the chat template writes after an
answer: the end of the turn, the new messages, the beginning of the next answer. The answer itself is not compared: its
ids are what counts, whatever an agent has made of its text (thoughts dropped, arguments spaced otherwise). If anything
else has changed, the conversation was rewritten, and is written anew from there: its tokens are a branch of their own.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nemo_gym.responses_converter import PROMPT_DIGEST
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.vllm_model.completions import template_renderer

_MARK = "nemo5gym7kept3answer"
_THINK = "<think>"
_COMPARED = ("role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id")
_SHAPES_THE_PROMPT = ("tools", "chat_template_kwargs")


class Prompt(NamedTuple):
    """What the engine is given."""

    ids: list[int]
    digest: str
    """Of the conversation."""
    opens_reasoning: bool
    """It ends within a think block: the answer begins with thoughts."""
    kept: int
    """Ids that were taken over from an earlier answer."""


class PromptBuilder:
    """Makes prompts of chat requests."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._render: Callable[[dict[str, Any]], str] = template_renderer(tokenizer)

    def prompt(self, chat_request: dict[str, Any]) -> Prompt:
        """The prompt for a request, whose earlier answers have token fields and a digest, if they were made here.

        Raises:
            UnusableRequestError: the chat template refuses the conversation.
        """
        messages = chat_request["messages"]
        digests = conversation_digests(chat_request)
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.get(PROMPT_DIGEST) != digests[index] or not message.get("generation_token_ids"):
                continue
            after = self._text_after(chat_request, index)
            if after is not None:
                kept = [*message["prompt_token_ids"], *message["generation_token_ids"]]
                return Prompt(kept + self._ids_after(kept, after), digests[-1], _opens(after), len(kept))
        text = self._render(_for_template(chat_request, messages))
        return Prompt(self._tokenizer.encode(text), digests[-1], _opens(text), 0)

    def _text_after(self, chat_request: dict[str, Any], index: int) -> str | None:
        """What the template writes after the answer at `index`, from the end of that turn on; None: nobody can tell."""
        messages = chat_request["messages"]
        calls = messages[index].get("tool_calls")
        marked = [*messages[:index], _marked(calls), *messages[index + 1 :]]
        _, mark, after = self._render(_for_template(chat_request, marked)).rpartition(_MARK)
        if not mark:
            return None
        ends = [place for text in self._tokenizer.ends if (place := after.find(text)) >= 0]
        if not ends:
            return None if calls else after
        return after[min(ends) :]

    def _ids_after(self, kept: Sequence[int], after: str) -> list[int]:
        """The ids of `after`, without the end of the turn if the model has said that itself."""
        ids, ends = self._tokenizer.encode(after), set(self._tokenizer.ends.values())
        return ids[1:] if ids and ids[0] in ends and kept[-1] in ends else ids


def conversation_digests(chat_request: Mapping[str, Any]) -> list[str]:
    """A digest of the conversation before each message, and one of all of it.

    An answer with token ids counts by its ids alone.
    """
    settings = {key: chat_request.get(key) for key in _SHAPES_THE_PROMPT if chat_request.get(key)}
    running = hashlib.sha256(_canonical(settings))
    digests = [running.hexdigest()[:32]]
    for message in chat_request["messages"]:
        generated = message.get("generation_token_ids")
        if generated:
            running.update(b"generated" + array("q", generated).tobytes())
        else:
            plain = _joined_text(dict(message))
            running.update(_canonical({key: plain[key] for key in _COMPARED if plain.get(key) not in (None, "")}))
        digests.append(running.hexdigest()[:32])
    return digests


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _for_template(chat_request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    bare = [{key: value for key, value in message.items() if not _is_token_field(key)} for message in messages]
    return {**chat_request, "messages": [_joined_text(message) for message in bare]}


def _is_token_field(key: str) -> bool:
    return key in (PROMPT_DIGEST, "prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")


def _joined_text(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read the content of a message as one text."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


def _marked(calls: Any) -> dict[str, Any]:
    """An answer that shows where it ends, in its text and in the arguments of its tool calls, whichever comes last."""
    message: dict[str, Any] = {"role": "assistant", "content": _MARK}
    if calls:
        arguments = json.dumps({"mark": _MARK})
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}} if call.get("function") else call
            for call in calls
        ]
    return message


def _opens(text: str) -> bool:
    return text.rstrip().endswith(_THINK)
