"""The token interfaces of inference engines: ids in, the engine's own ids and log-probs out.

vLLM takes a prompt of ids at `/v1/completions`, SGLang at `/generate`. Nothing is guessed: an answer without ids, with
another number of log-probs, or to another prompt than was sent, is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym.responses_converter import UnusableRequestError

_ID_PREFIX = "token_id:"
_SAMPLING = ("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
_SGLANG_NAMES = {"seed": "sampling_seed", "max_tokens": "max_new_tokens"}
ABORTED = "abort"
"""The finish reason of what was stopped before its end."""


@dataclass(frozen=True)
class Generation:
    """What an engine has generated."""

    token_ids: list[int]
    log_probs: list[float | None]
    """Null where it was NaN, which JSON cannot say."""
    finish_reason: str
    weight_version: Any = None
    """Of the weights, if the engine tells."""
    cached_tokens: int = 0


@dataclass(frozen=True)
class Engine:
    """How an engine is spoken to."""

    method: str
    """Of the client."""
    request: Callable[[list[int], Mapping[str, Any], str], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Sequence[int]], Generation]


def sampling_of(chat_request: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat request says about sampling; `max_tokens` is always there, null without a limit.

    Raises:
        UnusableRequestError: it wants what cannot be had with token ids.
    """
    if chat_request.get("n") not in (None, 1):
        raise UnusableRequestError(f"n is {chat_request['n']!r}: there is one answer at a time, so n must be 1")
    if chat_request.get("tool_choice") not in (None, "auto", "none"):
        raise UnusableRequestError(
            f"tool_choice is {chat_request['tool_choice']!r}, which an engine that is given token ids cannot be held "
            "to; leave it out, or set it to auto or none"
        )
    limit = chat_request.get("max_completion_tokens") or chat_request.get("max_tokens")
    given = {key: chat_request[key] for key in _SAMPLING if chat_request.get(key) is not None}
    return {**given, "max_tokens": limit}


def _vllm_request(ids: list[int], sampling: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        **sampling,
        "model": model,
        "prompt": ids,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }


def _vllm_generation(answer: Mapping[str, Any], sent: Sequence[int]) -> Generation:
    choice = (answer.get("choices") or [{}])[0]
    told = choice.get("logprobs") or {}
    spelled, log_probs = told.get("tokens"), told.get("token_logprobs")
    if spelled is None or log_probs is None:
        raise RuntimeError("The engine sent no log-probs although they were asked for; is it vLLM?")
    ids = choice.get("token_ids")
    if all(str(token).startswith(_ID_PREFIX) for token in spelled):
        named = [int(str(token).removeprefix(_ID_PREFIX)) for token in spelled]
        if ids is not None and list(ids) != named:
            raise RuntimeError(f"The {len(named)} tokens of the log-probs are not the {len(ids)} ids the engine sent")
        ids = named
    if ids is None:
        raise RuntimeError("The engine told its tokens as text although ids were asked for; vLLM tells them as ids")
    _check_prompt(choice.get("prompt_token_ids", answer.get("prompt_token_ids")), sent)
    usage = answer.get("usage") or {}
    version = choice.get("weight_version", answer.get("weight_version"))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return _checked(Generation(list(ids), list(log_probs), _finish(choice.get("finish_reason")), version, cached))


def _sglang_request(ids: list[int], sampling: Mapping[str, Any], model: str) -> dict[str, Any]:
    if "response_format" in sampling:
        raise UnusableRequestError("response_format has no form for this engine; give json_schema in extra_body")
    named = {_SGLANG_NAMES.get(key, key): value for key, value in sampling.items()}
    return {
        "input_ids": ids,
        "sampling_params": {**named, "skip_special_tokens": False, "no_stop_trim": True},
        "return_logprob": True,
        "stream": False,
    }


def _sglang_generation(answer: Mapping[str, Any], sent: Sequence[int]) -> Generation:
    meta = answer.get("meta_info") or {}
    told = meta.get("output_token_logprobs")
    if told is None:
        raise RuntimeError("The engine sent no log-probs although they were asked for; is it SGLang?")
    ids = [int(entry[1]) for entry in told]
    if answer.get("output_ids") is not None and list(answer["output_ids"]) != ids:
        raise RuntimeError(f"The {len(ids)} tokens of the log-probs are not the ids the engine sent")
    if meta.get("prompt_tokens") not in (None, len(sent)):
        raise RuntimeError(f"The engine has read a prompt of {meta['prompt_tokens']} tokens, not the {len(sent)} sent")
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    log_probs = [entry[0] for entry in told]
    version, cached = meta.get("weight_version"), meta.get("cached_tokens") or 0
    return _checked(Generation(ids, log_probs, _finish(reason), version, cached))


ENGINES = {
    "vllm": Engine("create_completion", _vllm_request, _vllm_generation),
    "sglang": Engine("create_generate", _sglang_request, _sglang_generation),
}


def _checked(generation: Generation) -> Generation:
    ids, log_probs = len(generation.token_ids), len(generation.log_probs)
    if ids != log_probs:
        raise RuntimeError(f"The engine sent {ids} token ids but {log_probs} log-probs for one answer")
    return generation


def _check_prompt(told: Any, sent: Sequence[int]) -> None:
    if told is not None and list(told) != list(sent):
        raise RuntimeError(f"The engine says that its prompt had {len(told)} tokens that are not the {len(sent)} sent")


def _finish(reason: Any) -> str:
    return "stop" if reason is None else str(reason)
