"""Whatever a trajectory holds, it comes out of the types as it went in."""

from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
unknown_fields = {"phase": json_values, "x_vendor": json_values, "async": json_values}
status = st.sampled_from(["in_progress", "completed", "incomplete"])
token_fields = {
    "prompt_token_ids": st.lists(st.integers(0, 2**31), max_size=5),
    "generation_token_ids": st.lists(st.integers(0, 2**31), max_size=5),
    "generation_log_probs": st.lists(st.floats(-100, 0), max_size=5),
}


def objects(required: dict[str, Any], optional: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional={**(optional or {}), **unknown_fields})


def with_or_without_token_ids(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    experts = {"routed_experts": text | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)}
    return objects(required, optional) | objects({**required, **token_fields}, {**optional, **experts})


def one(value: str) -> st.SearchStrategy[str]:
    return st.just(value)


input_parts = st.lists(
    objects({"type": one("input_text"), "text": text})
    | objects({"type": one("input_image")}, {"image_url": text, "detail": text, "file_id": st.none() | text})
    | objects({"type": one("input_file")}, {"file_id": text})
    | objects({"type": one("input_video"), "video_url": text.filter(bool)}),
    max_size=3,
)
output_parts = st.lists(
    objects({"type": one("output_text"), "text": text, "annotations": st.lists(json_values, max_size=2)})
    | objects({"type": one("refusal"), "refusal": text}),
    min_size=1,
    max_size=3,
)
roles = st.sampled_from(["user", "system", "developer"])
summaries = st.lists(objects({"type": one("summary_text"), "text": text}), max_size=2)
reasoning_texts = st.lists(objects({"type": one("reasoning_text"), "text": text}), max_size=2)
optional_call_fields = {"id": st.none() | text, "status": st.none() | status}

items = st.one_of(
    with_or_without_token_ids({"role": roles | one("assistant"), "content": text}, {"type": one("message")}),
    with_or_without_token_ids({"role": roles, "content": input_parts}, {"type": one("message"), "status": status}),
    with_or_without_token_ids(
        {
            "id": text,
            "role": one("assistant"),
            "content": output_parts,
            "status": status,
            "type": one("message"),
        },
        {},
    ),
    with_or_without_token_ids({"role": one("assistant"), "content": output_parts, "type": one("message")}, {}),
    with_or_without_token_ids(
        {"type": one("function_call"), "name": text, "arguments": text, "call_id": text}, optional_call_fields
    ),
    objects({"type": one("function_call_output"), "call_id": text, "output": text | input_parts}, optional_call_fields),
    with_or_without_token_ids(
        {"type": one("reasoning"), "id": text, "summary": summaries},
        {"content": reasoning_texts, "encrypted_content": st.none() | text},
    ),
    objects(
        {"type": st.sampled_from(["mcp_list_tools", "web_search_call", "custom_tool_call"])}, {"tools": json_values}
    ),
)
trajectories = st.lists(items, max_size=5)
unhurried = settings(deadline=None, max_examples=150)


@unhurried
@given(trajectories)
def test_a_trajectory_round_trips(output: list[Any]) -> None:
    body = {"id": "resp_1", "created_at": 1.5, "model": "m", "object": "response", "output": output}

    response = NeMoGymResponse.model_validate_json(orjson.dumps(body))

    assert orjson.loads(response.model_dump_json(exclude_unset=True)) == body
    assert response.model_dump(mode="json", exclude_unset=True) == body


@unhurried
@given(trajectories)
def test_bytes_dicts_and_dumps_are_read_alike(input_items: list[Any]) -> None:
    body = {"input": input_items}

    params = NeMoGymResponseCreateParamsNonStreaming.model_validate_json(orjson.dumps(body))
    again = NeMoGymResponseCreateParamsNonStreaming.model_validate(params.model_dump())

    from_dict = NeMoGymResponseCreateParamsNonStreaming.model_validate(body)
    types = [type(item) for item in params.input]
    assert [type(item) for item in from_dict.input] == types
    assert [type(item) for item in again.input] == types
    assert from_dict.model_dump(exclude_unset=True) == body
    assert again.model_dump() == params.model_dump()
