import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_gym.openai_utils import (
    RESPONSES_TO_TRAIN,
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymHostedToolItem,
    NeMoGymMessage,
    NeMoGymResponseCustomToolCall,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseInputItem,
    NeMoGymResponseMcpListTools,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymSummary,
    TokenIDLogProbMixin,
    training_variant_of,
)

ITEM: TypeAdapter[Any] = TypeAdapter(NeMoGymResponseInputItem)

INPUT_PART = {"type": "input_text", "text": "hi"}
OUTPUT_PART = {"type": "output_text", "text": "hi", "annotations": []}
CALL = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Rome"}', "call_id": "call_1"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def read(item: dict[str, Any]) -> Any:
    """Read `item` from JSON and from a dict, which must agree."""
    from_json, from_dict = ITEM.validate_json(json.dumps(item)), ITEM.validate_python(item)
    assert type(from_json) is type(from_dict)
    assert dump(from_json) == dump(from_dict)
    return from_json


def dump(item: Any) -> Any:
    return ITEM.dump_python(item, mode="json", exclude_unset=True)


def errors_of(item: Any) -> list[Any]:
    with pytest.raises(ValidationError) as from_json:
        ITEM.validate_json(json.dumps(item))
    with pytest.raises(ValidationError) as from_dict:
        ITEM.validate_python(item)
    errors = from_json.value.errors(include_url=False)
    assert [error["loc"] for error in errors] == [error["loc"] for error in from_dict.value.errors()]
    return errors


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "hi"}, NeMoGymEasyInputMessage),
        ({"role": "developer", "content": "hi", "type": "message"}, NeMoGymEasyInputMessage),
        ({"role": "user", "content": [INPUT_PART]}, NeMoGymEasyInputMessage),
        ({"role": "assistant", "content": "hi"}, NeMoGymEasyInputMessage),
        ({"role": "assistant", "content": "hi", "id": "msg_1", "status": "completed"}, NeMoGymEasyInputMessage),
        ({"role": "user", "content": "hi", "status": "completed"}, NeMoGymEasyInputMessage),
        ({"role": "user", "content": [INPUT_PART], "status": "completed"}, NeMoGymMessage),
        ({"role": "system", "content": [INPUT_PART], "status": "incomplete", "type": "message"}, NeMoGymMessage),
        ({"role": "assistant", "content": [OUTPUT_PART], "id": "msg_1"}, NeMoGymResponseOutputMessage),
        ({"role": "assistant", "content": [], "id": "msg_1"}, NeMoGymResponseOutputMessage),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "m"},
            NeMoGymResponseOutputMessage,
        ),
        (CALL, NeMoGymResponseFunctionToolCall),
        ({"type": "function_call_output", "call_id": "call_1", "output": "cold"}, NeMoGymFunctionCallOutput),
        ({"type": "function_call_output", "call_id": "call_1", "output": [INPUT_PART]}, NeMoGymFunctionCallOutput),
        (REASONING, NeMoGymResponseReasoningItem),
        ({"type": "mcp_list_tools", "server_label": "docs", "tools": []}, NeMoGymResponseMcpListTools),
        ({"type": "shell_call", "call_id": "c"}, NeMoGymHostedToolItem),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "select 1"},
            NeMoGymResponseCustomToolCall,
        ),
    ],
)
def test_an_item_is_read_as_the_type_its_fields_say(item: dict[str, Any], expected: type[BaseModel]) -> None:
    assert type(read(item)) is expected


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": [INPUT_PART], "status": "completed"},
        {"role": "assistant", "content": [OUTPUT_PART], "id": "msg_1", "status": "completed", "type": "message"},
        CALL,
        REASONING,
    ],
)
def test_an_item_with_token_ids_is_the_training_variant_of_its_type(item: dict[str, Any]) -> None:
    plain, trained = read(item), read({**item, **TOKENS, "routed_experts": "envelope"})

    assert type(trained) is training_variant_of(type(plain)) is RESPONSES_TO_TRAIN[type(plain)]
    assert isinstance(trained, type(plain))
    assert isinstance(trained, TokenIDLogProbMixin)
    assert dump(trained) == {**dump(plain), **TOKENS, "routed_experts": "envelope"}


def test_only_types_a_model_generates_have_a_training_variant() -> None:
    with pytest.raises(NotImplementedError, match="NeMoGymFunctionCallOutput"):
        training_variant_of(NeMoGymFunctionCallOutput)


@pytest.mark.parametrize("absent", [*TOKENS])
@pytest.mark.parametrize("item", [CALL, REASONING, {"role": "assistant", "content": "hi"}])
def test_part_of_the_token_metadata_is_an_error(item: dict[str, Any], absent: str) -> None:
    partial = {name: value for name, value in TOKENS.items() if name != absent}

    [error] = errors_of({**item, **partial})

    assert error["type"] == "token_metadata_incomplete"
    assert absent in error["msg"]


def test_routed_experts_alone_are_an_error() -> None:
    [error] = errors_of({**CALL, "routed_experts": [[[0, 1]]]})

    assert "prompt_token_ids" in error["msg"]


def test_null_token_fields_count_as_absent() -> None:
    item = read({**CALL, "prompt_token_ids": None, "generation_token_ids": None, "generation_log_probs": None})

    assert type(item) is NeMoGymResponseFunctionToolCall


