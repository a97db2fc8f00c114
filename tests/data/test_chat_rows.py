import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.data.row_shapes import ChatRowError, params_from_chat
from nemo_gym.errors import ConfigError
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.rows import preprocess

CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}


def converted(row: dict[str, Any]) -> dict[str, Any]:
    params = params_from_chat(row)
    assert params is not None
    NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
    return params


def test_messages_become_the_input() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert converted({"messages": messages, "answer": "x"}) == {"input": messages}


def test_a_conversation_with_tools_keeps_calls_and_answers() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "messages": [
            {"role": "user", "content": "Look it up"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "One more", "tool_calls": [{**call, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "43"}]},
        ],
        "tools": [CHAT_TOOL],
    }
    assert converted(row) == {
        "input": [
            {"role": "user", "content": "Look it up"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
            {"role": "assistant", "content": "One more"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "43"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d"}],
    }


def test_parts_are_passed_on() -> None:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image_url", "image_url": "http://x/y.png"},
        {"type": "file", "file": {"file_id": "f1"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    said = [{"role": "assistant", "content": [{"type": "text", "text": "Hm"}]}, {"role": "user", "content": "Well?"}]
    assert converted({"messages": [{"role": "user", "content": content}, *said]})["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"},
                {"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"},
                {"type": "input_file", "file_id": "f1"},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hm"}]},
        {"role": "user", "content": "Well?"},
    ]


def test_a_prompt_is_text_or_messages() -> None:
    assert converted({"prompt": "Hi"}) == {"input": "Hi"}
    messages = [{"role": "user", "content": "Hi"}]
    assert converted({"prompt": messages, "tools": ["a field of the verifier"]}) == {"input": messages}
    assert converted({"prompt": "no", "messages": messages}) == {"input": messages}


def test_a_row_without_either_has_no_parameters() -> None:
    assert params_from_chat({"question": "q", "messages": None}) is None


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": "Hi"}, "`messages` must be a list of messages, not text"),
        ({"messages": []}, "not an array without any"),
        ({"prompt": 5}, "`prompt` must be a list of messages or text, not a number"),
        ({"messages": ["Hi"]}, r"`messages\[0\]`: expected an object with a role"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "expected an object with a role"),
        ({"messages": [{"role": "user", "content": None}]}, "content must be text or a list of parts, not null"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "of the type 'hologram'"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": 5}]}, "a tool's content must be text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`tool_call_id` must be text, not null"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "a tool call must be an object"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "nothing left to ask",
        ),
    ],
)
def test_what_is_no_chat_is_refused(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ChatRowError, match=complaint):
        params_from_chat(row)


def collected(*rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "a"}
    return preprocess(RolloutCollectionConfig.model_validate(files | options))


def test_the_collector_takes_chat_rows_and_keeps_their_fields() -> None:
    (row,) = collected({"prompt": "Hi", "answer": "x"}, responses_create_params={"temperature": 0.5})
    assert row == {
        "prompt": "Hi",
        "answer": "x",
        "agent_ref": {"name": "a"},
        "responses_create_params": {"input": "Hi", "temperature": 0.5},
        "_ng_task_index": 0,
        "_ng_rollout_index": 0,
    }


def test_parameters_of_its_own_or_a_prompt_file_come_before_the_chat_of_a_row() -> None:
    own = {"prompt": "Hi", "responses_create_params": {"input": "mine"}}
    assert collected(own)[0]["responses_create_params"] == {"input": "mine"}
    Path("p.yaml").write_text("user: 'Say: {prompt}'\n")
    (row,) = collected({"prompt": "Hi"}, prompt_config="p.yaml")
    assert row["responses_create_params"] == {"input": [{"role": "user", "content": "Say: Hi"}]}


def test_the_collector_names_the_rows_whose_chat_is_none() -> None:
    with pytest.raises(ConfigError, match=r"rows \[2, 3\]: `messages` must be a list of messages, not text"):
        collected({"prompt": "Hi"}, {"messages": "Hi"}, {"messages": "Ho"})
