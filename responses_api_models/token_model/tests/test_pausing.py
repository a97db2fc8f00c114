"""A trainer changes the weights while an answer is generated."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nemo_gym.base_responses_api_model import GenerationGate
from responses_api_models.token_model.engines import Generation
from responses_api_models.token_model.pausing import weights_of, whole_generation
from responses_api_models.token_model.tests.conftest import Serve
from responses_api_models.token_model.tests.test_app import BODY
from responses_api_models.vllm_model import interruptions

CALL = (
    '<think>\nlet me see\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def going_on(prompt: str) -> str:
    """What is left to say of the call."""
    said = prompt.rpartition("assistant\n")[2]
    assert CALL.startswith(said)
    return CALL.removeprefix(said)


def wait_for(condition: Callable[[], bool]) -> None:
    by_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < by_s, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_interrupted_tool_call_goes_on_from_its_own_tokens(serve: Serve, engine: str) -> None:
    model = serve(going_on, engine=engine, abort_path="/abort")
    model.engine.delay_s = 60.0
    post = model.client.post
    assert post(f"{model.url}/weights/resume", json={"weight_version": 1}).json() == {"weight_version": 1}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(model.respond, BODY)
        wait_for(lambda: model.engine.under_way == 1)
        assert post(f"{model.url}/weights/pause", json={"grace_s": 60.0}).status_code == 200
        assert not asked.done()
        post(f"{model.url}/weights/resume", json={"weight_version": 2})
        output = asked.result(60)["output"]

    item = output[-1]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "get_weather", '{"city": "Oslo"}')
    first, second = [it.get("prompt") or it["input_ids"] for it in model.engine.requests]
    ids, cut = item["generation_token_ids"], model.engine.says_before_abort
    assert item["prompt_token_ids"] == first
    assert second == [*first, *ids[:cut]]
    assert item["weight_versions"] == [1, 2]
    assert item["weight_segments"] == [[1, cut], [2, len(ids) - cut]]


def test_what_an_engine_says_of_its_weights_counts_and_a_limit_holds_over_the_parts() -> None:
    said = iter([Generation([1, 2], [-1.0, -1.0], "abort", "7"), Generation([3], [-1.0], "abort", 8)])
    limits = []

    async def ask(prompt: list[int], limit: int | None) -> Generation:
        limits.append((prompt, limit))
        return next(said)

    whole, weights = asyncio.run(whole_generation(GenerationGate(), ask, [0], 3))

    assert limits == [([0], 3), ([0, 1, 2], 1)]
    assert (whole.token_ids, whole.finish_reason) == ([1, 2, 3], "length")
    assert weights == {"weight_versions": [7, 8], "weight_segments": [[7, 2], [8, 1]]}


def test_an_engine_that_aborts_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "_MOST_EMPTY_HANDED", 2)

    async def ask(prompt: list[int], limit: int | None) -> Generation:
        return Generation([], [], "abort")

    with pytest.raises(RuntimeError, match="although no pause was asked for"):
        asyncio.run(whole_generation(GenerationGate(), ask, [0], None))


@pytest.mark.parametrize(
    ("parts", "fields"),
    [
        ([(None, None, 3)], {}),
        ([(True, True, 3)], {}),
        ([("abc", "abc", 3)], {"weight_version": "abc"}),
        ([(3, 4, 5)], {"weight_versions": [3, 4]}),
        ([(3, 3, 0), (4, 4, 5)], {"weight_versions": [4, 4]}),
        ([(3, 3, 0)], {"weight_versions": [3, 3]}),
    ],
)
def test_versions_are_told_as_far_as_they_are_known(parts: list[Any], fields: dict[str, Any]) -> None:
    assert weights_of(parts) == fields
