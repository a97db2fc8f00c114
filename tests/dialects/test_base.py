"""Every dialect of the registry: found by its name, and what was asked and said survives the way there and back."""

import pytest

from nemo_gym.dialects.base import DIALECTS, dialect
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


@pytest.mark.parametrize("name", DIALECTS)
def test_a_request_asks_the_same_after_the_way_there_and_back(name: str) -> None:
    spoken = dialect(name)

    back = spoken.request_from(spoken.request_to(ASKED))

    assert (back.model, back.temperature, back.max_output_tokens) == ("m", 0.5, 7)
    kinds = [(item["type"], item.get("call_id")) for item in back.model_dump(exclude_unset=True)["input"]]
    assert kinds == [("message", None), ("function_call", "call_1"), ("function_call_output", "call_1")]
    assert [tool["name"] for tool in back.tools or ()] == ["warmth"]


def test_settings_reach_the_dialect() -> None:
    assert dialect("chat", return_token_id_information=True) == ChatDialect(return_token_id_information=True)


def test_an_answer_becomes_the_response_to_its_request() -> None:
    response = dialect("chat").response_from(ASKED, empty_completion("served", "length", 5))

    assert (response.model, response.status, response.temperature) == ("m", "incomplete", 0.5)
    assert [item.type for item in response.output] == ["message"]


def test_a_dialect_nobody_knows_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no dialect 'klingon'; these are known: chat"):
        dialect("klingon")
