"""Reasoning as text: `<think>...</think>` blocks, the form in which it travels inside a chat message."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_REASONING_FIELDS = ("reasoning_content", "reasoning")


class Thoughts(NamedTuple):
    """A text taken apart: its think blocks, and what is left without them, to the last space."""

    blocks: list[str]
    rest: str


def wrapped(texts: Iterable[str]) -> str:
    """A think block for every text that is not empty, without separators."""
    return "".join(f"<think>{text}</think>" for text in texts if text)


def taken_apart(text: str) -> Thoughts:
    """The think blocks in `text`, empty ones left out, and the rest."""
    return Thoughts([block for block in _BLOCK.findall(text) if block], _BLOCK.sub("", text))


def fields_as_tags(message: dict[str, Any], *, splits_reasoning: bool, setting: str) -> dict[str, Any]:
    """A message of the model whose reasoning fields, if any, became a think block before its text.

    Raises:
        AssertionError: there is reasoning although the endpoint is said not to split it off.
    """
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name)), None)
    kept = {name: value for name, value in message.items() if name not in _REASONING_FIELDS}
    if reasoning is None:
        return kept
    if not splits_reasoning:
        raise AssertionError(
            f"The model endpoint returned reasoning in a field of its own, so it splits reasoning from the answer, "
            f"but {setting} is false: set {setting} to true"
        )
    return {**kept, "content": wrapped([reasoning]) + (kept.get("content") or "")}


def tags_as_fields(message: dict[str, Any], *, keep_reasoning: bool) -> dict[str, Any]:
    """An earlier message of the model without think blocks; the first one goes into fields of its own if it is kept.

    Both spellings of the field are written: which one an endpoint reads depends on its version.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not content:
        return message
    if isinstance(content, str):
        blocks, rest = taken_apart(content)
        stripped = {**message, "content": rest}
    else:
        blocks, parts = [], []
        for part in content:
            found, rest = taken_apart(part.get("text") or "")
            blocks += found
            parts.append({**part, "text": rest} if "text" in part else part)
        stripped = {**message, "content": parts}
    if blocks and keep_reasoning:
        stripped |= dict.fromkeys(_REASONING_FIELDS, blocks[0])
    return stripped
