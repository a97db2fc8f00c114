"""Names under which agents and model servers elsewhere know the converter."""

from typing import Any

import pytest

from nemo_gym.openai_utils import (
    REQUIRED_TOKEN_METADATA_FIELDS,
    TOKEN_METADATA_FIELDS,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    TokenIDLogProbMixin,
)
from nemo_gym.responses_converter import (
    ResponsesConverter,
    ResponsesConverterState,
    VLLMConverter,
    VLLMConverterResponsesToChatCompletionsState,
)

TOKENS = TokenIDLogProbMixin(prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[-0.5])


def state(*, returns_ids: bool = True, **given: Any) -> ResponsesConverterState:
    return VLLMConverterResponsesToChatCompletionsState(return_token_id_information=returns_ids, **given)


def test_the_former_names_mean_the_same() -> None:
    assert VLLMConverter is ResponsesConverter
    assert VLLMConverterResponsesToChatCompletionsState is ResponsesConverterState
    assert VLLMConverter.THINK_TAG_PATTERN.findall("<think>a</think>b") == ["a"]
    assert {"routed_experts"} | REQUIRED_TOKEN_METADATA_FIELDS == TOKEN_METADATA_FIELDS


def test_a_state_makes_one_message_of_what_was_gathered() -> None:
    gathered = state(content_buffer="hi", tool_calls_buffer=[{"id": "c"}], token_information=TOKENS)

    gathered.flush_assistant()
    gathered.flush_assistant()

    assert gathered.messages == [
        {"content": "hi", "role": "assistant", "tool_calls": [{"id": "c"}], **TOKENS.model_dump(exclude_none=True)}
    ]
    assert (gathered.content_buffer, gathered.tool_calls_buffer, gathered.token_information) == ("", [], None)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"token_information": TOKENS}, []),
        ({"assistant_item_buffered": True}, [{"content": None, "role": "assistant"}]),
        (
            {"content_buffer": "a", "token_information": TOKENS, "returns_ids": False},
            [{"content": "a", "role": "assistant"}],
        ),
    ],
)
def test_a_state_keeps_empty_turns_only_if_there_was_one(given: dict[str, Any], messages: list[Any]) -> None:
    gathered = state(**given)

    gathered.flush_assistant()

    assert gathered.messages == messages
    assert gathered.token_information is None


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_chat_request_becomes_a_responses_request(limit: str) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    asked = NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
            limit: 5,
            "reasoning_effort": "low",
            "temperature": 0.5,
            "response_format": {"type": "json_schema", "json_schema": schema},
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }
    )

    params = VLLMConverter(return_token_id_information=False).chat_completion_to_responses_create_params(asked)

    dumped = params.model_dump(exclude_unset=True)
    assert [(item["role"], item["content"]) for item in dumped.pop("input")] == [("system", "s"), ("user", "hi")]
    assert dumped == {
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", **schema}},
        "tools": [{"type": "function", **function}],
        "tool_choice": {"type": "function", "name": "f"},
    }
