"""`usage` always tells its details, and reasoning without content has no such key, whatever an endpoint sent."""

import json
from typing import Any

import pytest
from openai.types import responses as sdk

from nemo_gym.openai_utils import (
    NeMoGymResponse,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)

COUNTS = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
NOTHING_TOLD: list[dict[str, Any]] = [
    {},
    {"input_tokens_details": None, "output_tokens_details": None},
    {"input_tokens_details": {}, "output_tokens_details": {}},
    {"input_tokens_details": {"cached_tokens": None}, "output_tokens_details": {"reasoning_tokens": None}},
    {"input_tokens_details": None},
]
ZEROS = {**COUNTS, "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}


def response(**fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "created_at": 1.0, "model": "m", "object": "response", "output": [], **fields}


@pytest.mark.parametrize("told", NOTHING_TOLD)
def test_details_nobody_told_are_written_as_zeros(told: dict[str, Any]) -> None:
    body = response(usage={**COUNTS, **told})

    from_python, from_json = NeMoGymResponse(**body), NeMoGymResponse.model_validate_json(json.dumps(body))

    assert from_python == from_json
    for only_given in (False, True):
        assert from_json.model_dump(exclude_unset=only_given)["usage"] == ZEROS
        assert json.loads(from_json.model_dump_json(exclude_unset=only_given))["usage"] == ZEROS


@pytest.mark.parametrize("told", NOTHING_TOLD)
def test_an_agent_adds_details_up_without_asking_whether_they_are_there(told: dict[str, Any]) -> None:
    usage = NeMoGymResponseUsage(**COUNTS)
    more = NeMoGymResponseUsage.model_validate({**COUNTS, **told})

    usage.input_tokens_details.cached_tokens += more.input_tokens_details.cached_tokens + 2
    usage.output_tokens_details.reasoning_tokens += more.output_tokens_details.reasoning_tokens + 5

    assert usage.model_dump(exclude_unset=True)["input_tokens_details"] == {"cached_tokens": 2}
    total = accumulate_response_usage(usage, more)
    assert total is not None
    assert (total.input_tokens_details.cached_tokens, total.output_tokens_details.reasoning_tokens) == (2, 5)


@pytest.mark.parametrize("wrong", [3, "none", ["x"], {"cached_tokens": "many"}])
def test_details_that_are_no_counts_are_one_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="whose cached_tokens is a whole number") as caught:
        NeMoGymResponseUsage.model_validate({**COUNTS, "input_tokens_details": wrong})

    assert [error["loc"] for error in caught.value.errors()] == [("input_tokens_details",)]  # type: ignore[attr-defined]


def test_counts_of_other_kinds_are_kept() -> None:
    details = {"input_tokens_details": {"cached_tokens": None, "audio_tokens": 2}}

    assert NeMoGymResponseUsage(**COUNTS, **details).model_dump()["input_tokens_details"] == {
        "cached_tokens": 0,
        "audio_tokens": 2,
    }


def test_usage_may_be_given_as_an_object_of_the_sdk() -> None:
    details = {
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 2},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    theirs = sdk.ResponseUsage.model_validate({**COUNTS, **details})

    assert NeMoGymResponse(**response(usage=theirs)).to_dict()["usage"] == {**COUNTS, **details}
    by_parts = NeMoGymResponseUsage(
        **COUNTS,
        input_tokens_details=theirs.input_tokens_details,
        output_tokens_details=theirs.output_tokens_details,
    )
    assert by_parts.model_dump() == {**COUNTS, **details}


@pytest.mark.parametrize("given", [{}, {"content": None}])
def test_reasoning_without_content_has_no_such_key(given: dict[str, Any]) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], **given}
    read = NeMoGymResponse.model_validate_json(json.dumps(response(output=[item])))

    for dump in (read.model_dump(), read.model_dump(exclude_unset=True), json.loads(read.model_dump_json())):
        assert "content" not in dump["output"][0]
    assert isinstance(read.output[0], NeMoGymResponseReasoningItem)
    assert read.output[0].content is None


@pytest.mark.parametrize("content", [[], [{"type": "reasoning_text", "text": "Hm."}]])
def test_reasoning_with_content_keeps_it(content: list[Any]) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}

    assert NeMoGymResponse(**response(output=[item])).model_dump()["output"][0]["content"] == content
