from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.token_id_capture.records import (
    TokenEntry,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
)
from tests.token_id_capture.calls import call, message

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.1]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version is 2, and this program reads up to 1"),
        ({"generation_log_probs": [-0.5]}, "2 generated tokens and 1 log-probs"),
        ({"generation_log_probs": [-0.5, float("nan")]}, "not a finite number"),
        ({"token_item_index": 1}, "token_item_index is 1, but there are 1 output items"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        call("a", [1], [2, 3], **change)


def test_an_entry_keeps_what_others_add_to_it() -> None:
    entry = call("a", [1], [2], weight_version=7)
    assert TokenEntry.model_validate_json(entry.model_dump_json()) == entry
    assert entry.model_dump()["weight_version"] == 7


def test_the_tokens_of_a_response_are_found_and_taken_off() -> None:
    response = {"output": [{"type": "reasoning", "summary": []}, message("hi", **TOKENS)]}

    assert extract_token_fields(response) == TOKENS
    items, index = strip_token_fields(response_to_output_items(response))
    assert index == 1
    assert items == [{"type": "reasoning", "summary": []}, message("hi")]
    assert response["output"][1]["generation_token_ids"] == [3], "the answer itself is left alone"


def test_the_tokens_of_a_chat_completion_go_to_its_last_item() -> None:
    function = {"name": "f", "arguments": "{}"}
    said = {
        "role": "assistant",
        "content": "<think>hm</think>I call",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    items = response_to_output_items({"choices": [{"message": {**said, **TOKENS}}]})

    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert [name for name in TOKENS if name in items[-1]] == list(TOKENS)
    assert not any(name in item for item in items[:-1] for name in TOKENS)


def test_answers_without_tokens_with_several_or_with_part_of_them() -> None:
    assert extract_token_fields({"output": [message("hi")]}) is None
    assert extract_token_fields({"error": "no"}) is None
    with pytest.raises(ValueError, match="2 items of one answer have token ids"):
        extract_token_fields({"output": [message("a", **TOKENS), message("b", **TOKENS)]})
    with pytest.raises(ValueError, match="but not generation_token_ids, generation_log_probs"):
        extract_token_fields({"output": [message("a", prompt_token_ids=[1])]})
