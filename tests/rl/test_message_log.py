import importlib
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.failures import IncompleteTokenDataError, NoGenerationDataError, NonContiguousTokensError
from nemo_gym.rl.interfaces import as_list
from nemo_gym.rl.message_log import build_message_log

Item = dict[str, Any]


class CountingTokenizer:
    """Decodes ids to letters and counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        self.calls += 1
        return ["".join(chr(96 + token) for token in sequence) for sequence in sequences]

    def apply_chat_template(self, conversation: Any, *, tokenize: bool) -> Any:
        assert tokenize
        return [1] * sum(len(message["content"]) for message in conversation)


class MappingTokenizer(CountingTokenizer):
    """Answers as transformers 5 does."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool) -> Any:
        ids = super().apply_chat_template(conversation, tokenize=tokenize)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def turn(prompt: list[int], generation: list[int], **more: Any) -> Item:
    return {
        "type": "message",
        "content": [{"type": "output_text", "text": "fine"}],
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        **more,
    }


def result(*items: Item) -> dict[str, Any]:
    return {"response": {"output": list(items)}, "reward": 1.0}


def test_turns_become_user_and_assistant_messages_without_a_token_twice_or_lost() -> None:
    tool_output = {"type": "function_call_output", "call_id": "c", "output": "5"}
    answer = result(turn([1, 2], [3, 4]), tool_output, turn([1, 2, 3, 4, 5, 6], [7]))

    built = build_message_log(answer, CountingTokenizer())

    log = built["message_log"]
    assert [(message["role"], as_list(message["token_ids"])) for message in log] == [
        ("user", [1, 2]),
        ("assistant", [3, 4]),
        ("user", [5, 6]),
        ("assistant", [7]),
    ]
    assert [as_list(message.get("generation_logprobs", ())) for message in log] == [[], [-0.5, -0.5], [], [-0.5]]
    assert [message["content"] for message in log] == [""] * 4
    assert built["input_message_log"] == [log[0]]
    assert built["input_message_log"][0] is log[0]
    assert built["full_result"] is answer


def test_what_is_logged_has_texts_in_place_of_tokens_decoded_in_two_calls() -> None:
    answer, tokenizer = result(turn([1, 2], [3, 4]), turn([1, 2, 3, 4], [7])), CountingTokenizer()

    build_message_log(answer, tokenizer)

    items = answer["response"]["output"]
    assert [(item["prompt_str"], item["generation_str"]) for item in items] == [("ab", "cd"), ("abcd", "g")]
    assert not any("token_ids" in key or "log_probs" in key for item in items for key in item)
    assert tokenizer.calls == 2


def test_a_turn_may_add_nothing_to_the_prompt() -> None:
    built = build_message_log(result(turn([1], [2]), turn([1, 2], [3])), CountingTokenizer())
    assert [as_list(message["token_ids"]) for message in built["message_log"]] == [[1], [2], [], [3]]


def test_items_without_generated_tokens_are_passed_over() -> None:
    empty = turn([1, 2, 3], [])
    built = build_message_log(result({"type": "reasoning", "summary": []}, empty, turn([1], [2])), CountingTokenizer())
    assert [as_list(message["token_ids"]) for message in built["message_log"]] == [[1], [2]]


def test_drifted_tokens_are_an_error_that_shows_where_and_says_why() -> None:
    with pytest.raises(NonContiguousTokensError, match="Non-contiguous messages found") as caught:
        build_message_log(result(turn([1, 2], [3, 4]), turn([1, 2, 3, 9, 5], [7])), CountingTokenizer(), branches=False)

    text = str(caught.value)
    assert "turn 2 (5 tokens)" in text
    assert "at token 3, generated in turn 1" in text
    assert "seen so far: 1:'a' 2:'b' 3:'c' >>> 4:'d'" in text
    assert "this prompt: 1:'a' 2:'b' 3:'c' >>> 9:'i' 5:'e'" in text
    assert "The text differs too" in text
    assert isinstance(caught.value, AssertionError)


def test_drift_that_keeps_the_text_is_told_from_drift_that_does_not() -> None:
    class Merging(CountingTokenizer):
        def batch_decode(self, sequences: list[list[int]]) -> list[str]:
            return ["".join("ab" if token == 12 else chr(96 + token) for token in ids) for ids in sequences]

    with pytest.raises(NonContiguousTokensError, match="The text is the same in other tokens"):
        build_message_log(result(turn([5], [1, 2]), turn([5, 12, 6], [7])), Merging(), branches=False)


