"""The token ids and log-probs of an answer, from wherever the endpoint put them.

In this order: a complete bundle on the message; ids beside it (`prompt_token_ids` of the completion,
`token_ids` of the choice) with the choice's log-probs; log-probs whose tokens are spelled `token_id:<n>`,
with the prompt's ids from `/tokenize`. Training on a guess is worse than not training, so whatever is
incomplete or contradicts itself is an error.
"""

from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import orjson

from nemo_gym.openai_utils import REQUIRED_TOKEN_FIELDS

Tokenize: TypeAlias = Callable[[], Awaitable[list[int]]]
"""Asks the endpoint for the ids of the prompt."""

_ID_PREFIX = "token_id:"
_TOKEN, _LOG_PROB = itemgetter("token"), itemgetter("logprob")


class _Sampled(NamedTuple):
    """What the log-probs of a choice tell."""

    ids: list[int] | None
    """None when tokens are spelled as text."""
    log_probs: list[float]


async def with_token_ids(answer: dict[str, Any], tokenize: Tokenize) -> dict[str, Any]:
    """`answer` with a bundle on its message, and without the sources it was taken from.

    Raises:
        RuntimeError: there is no complete bundle, or sources disagree.
    """
    choice = answer["choices"][0]
    sampled = _sampled(choice.get("logprobs"))
    beside = _beside(answer.get("prompt_token_ids"), choice.get("token_ids"))
    bundle = _on_message(choice["message"]) or await _assembled(beside, sampled, tokenize)
    _check(bundle, beside, sampled)
    message = {**choice["message"], **bundle}
    bare_choice = {name: value for name, value in choice.items() if name not in ("logprobs", "token_ids")}
    bare_answer = {name: value for name, value in answer.items() if name != "prompt_token_ids"}
    return {**bare_answer, "choices": [{**bare_choice, "message": message}, *answer["choices"][1:]]}


def tokenize_request(chat_request: dict[str, Any]) -> dict[str, Any]:
    """The `/tokenize` request whose tokens are those of the prompt of `chat_request`."""
    return {name: chat_request[name] for name in _DECIDES_THE_PROMPT if name in chat_request}


_DECIDES_THE_PROMPT = (
    "model",
    "messages",
    "prompt",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "required_prefix_token_ids",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


def _on_message(message: dict[str, Any]) -> dict[str, Any] | None:
    present = [name for name in REQUIRED_TOKEN_FIELDS if message.get(name) is not None]
    if not present:
        return None
    missing = [name for name in REQUIRED_TOKEN_FIELDS if name not in present]
    if missing:
        raise RuntimeError(
            f"The endpoint put {', '.join(present)} on the message but not {', '.join(missing)}; "
            "token ids and log-probs are of use only together"
        )
    return {name: message[name] for name in present}


def _beside(prompt_ids: Any, generated_ids: Any) -> tuple[list[int], list[int]] | None:
    if prompt_ids is None and generated_ids is None:
        return None
    if prompt_ids is None or generated_ids is None:
        names = ("token_ids of the choice", "prompt_token_ids")
        given, missing = names if prompt_ids is None else names[::-1]
        raise RuntimeError(f"The endpoint sent {given} but no {missing}; token ids are of use only together")
    return prompt_ids, generated_ids


def _sampled(log_probs: Any) -> _Sampled | None:
    content = (log_probs or {}).get("content")
    if content is None:
        return None
    spelled = list(map(_TOKEN, content))
    return _Sampled(_spelled_ids(spelled), list(map(_LOG_PROB, content)))


def _spelled_ids(spelled: list[str]) -> list[int] | None:
    """The ids of tokens that are all spelled as such; None if one is text."""
    text = ",".join(spelled)
    if text.startswith(_ID_PREFIX) and text.count(f",{_ID_PREFIX}") == len(spelled) - 1:
        try:
            ids: list[int] = orjson.loads(f"[{text.replace(_ID_PREFIX, '')}]")
        except orjson.JSONDecodeError:
            ids = []
        if len(ids) == len(spelled) and set(map(type, ids)) == {int}:
            return ids
    as_ids = all(token.startswith(_ID_PREFIX) for token in spelled)
    return [int(token.removeprefix(_ID_PREFIX)) for token in spelled] if as_ids else None


async def _assembled(
    beside: tuple[list[int], list[int]] | None, sampled: _Sampled | None, tokenize: Tokenize
) -> dict[str, Any]:
    if sampled is None:
        raise RuntimeError(
            "The endpoint sent no log-probs although they were asked for; return_token_id_information: true "
            "needs an endpoint that returns them, such as vLLM"
        )
    if beside is not None:
        prompt_ids, generated_ids = beside
    elif sampled.ids is not None:
        prompt_ids, generated_ids = await tokenize(), sampled.ids
    else:
        raise RuntimeError(
            "The endpoint spelled the tokens of its log-probs as text although ids were asked for; "
            "return_token_id_information: true needs an endpoint that understands return_tokens_as_token_ids or "
            "return_token_ids, such as vLLM"
        )
    return dict(zip(REQUIRED_TOKEN_FIELDS, (prompt_ids, generated_ids, sampled.log_probs), strict=True))


def _check(bundle: dict[str, Any], beside: tuple[list[int], list[int]] | None, sampled: _Sampled | None) -> None:
    generated, log_probs = bundle["generation_token_ids"], bundle["generation_log_probs"]
    if len(generated) != len(log_probs):
        raise RuntimeError(
            f"The endpoint sent {len(generated)} token ids but {len(log_probs)} log-probs for one answer"
        )
    if beside is not None and beside != (bundle["prompt_token_ids"], generated):
        raise RuntimeError("The token ids on the message are not those the endpoint sent beside it")
    if sampled is not None and sampled.ids is not None and sampled.ids != generated:
        raise RuntimeError(
            f"The {len(sampled.ids)} tokens of the log-probs are not the {len(generated)} token ids the endpoint sent"
        )
