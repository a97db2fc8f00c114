"""A toy tokenizer: pieces of words, numbered by their checksum.

Every entry of a conversation is a mark, its pieces and an end; what the model generates is
rendered exactly as it will be when it comes back as input. So the prompt of a turn begins with the
prompt and the generation of the turn before, as training on token ids requires.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from responses_api_models.scripted_model.conversation import (
    Called,
    Conversation,
    Entry,
    ModelEntry,
    Returned,
    Said,
    Thought,
    Tool,
    canonical_json,
    is_by_model,
)
from responses_api_models.scripted_model.draws import Draws

_PIECE = re.compile(r"\s*\w{1,8}|\s*[^\w\s]|\s+")
_MARKS = ("end", "system", "developer", "user", "assistant", "thought", "call", "result", "tool")
_NUM_RESERVED = 16
VOCABULARY_SIZE = 65_536


class Token(NamedTuple):
    """One generated token."""

    id: int
    text: str
    log_prob: float


class TokenCounts(NamedTuple):
    """What an exchange costs."""

    prompt: int
    cached: int
    """Of the prompt, what the endpoint has seen before: everything up to the model's last words."""
    generation: int
    reasoning: int


def pieces(text: str) -> list[str]:
    """`text` cut into tokens; joined, they are `text` again."""
    return _PIECE.findall(text)


def prompt_token_ids(conversation: Conversation) -> list[int]:
    """The tokens a model sees before it answers."""
    rendered = [_tool_text(tool) for tool in conversation.tools]
    ids = [token_id for text in rendered for token_id in (_mark_id("tool"), *_ids(text), _mark_id("end"))]
    for entry in conversation.entries:
        ids += [_mark_id(_mark(entry)), *_ids(entry_text(entry)), _mark_id("end")]
    return ids


def generated_tokens(entries: Iterable[ModelEntry], *, is_cut: bool, draws: Draws) -> list[Token]:
    """The tokens of an answer; one that was cut off lacks the last end."""
    generated: list[tuple[int, str]] = []
    for entry in entries:
        generated.append((_mark_id(_mark(entry)), f"<|{_mark(entry)}|>"))
        generated += [(_piece_id(piece), piece) for piece in pieces(entry_text(entry))]
        generated.append((_mark_id("end"), "<|end|>"))
    if is_cut and generated:
        generated.pop()
    return [Token(*token, _log_prob(draws, position)) for position, token in enumerate(generated)]


def count_tokens(conversation: Conversation, answer: Iterable[ModelEntry], *, is_cut: bool = False) -> TokenCounts:
    """The size of an exchange, without computing its tokens."""
    tools = sum(_size(_tool_text(tool)) for tool in conversation.tools)
    sizes = [_size(entry_text(entry)) for entry in conversation.entries]
    seen = max((i + 1 for i, entry in enumerate(conversation.entries) if is_by_model(entry)), default=0)
    generated = [(entry, _size(entry_text(entry))) for entry in answer]
    return TokenCounts(
        prompt=tools + sum(sizes),
        cached=tools + sum(sizes[:seen]) if seen else 0,
        generation=sum(size for _, size in generated) - is_cut,
        reasoning=sum(size for entry, size in generated if isinstance(entry, Thought)),
    )


def cut_to(entries: tuple[ModelEntry, ...], limit: int) -> tuple[tuple[ModelEntry, ...], bool]:
    """As much of an answer as fits into `limit` tokens, and whether that is not all of it.

    Text is cut between tokens; a tool call that does not fit is left out.
    """
    kept: list[ModelEntry] = []
    for entry in entries:
        size = _size(entry_text(entry))
        if size <= limit:
            kept.append(entry)
            limit -= size
            continue
        text = "".join(pieces(entry_text(entry))[: max(0, limit - 1)])
        if isinstance(entry, Thought) and text:
            kept.append(Thought(text))
        elif isinstance(entry, Said) and (text or not kept):
            kept.append(Said(entry.role, text))
        return tuple(kept) or (Said("assistant", ""),), True
    return tuple(kept), False


def entry_text(entry: Entry) -> str:
    """What an entry reads like between its mark and its end."""
    return f"{entry.name}\n{entry.arguments}" if isinstance(entry, Called) else entry.text


def _size(text: str) -> int:
    return len(pieces(text)) + 2


def _tool_text(tool: Tool) -> str:
    return f"{tool.name}\n{tool.description}\n{canonical_json(tool.parameters).decode()}"


def _mark(entry: Entry) -> str:
    if isinstance(entry, Said):
        return entry.role if entry.role in _MARKS else "user"
    return {Thought: "thought", Called: "call", Returned: "result"}[type(entry)]


def _mark_id(mark: str) -> int:
    return _MARKS.index(mark)


def _ids(text: str) -> list[int]:
    return [_piece_id(piece) for piece in pieces(text)]


def _piece_id(piece: str) -> int:
    return _NUM_RESERVED + crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY_SIZE - _NUM_RESERVED)


def _log_prob(draws: Draws, position: int) -> float:
    return round(-3.0 * draws.uniform(f"log-prob {position}") ** 3, 6)
