"""Token ids are complete and consistent, or there is an error."""

import asyncio
from typing import Any

import pytest

from responses_api_models.vllm_model.token_ids import with_token_ids

MESSAGE = {"role": "assistant", "content": "hi"}
BUNDLE = {"prompt_token_ids": [1, 2], "generation_token_ids": [7, 8], "generation_log_probs": [-0.1, -0.2]}
LOG_PROBS = {"content": [{"token": "token_id:7", "logprob": -0.1}, {"token": "token_id:8", "logprob": -0.2}]}
AS_TEXT = {"content": [{"token": "h", "logprob": -0.1}, {"token": "i", "logprob": -0.2}]}


def answer(message: dict[str, Any] | None = None, prompt_ids: Any = None, **choice: Any) -> dict[str, Any]:
    completion: dict[str, Any] = {"choices": [{"message": {**MESSAGE, **(message or {})}, **choice}]}
    return completion if prompt_ids is None else {**completion, "prompt_token_ids": prompt_ids}


def bundled(completion: dict[str, Any], asked: list[str] | None = None) -> dict[str, Any]:
    async def tokenize() -> list[int]:
        if asked is None:
            pytest.fail("/tokenize was asked without need")
        asked.append("/tokenize")
        return [1, 2]

    return asyncio.run(with_token_ids(completion, tokenize))


@pytest.mark.parametrize(
    "completion",
    [
        answer(BUNDLE),
        answer(BUNDLE, logprobs=LOG_PROBS),
        answer(BUNDLE, [1, 2], logprobs=AS_TEXT, token_ids=[7, 8]),
        answer(None, [1, 2], logprobs=LOG_PROBS, token_ids=[7, 8]),
        answer(None, [1, 2], logprobs=AS_TEXT, token_ids=[7, 8]),
    ],
)
def test_ids_that_came_along_are_used_and_their_sources_removed(completion: dict[str, Any]) -> None:
    assert bundled(completion) == {"choices": [{"message": {**MESSAGE, **BUNDLE}}]}


def test_the_prompt_is_tokenized_when_only_log_probs_came() -> None:
    asked: list[str] = []

    assert bundled(answer(logprobs=LOG_PROBS), asked) == {"choices": [{"message": {**MESSAGE, **BUNDLE}}]}
    assert asked == ["/tokenize"]


def test_routing_of_experts_stays_with_the_ids() -> None:
    completion = bundled(answer({**BUNDLE, "routed_experts": [[0, 1]]}))

    assert completion["choices"][0]["message"]["routed_experts"] == [[0, 1]]


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (answer(), "no log-probs"),
        (answer(logprobs=AS_TEXT), "as text"),
        (answer({"prompt_token_ids": [1]}, logprobs=LOG_PROBS), "not generation_token_ids, generation_log_probs"),
        (answer({**BUNDLE, "generation_log_probs": [-0.1]}), "2 token ids but 1 log-probs"),
        (answer(None, [1, 2], logprobs=LOG_PROBS), "no token_ids of the choice"),
        (answer(None, None, logprobs=LOG_PROBS, token_ids=[7, 8]), "no prompt_token_ids"),
        (answer(None, [1, 2], token_ids=[7, 8]), "no log-probs"),
        (answer(None, [1, 2], logprobs=AS_TEXT, token_ids=[7]), "1 token ids but 2 log-probs"),
        (answer(None, [1, 2], logprobs=LOG_PROBS, token_ids=[7, 9]), "tokens of the log-probs are not"),
        (answer(BUNDLE, [1, 3], token_ids=[7, 8]), "not those the endpoint sent beside"),
    ],
)
def test_what_is_partial_or_contradictory_is_an_error(completion: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        bundled(completion, [])
