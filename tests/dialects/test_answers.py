"""Endpoints refuse for many reasons; only a conversation that is too long ends it quietly."""

import pytest

from nemo_gym.dialects.base import EXTRA_BODY, UnusableRequestError, object_in_metadata
from nemo_gym.dialects.chat import is_too_long
from nemo_gym.dialects.to_chat import tags_as_fields
from nemo_gym.http.errors import ServerResponseError


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 32768 tokens. However, you requested 32818 tokens in the messages",
        "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 2048",
        "max_tokens must be at least 1, got -17.",
        "The decoder prompt (length 40961) is longer than the maximum model length of 40960.",
        '{"error": {"code": "context_length_exceeded"}}',
    ],
)
def test_a_conversation_that_is_too_long_is_recognised(said: str) -> None:
    assert is_too_long(ServerResponseError("http://host/v1/chat/completions", 400, said.encode()))
    assert not is_too_long(ServerResponseError("http://host/v1/chat/completions", 500, said.encode()))


@pytest.mark.parametrize(
    "said",
    [
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "temperature must be non-negative",
        "The model 'm' does not exist",
    ],
)
def test_a_wrong_setting_is_no_long_conversation(said: str) -> None:
    assert not is_too_long(ServerResponseError("http://host/v1/chat/completions", 400, said.encode()))


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_metadata_that_is_no_object_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(UnusableRequestError, match=r"metadata\.extra_body") as caught:
        object_in_metadata({"extra_body": text}, EXTRA_BODY)

    assert repr(text) in str(caught.value)


def test_think_blocks_in_parts_are_found() -> None:
    parts = [{"type": "text", "text": "<think>Hm.</think>Yes."}, {"type": "refusal", "refusal": "No."}]

    changed = tags_as_fields({"role": "assistant", "content": parts}, keep_reasoning=True)

    assert changed == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Yes."}, parts[1]],
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }


def test_what_users_say_about_thinking_stays() -> None:
    message = {"role": "user", "content": "What does <think>x</think> mean?"}

    assert tags_as_fields(message, keep_reasoning=True) == message