def test_a_bad_token_id_is_located() -> None:
    [error] = errors_of({**CALL, **TOKENS, "prompt_token_ids": [1, "two"]})

    assert error["loc"] == ("function_call", "prompt_token_ids", 1)


@pytest.mark.parametrize("item", [{"role": "tool", "content": "x"}, {"type": "web_search"}, {"output": "x"}])
def test_an_unknown_item_is_rejected_with_one_error_that_names_the_accepted_types(item: dict[str, Any]) -> None:
    [error] = errors_of(item)

    assert error["type"] == "unknown_item_type"
    assert error["input"] == item
    assert "message, function_call, function_call_output, reasoning, mcp_call" in error["msg"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "tool", "content": "x"},
        {"type": "message", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
    ],
)
def test_a_message_of_unknown_role_or_parts_is_rejected_with_one_error(item: dict[str, Any]) -> None:
    [error] = errors_of(item)

    assert "user, assistant, system, developer" in error["msg"]
    assert "input_text" in error["msg"]


def test_an_unknown_part_is_located_within_its_message() -> None:
    *_, error = errors_of({"role": "user", "content": [INPUT_PART, {"type": "text", "text": "x"}]})

    assert error["loc"] == ("user", "content", "list", 1)
    assert "input_text" in error["msg"]


@pytest.mark.parametrize("item", ["hi", None, 1, ["hi"]])
def test_what_is_no_object_is_no_item(item: Any) -> None:
    assert len(errors_of(item)) == 1


def test_a_replayed_assistant_message_needs_neither_id_nor_annotations() -> None:
    item = read({"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]})

    assert isinstance(item, NeMoGymResponseOutputMessage)
    assert item.id.startswith("msg_")
    assert dump(item) == {"role": "assistant", "content": [OUTPUT_PART], "type": "message"}
    assert item.model_dump()["id"] == item.id


def test_output_parts_are_models_and_input_parts_are_dicts() -> None:
    output = read({"role": "assistant", "id": "m", "content": [OUTPUT_PART, {"type": "refusal", "refusal": "no"}]})
    request = read({"role": "user", "content": [INPUT_PART]})

    assert [type(part) for part in output.content] == [NeMoGymResponseOutputText, NeMoGymResponseOutputRefusal]
    assert request.content[0]["text"] == "hi"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        {"type": "input_file", "file_id": "file_1"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "input_video", "video_url": "https://example.org/v.mp4"},
        {"type": "input_video", "video": ["frame"]},
    ],
)
def test_parts_of_every_kind_pass_through_with_their_unknown_fields(part: dict[str, Any]) -> None:
    item = {"role": "user", "content": [{**part, "x_vendor": {"a": 1}}]}

    assert dump(read(item)) == item


@pytest.mark.parametrize("sources", [{}, {"video": "", "video_url": None}, {"video": "a", "video_url": "b"}])
def test_a_video_part_has_exactly_one_source(sources: dict[str, Any]) -> None:
    *_, error = errors_of({"role": "user", "content": [{"type": "input_video", **sources}]})

    assert "exactly one" in error["msg"]


def test_a_reasoning_item_forgets_its_status() -> None:
    item = read({**REASONING, "status": "completed", "x_vendor": 1})

    assert dump(item) == {**REASONING, "x_vendor": 1}
    assert "status" not in item.model_dump()
    assert "status" not in item.model_fields_set


def test_items_built_with_defaults_are_dumped_completely_enough_to_be_replayed() -> None:
    items = [
        NeMoGymResponseReasoningItem(id="rs_1", summary=[NeMoGymSummary(text="hm")]),
        NeMoGymResponseFunctionToolCall(arguments="{}", call_id="c", name="f"),
        NeMoGymFunctionCallOutput(call_id="c", output="cold"),
        NeMoGymResponseOutputMessage(id="msg_1", content=[NeMoGymResponseOutputText(text="hi")]),
    ]

    assert [dump(item) for item in items] == [
        {"id": "rs_1", "summary": [{"text": "hm", "type": "summary_text"}], "type": "reasoning"},
        {"arguments": "{}", "call_id": "c", "name": "f", "type": "function_call"},
        {"call_id": "c", "output": "cold", "type": "function_call_output"},
        {"id": "msg_1", "content": [OUTPUT_PART], "role": "assistant", "status": "completed", "type": "message"},
    ]


def test_items_built_in_python_are_taken_as_they_are() -> None:
    message = NeMoGymResponseOutputMessageForTraining.model_validate(
        {"content": [OUTPUT_PART], "id": "m", **TOKENS, "x_vendor": 1}
    )

    assert ITEM.validate_python(message) is message


def test_a_model_of_another_library_is_taken_by_its_fields() -> None:
    class Foreign(BaseModel):
        type: str
        call_id: str
        name: str
        arguments: str

    assert ITEM.validate_python(Foreign.model_validate(CALL)) == read(CALL)


def test_a_subclass_is_dumped_with_its_own_fields() -> None:
    class Scored(NeMoGymResponseFunctionToolCallForTraining):
        score: float

    dumped = dump(ITEM.validate_python(Scored.model_validate({**CALL, **TOKENS, "score": 0.5})))

    assert dumped == {**CALL, **TOKENS, "score": 0.5}
