"""Every dialect: what was asked and said survives the way there and back."""

import pytest

from nemo_gym.dialects.anthropic import AnthropicDialect
from nemo_gym.dialects.base import Dialect
from nemo_gym.dialects.chat import ChatDialect, empty_completion
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming

ASKED = NeMoGymResponseCreateParamsNonStreaming.model_validate(
    {
        "model": "m",
        "temperature": 0.5,
        "max_output_tokens": 7,
        "input": [
            {"role": "user", "content": "How warm is it?", "type": "message"},
            {"type": "function_call", "call_id": "call_1", "id": "call_1", "name": "warmth", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "20"},
        ],
        "tools": [{"type": "function", "name": "warmth", "parameters": {}, "strict": True}],
    }
)


@pytest.mark.parametrize("spoken", [ChatDialect(), AnthropicDialect()], ids=lambda spoken: type(spoken).__name__)
def test_a_request_asks_the_same_after_the_way_there_and_back(spoken: Dialect) -> None:
    back = spoken.request_from(spoken.request_to(ASKED))

    assert (back.model, back.temperature, back.max_output_tokens) == ("m", 0.5, 7)
    kinds = [(item["type"], item.get("call_id")) for item in back.model_dump(exclude_unset=True)["input"]]
    assert kinds == [("message", None), ("function_call", "call_1"), ("function_call_output", "call_1")]
    assert [tool["name"] for tool in back.tools or ()] == ["warmth"]


def test_an_answer_becomes_the_response_to_its_request() -> None:
    response = ChatDialect().response_from(ASKED, empty_completion("served", "length", 5))

    assert (response.model, response.status, response.temperature) == ("m", "incomplete", 0.5)
    assert [item.type for item in response.output] == ["message"]
