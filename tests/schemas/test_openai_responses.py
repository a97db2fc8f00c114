import json
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)

RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "created_at": 1700000000.5,
    "model": "m",
    "object": "response",
    "output": [],
}


def message(*texts: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": parts, **fields}


def usage(tokens: int, cached: int | None, reasoning: int | None) -> NeMoGymResponseUsage:
    return NeMoGymResponseUsage.model_validate(
        {
            "input_tokens": tokens,
            "input_tokens_details": None if cached is None else {"cached_tokens": cached},
            "output_tokens": tokens + 1,
            "output_tokens_details": None if reasoning is None else {"reasoning_tokens": reasoning},
            "total_tokens": 2 * tokens + 1,
        }
    )


def test_a_response_without_the_echo_of_the_request_gets_defaults() -> None:
    response = NeMoGymResponse.model_validate_json(json.dumps(RESPONSE))

    assert response.parallel_tool_calls is True
    assert response.tool_choice == "auto"
    assert response.tools == []
    assert response.model_dump(exclude_unset=True) == RESPONSE


def test_a_full_dump_has_the_documented_fields_in_the_documented_order() -> None:
    expected = (
        "id created_at error incomplete_details instructions metadata model object output parallel_tool_calls "
        "temperature tool_choice tools top_p background conversation max_output_tokens max_tool_calls "
        "previous_response_id prompt prompt_cache_key reasoning safety_identifier service_tier status text "
        "top_logprobs truncation usage user"
    )

    assert list(NeMoGymResponse.model_validate(RESPONSE).model_dump()) == expected.split()


def test_unknown_fields_of_a_response_are_kept_at_every_level() -> None:
    body = {
        **RESPONSE,
        "completed_at": 1700000001,
        "output": [message("hi", phase="final")],
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 1},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
            "total_tokens": 2,
            "cost": 0.25,
        },
        "incomplete_details": {"reason": "max_output_tokens", "at": 3},
        "error": {"code": "server_error", "message": "no", "param": None},
    }

    assert NeMoGymResponse.model_validate_json(json.dumps(body)).model_dump(mode="json", exclude_unset=True) == body


def test_output_text_joins_what_the_model_said_without_separator() -> None:
    output = [
        {"role": "user", "content": "not this"},
        message("a", "b"),
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "refusal", "refusal": "not this"}]},
        {"role": "assistant", "content": "c"},
        message("d", prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[0.0]),
    ]

    response = NeMoGymResponse.model_validate({**RESPONSE, "output": output})

    assert response.output_text == "abcd"
    assert isinstance(response.output[-1], NeMoGymResponseOutputMessageForTraining)


def test_an_error_in_an_item_names_its_place_in_the_output() -> None:
    with pytest.raises(ValidationError) as caught:
        NeMoGymResponse.model_validate({**RESPONSE, "output": [message("a"), {"type": "function_call", "name": "f"}]})

    assert [error["loc"] for error in caught.value.errors()] == [
        ("output", 1, "function_call", "arguments"),
        ("output", 1, "function_call", "call_id"),
    ]


@pytest.mark.parametrize("field", ["id", "created_at", "model", "output"])
def test_a_response_without_its_essentials_is_rejected(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        NeMoGymResponse.model_validate({name: value for name, value in RESPONSE.items() if name != field})


def test_create_params_are_dumped_with_the_documented_fields_and_defaults() -> None:
    expected = (
        "background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls "
        "previous_response_id prompt reasoning service_tier store temperature text tool_choice tools top_logprobs "
        "top_p truncation user stream"
    )

    dumped = NeMoGymResponseCreateParamsNonStreaming(input="hi").model_dump()

    assert list(dumped) == expected.split()
    assert {name: value for name, value in dumped.items() if value is not None} == {
        "input": "hi",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def test_create_params_dump_only_what_was_given() -> None:
    given = {
        "input": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}, {"type": "mcp"}],
        "tool_choice": {"type": "function", "name": "f"},
        "metadata": {"extra_body": '{"seed": 3}'},
        "reasoning": {"effort": "low"},
        "stream": False,
    }

    params = NeMoGymResponseCreateParamsNonStreaming.model_validate(given)

    assert params.model_dump(exclude_unset=True) == given
    assert isinstance(params.input[0], NeMoGymEasyInputMessage)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 3),
        ("stream", True),
        ("metadata", {"seed": 3}),
        ("service_tier", "gold"),
        ("truncation", "yes"),
        ("tool_choice", "sometimes"),
        ("tools", [{"name": "f"}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("input", None),
        ("input", [{"role": "tool", "content": "x"}]),
    ],
)
def test_a_request_that_would_not_mean_what_it_says_is_rejected(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "hi", field: value})

    assert {error["loc"][0] for error in caught.value.errors()} == {field}
    assert len(str(caught.value)) < 2000


def test_usage_adds_up() -> None:
    total = NeMoGymResponseUsage.sum_from_list([usage(1, 2, 3), usage(10, 20, 30), usage(100, 200, 300)])

    assert total == usage(111, 222, 333).model_copy(update={"output_tokens": 114, "total_tokens": 225})


def test_a_sum_leaves_its_summands_as_they_are() -> None:
    left, right = usage(1, 2, 3), usage(10, 20, 30)
    total = accumulate_response_usage(left, right)

    assert total is not None
    total.input_tokens_details.cached_tokens += 1
    assert (left, right) == (usage(1, 2, 3), usage(10, 20, 30))


def test_no_usages_add_up_to_nothing() -> None:
    total = NeMoGymResponseUsage.sum_from_list([])

    assert (total.input_tokens, total.output_tokens, total.total_tokens) == (0, 0, 0)


def test_a_detail_that_nobody_told_adds_nothing() -> None:
    total = accumulate_response_usage(usage(1, 2, None), usage(10, None, 30))

    assert total is not None
    assert (total.input_tokens, total.input_tokens_details.cached_tokens) == (11, 2)
    assert total.output_tokens_details.reasoning_tokens == 30


def test_a_count_that_only_one_side_has_is_left_out_of_the_sum() -> None:
    with_cost = NeMoGymResponseUsage.model_validate({**usage(1, 2, 3).model_dump(), "image_tokens": 7})

    total = accumulate_response_usage(with_cost, usage(1, 2, 3))

    assert total is not None
    assert "image_tokens" not in total.model_dump()


def test_accumulation_starts_with_the_first_usage_there_is() -> None:
    assert accumulate_response_usage(None, None) is None
    assert accumulate_response_usage(None, usage(1, 2, 3)) == usage(1, 2, 3)
    assert accumulate_response_usage(usage(1, 2, 3), None) == usage(1, 2, 3)


def test_accumulating_leaves_its_arguments_alone() -> None:
    first, second = usage(1, 2, 3), usage(10, 20, 30)

    accumulate_response_usage(first, second)

    assert (first, second) == (usage(1, 2, 3), usage(10, 20, 30))
