"""Interrupted answers, put together: tokens, text, thoughts, versions, and where that ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.base_responses_api_model import GenerationGate
from responses_api_models.vllm_model import interruptions
from responses_api_models.vllm_model.interruptions import said_nothing, whole_answer, with_no_tokens

PROMPT = [1, 2]


def answer(
    text: str, *ids: int, finish_reason: str = "abort", prompt: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": text,
        "prompt_token_ids": prompt or PROMPT,
        "generation_token_ids": list(ids),
        "generation_log_probs": [-0.5] * len(ids),
    }
    choice = {"message": message, "finish_reason": finish_reason, "logprobs": {"content": [1]}}
    return {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": len(ids)}, **more}


class Endpoint:
    """Answers what it was told, one after the other, and notes what it was asked."""

    def __init__(self, *answers: dict[str, Any], gate: GenerationGate | None = None) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()
        self.gate = gate or GenerationGate()

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        return self.answers.pop(0)

    def whole(self, **outgoing: Any) -> dict[str, Any]:
        return asyncio.run(whole_answer(self.gate, {"messages": [], **outgoing}, self, self))


def test_an_answer_that_is_not_interrupted_is_as_it_came() -> None:
    given = answer("hi", 5, finish_reason="stop")
    assert Endpoint(given).whole() == given


def test_two_interruptions_make_one_answer() -> None:
    gate = GenerationGate(3)
    endpoint = Endpoint(
        answer("a", 5),
        answer("b", 6, prompt=[1, 2, 5]),
        answer("c", 7, 8, finish_reason="stop", prompt=[1, 2, 5, 6]),
        gate=gate,
    )
    whole = endpoint.whole(max_tokens=9, temperature=0.5, metadata={"x": "y"})

    message = whole["choices"][0]["message"]
    assert (message["content"], message["prompt_token_ids"]) == ("abc", PROMPT)
    assert (message["generation_token_ids"], len(message["generation_log_probs"])) == ([5, 6, 7, 8], 4)
    assert (message["weight_versions"], message["weight_segments"]) == ([3, 3], [[3, 1], [3, 1], [3, 2]])
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    first, second, third = endpoint.asked
    assert "prompt" not in first
    assert (second["prompt"], second["max_tokens"], second["temperature"]) == ([1, 2, 5], 8, 0.5)
    assert (third["prompt"], third["max_tokens"]) == ([1, 2, 5, 6], 7)
    assert not {"messages", "metadata"} & set(second)


@pytest.mark.parametrize(
    ("before", "after", "finish_reason", "text"),
    [
        ("<think>so</think>", " far</think>done", "stop", "<think>so far</think>done"),
        ("<think>so</think>", " far", "length", "<think>so far</think>"),
        ("<think>so</think>", "done", "stop", "<think>so</think>done"),
        ("<think>so</think>do", "ne", "stop", "<think>so</think>done"),
        ("do", "ne", "stop", "done"),
    ],
)
def test_thoughts_go_on_where_they_were_cut_off(before: str, after: str, finish_reason: str, text: str) -> None:
    endpoint = Endpoint(answer(before, 5), answer(after, 6, finish_reason=finish_reason, prompt=[1, 2, 5]))
    assert endpoint.whole()["choices"][0]["message"]["content"] == text


def test_a_cap_that_is_used_up_ends_the_answer() -> None:
    endpoint = Endpoint(answer("ab", 5, 6))
    choice = endpoint.whole(max_completion_tokens=2)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["generation_token_ids"]) == ("length", [5, 6])
    assert len(endpoint.asked) == 1


def test_an_answer_aborted_before_its_first_token_is_asked_for_again() -> None:
    nothing = answer("", finish_reason="abort")
    nothing["choices"][0]["logprobs"] = None
    assert said_nothing(nothing)
    endpoint = Endpoint(with_no_tokens(nothing), answer("hi", 5, finish_reason="stop"))
    assert endpoint.whole()["choices"][0]["message"]["content"] == "hi"
    assert len(endpoint.asked) == 2


def test_an_endpoint_that_aborts_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "_MOST_EMPTY_HANDED", 2)
    endpoint = Endpoint(*(answer("") for _ in range(5)))
    with pytest.raises(RuntimeError, match="aborted the same answer 3 times although no pause was asked for"):
        endpoint.whole()


def test_going_on_from_other_tokens_is_an_error() -> None:
    endpoint = Endpoint(answer("a", 5), answer("b", 6, prompt=[1, 2, 55]))
    with pytest.raises(RuntimeError, match="went on from other tokens than the 3 it was given"):
        endpoint.whole()


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        ({"weight_version": 4}, [4, 4]),
        ({"metadata": {"weight_version": "7"}}, [7, 7]),
        ({"weight_version": True}, [2, 2]),
        ({"metadata": {"weight_version": "main"}}, [2, 2]),
    ],
)
def test_versions_of_the_endpoint_win_where_they_are_numbers(told: dict[str, Any], versions: list[int]) -> None:
    endpoint = Endpoint(answer("a", 5, finish_reason="stop", **told), gate=GenerationGate(2))
    assert endpoint.whole()["choices"][0]["message"]["weight_versions"] == versions


def test_weights_that_change_under_an_answer_are_told() -> None:
    gate = GenerationGate(1)

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        gate.version = 2  # as with engines that change weights in the middle of generations
        return answer("a", 5, finish_reason="stop")

    never: Callable[..., Any] = lambda request: pytest.fail("nothing was interrupted")  # noqa: E731
    whole = asyncio.run(whole_answer(gate, {"messages": []}, ask, never))
    assert whole["choices"][0]["message"]["weight_versions"] == [1, 2]
