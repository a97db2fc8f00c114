"""Explains why the tokens of two turns do not fit together, so that the cause can be found by reading.

Tokens drift when the text of earlier turns is tokenized anew instead of being kept: the same text in other
tokens, or a chat template that changes what was said (drops thoughts, trims spaces, reorders arguments).
"""

from typing import Any

from nemo_gym.rl.interfaces import MessageLog
from nemo_gym.rl.tensors import as_list

_SHOWN_BEFORE = 4
_SHOWN_AFTER = 6


def describe_drift(turn: int, message_log: MessageLog, seen: list[int], prompt: list[int], tokenizer: Any) -> str:
    """The first difference between the tokens seen so far and the prompt of `turn`, with its surroundings."""
    place = next(
        (index for index, (old, new) in enumerate(zip(seen, prompt, strict=False)) if old != new),
        min(len(seen), len(prompt)),
    )
    return "\n".join(
        [
            f"Non-contiguous messages found: the prompt of turn {turn} ({len(prompt)} tokens) does not begin with the "
            f"{len(seen)} tokens of the turns before it.",
            f"The first difference is at token {place}, {_whereabouts(place, message_log)}:",
            f"  seen so far: {_excerpt(seen, place, tokenizer)}",
            f"  this prompt: {_excerpt(prompt, place, tokenizer)}",
            _verdict(seen, prompt, place, tokenizer),
        ]
    )


def _whereabouts(place: int, message_log: MessageLog) -> str:
    """Which earlier message a token belongs to."""
    start = 0
    for number, message in enumerate(message_log):
        end = start + len(message["token_ids"])
        if place < end:
            what = "generated in" if message["role"] == "assistant" else "given to"
            return f"{what} turn {number // 2 + 1}"
        start = end
    return "after everything seen so far"


def _excerpt(ids: list[int], place: int, tokenizer: Any) -> str:
    """The tokens around `place`, each with its text, a mark before the one that differs."""
    start, end = max(0, place - _SHOWN_BEFORE), place + _SHOWN_AFTER
    before = " ".join(_shown(token, tokenizer) for token in ids[start:place])
    after = " ".join(_shown(token, tokenizer) for token in ids[place:end]) or "(ends here)"
    left, right = "… " if start else "", " …" if end < len(ids) else ""
    return f"{left}{before} >>> {after}{right}"


def _shown(token: int, tokenizer: Any) -> str:
    text = _decoded([token], tokenizer)
    return str(token) if text is None else f"{token}:{text!r}"


def _verdict(seen: list[int], prompt: list[int], place: int, tokenizer: Any) -> str:
    if len(prompt) < len(seen) and place == len(prompt):
        return "The prompt ends too early: something dropped earlier messages before this turn."
    old, new = _decoded(seen[place:], tokenizer), _decoded(prompt[place:], tokenizer)
    if old is not None and new is not None and new.startswith(old):
        return (
            "The text is the same in other tokens: it was tokenized anew. Let the model server keep the token ids of "
            "earlier turns, or use one whose prompts are built from tokens."
        )
    return (
        "The text differs too: the chat template (or the agent) changes what was said before. Common causes are "
        "dropped thoughts, trimmed spaces and rewritten tool-call arguments."
    )


def _decoded(ids: list[int], tokenizer: Any) -> str | None:
    """The text of tokens; None when the tokenizer cannot tell."""
    try:
        return str(tokenizer.batch_decode([as_list(ids)])[0])
    except Exception:  # noqa: BLE001 - this text only helps to explain another error
        return None