def test_a_prompt_that_lost_its_beginning_is_called_that() -> None:
    with pytest.raises(NonContiguousTokensError, match="The prompt ends too early"):
        build_message_log(result(turn([1, 2], [3, 4]), turn([1, 2, 3], [7])), CountingTokenizer(), branches=False)


def test_a_tokenizer_that_cannot_decode_single_tokens_does_not_hide_the_drift() -> None:
    class Broken(CountingTokenizer):
        def batch_decode(self, sequences: list[list[int]]) -> list[str]:
            raise KeyError("no such token")

    with pytest.raises(NonContiguousTokensError, match="seen so far: 1 2 >>> 3"):
        build_message_log(result(turn([1, 2], [3]), turn([1, 2, 4], [7])), Broken(), branches=False)


@pytest.mark.parametrize("kind", [CountingTokenizer, MappingTokenizer])
def test_an_over_long_prompt_gives_no_tokens_which_is_an_error_with_its_length(kind: Any) -> None:
    answer = result({"type": "message", "content": []})
    answer["responses_create_params"] = {"input": [{"role": "user", "content": "x" * 70}]}

    with pytest.raises(NoGenerationDataError, match=r"no generation data.*\(message\).*70 tokens") as caught:
        build_message_log(answer, kind())
    assert isinstance(caught.value, ValueError)


def test_the_length_of_a_prompt_is_counted_with_a_tokenizer_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="test-only: make test-rl installs it")
    monkeypatch.syspath_prepend(str(PARENT_DIR / "docs" / "examples"))
    tokenizer = importlib.import_module("tiny_transformer").tiny_tokenizer()
    answer = result({"type": "message", "content": []})
    answer["responses_create_params"] = {"input": [{"role": "user", "content": "7 " * 38}]}

    with pytest.raises(NoGenerationDataError, match="Its prompt is 40 tokens"):
        build_message_log(answer, tokenizer)


def test_a_prompt_whose_length_cannot_be_told_is_still_that_error() -> None:
    with pytest.raises(NoGenerationDataError, match="of unknown length"):
        build_message_log(result(), CountingTokenizer())


@pytest.mark.parametrize("lost", ["prompt_token_ids", "generation_log_probs"])
def test_part_of_the_token_data_is_an_error(lost: str) -> None:
    item = turn([1], [2])
    del item[lost]
    with pytest.raises(IncompleteTokenDataError, match=lost) as caught:
        build_message_log(result(item), CountingTokenizer())
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith("an item of type 'message'")


def test_as_many_log_probs_as_tokens_or_an_error() -> None:
    with pytest.raises(IncompleteTokenDataError, match="2 generated tokens and 1 log-probs"):
        build_message_log(result(turn([1], [2, 3], generation_log_probs=[-1.0])), CountingTokenizer())


def test_an_answer_that_is_no_object_is_refused() -> None:
    with pytest.raises(AssertionError, match="list"):
        build_message_log([], CountingTokenizer())  # type: ignore[arg-type]


def said(text: str) -> Item:
    return {"content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> Item:
    return {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": text}]}


@pytest.mark.parametrize(
    ("item", "invalid", "malformed"),
    [
        (said("fine"), False, False),
        (said('<tool_call>{"name"'), True, False),
        (said("…</function_call>"), True, False),
        (said("</think> so"), False, True),
        (thought("hm <think> hm"), False, False),
        (thought("<think> a <think> b"), False, True),
        (thought("call </tool_call>"), True, False),
        ({"type": "function_call", "content": None, "arguments": "<think><tool_call>"}, False, False),
    ],
)
def test_unparsed_tool_calls_and_stray_thinking_tags_are_flagged(item: Item, invalid: bool, malformed: bool) -> None:
    built = build_message_log(result(turn([1], [2], **item)), CountingTokenizer())
    message = built["message_log"][1]
    assert (message["is_invalid_tool_call"], message["has_malformed_thinking"]) == (invalid, malformed)


def test_patterns_can_be_set_and_empty_lists_mean_the_defaults() -> None:
    def flags(**settings: Any) -> tuple[bool, bool]:
        message = build_message_log(result(turn([1], [2], **said("[CALL] <think>"))), CountingTokenizer(), **settings)
        last = message["message_log"][1]
        return last["is_invalid_tool_call"], last["has_malformed_thinking"]

    assert flags(invalid_tool_call_patterns=["[CALL]"], thinking_tags=["[THINK]"]) == (True, False)
    assert flags(invalid_tool_call_patterns=[], thinking_tags=None) == (False, True)
