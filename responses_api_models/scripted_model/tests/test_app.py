"""What callers of the model see, in both APIs."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from responses_api_models.scripted_model.app import ScriptedModel

MakeClient = Callable[..., TestClient]

WEATHER_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: dict[str, Any] = {"input": [{"role": "user", "content": "How is the weather in Oslo?"}], "tools": [WEATHER_TOOL]}
CHAT_ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
    "tools": [{"type": "function", "function": {key: WEATHER_TOOL[key] for key in WEATHER_TOOL if key != "type"}}],
}


def tool_output(call: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps(value)}


def texts(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_without_a_script_it_calls_the_tool_and_answers_from_its_output(client: MakeClient) -> None:
    http = client()

    first = http.post("/v1/responses", json=ASK).json()

    (call,) = first["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "get_weather",
        {"city": "Oslo"},
    )
    output = tool_output(call, {"weather_description": "It hails in Oslo."})
    second = http.post("/v1/responses", json=ASK | {"input": [*ASK["input"], call, output]}).json()
    assert "It hails in Oslo." in texts(second)
    assert [item["type"] for item in second["output"]] == ["message"]


def test_equal_requests_get_equal_answers_to_the_last_byte(client: MakeClient) -> None:
    assert client().post("/v1/responses", json=ASK).content == client().post("/v1/responses", json=ASK).content
    assert (
        client().post("/v1/chat/completions", json=CHAT_ASK).content
        == client().post("/v1/chat/completions", json=CHAT_ASK).content
    )


def test_another_seed_gives_another_answer(client: MakeClient) -> None:
    script = {"rules": [{"reply": {"text": "heads"}, "probability": 0.5}, {"reply": {"text": "tails"}}]}
    http = client(script)

    def toss(seed: int) -> str:
        metadata = {"extra_body": json.dumps({"seed": seed})}
        return texts(http.post("/v1/responses", json={"input": "toss a coin", "metadata": metadata}).json())

    tosses = [toss(seed) for seed in range(40)]
    assert set(tosses) == {"heads", "tails"}
    assert tosses == [toss(seed) for seed in range(40)]


def test_a_seed_in_the_request_comes_before_the_scripts(model: Callable[..., ScriptedModel]) -> None:
    coin = [{"reply": {"text": "heads"}, "probability": 0.5}, {"reply": {"text": "tails"}}]

    def toss(script_seed: int, own_seed: int | None = None) -> str:
        metadata = None if own_seed is None else {"extra_body": json.dumps({"seed": own_seed})}
        body = NeMoGymResponseCreateParamsNonStreaming(input="toss a coin", metadata=metadata)
        return asyncio.run(model({"seed": script_seed, "rules": coin}).responses(body)).output_text

    by_script_seed = [toss(seed) for seed in range(12)]
    assert set(by_script_seed) == {"heads", "tails"}
    assert {toss(seed, own_seed=1) for seed in range(12)} == {by_script_seed[1]}


@pytest.mark.parametrize("extra_body", ["not json", "[1]"])
def test_an_unreadable_extra_body_is_the_callers_mistake(client: MakeClient, extra_body: str) -> None:
    answer = client().post("/v1/responses", json={"input": "hi", "metadata": {"extra_body": extra_body}})

    assert answer.status_code == 400
    assert "metadata.extra_body" in answer.text


def test_both_apis_give_the_same_answer(client: MakeClient) -> None:
    responses = client().post("/v1/responses", json=ASK).json()
    chat = client().post("/v1/chat/completions", json=CHAT_ASK).json()

    (choice,) = chat["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == responses["output"][0]["arguments"]
    assert call["id"] == responses["output"][0]["call_id"]
    assert choice["finish_reason"] == "tool_calls"
    assert chat["usage"]["total_tokens"] == responses["usage"]["total_tokens"]


def test_a_chat_goes_on_after_a_tool_answered(client: MakeClient) -> None:
    http = client()
    message = http.post("/v1/chat/completions", json=CHAT_ASK).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"report": "It is mild."}'}

    chat = http.post(
        "/v1/chat/completions", json=CHAT_ASK | {"messages": [*CHAT_ASK["messages"], message, result]}
    ).json()

    assert "It is mild." in chat["choices"][0]["message"]["content"]
    assert chat["choices"][0]["finish_reason"] == "stop"


def test_reasoning_comes_when_it_is_asked_for(client: MakeClient) -> None:
    response = client().post("/v1/responses", json=ASK | {"reasoning": {"effort": "low"}}).json()
    chat = client().post("/v1/chat/completions", json=CHAT_ASK | {"reasoning_effort": "low"}).json()
    tagged = client(uses_reasoning_parser=False).post(
        "/v1/chat/completions", json=CHAT_ASK | {"reasoning_effort": "low"}
    )

    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    thought = response["output"][0]["summary"][0]["text"]
    assert chat["choices"][0]["message"]["reasoning_content"] == thought
    assert tagged.json()["choices"][0]["message"]["content"] == f"<think>{thought}</think>"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ["message"]),
        ("required", ["function_call"]),
        ({"type": "function", "name": "get_weather"}, ["function_call"]),
    ],
)
def test_tool_choice_is_obeyed(client: MakeClient, choice: Any, expected: list[str]) -> None:
    response = client().post("/v1/responses", json=ASK | {"tool_choice": choice}).json()

    assert [item["type"] for item in response["output"]] == expected
    assert response["tool_choice"] == choice


def test_a_long_answer_is_cut_at_the_token_limit(client: MakeClient) -> None:
    http = client({"rules": [{"reply": {"text": "one two three four five six seven"}}]})

    response = http.post("/v1/responses", json={"input": "count", "max_output_tokens": 4}).json()
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "count"}], "max_tokens": 4})

    assert texts(response) == "one two three"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 4
    assert chat.json()["choices"][0]["finish_reason"] == "length"


def test_a_call_that_does_not_fit_is_left_out(client: MakeClient) -> None:
    response = client().post("/v1/responses", json=ASK | {"max_output_tokens": 3}).json()

    assert texts(response) == ""
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_usage_can_be_set_and_withheld(client: MakeClient) -> None:
    fixed = client({"usage": {"input_tokens": 100, "output_tokens": {"uniform": [5, 9]}, "details": False}})
    none = client({"usage": {"report": False}})

    usage = fixed.post("/v1/responses", json=ASK).json()["usage"]
    assert usage["input_tokens"] == 100
    assert 5 <= usage["output_tokens"] <= 9
    assert usage["total_tokens"] == 100 + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert none.post("/v1/responses", json=ASK).json()["usage"] is None
    assert none.post("/v1/chat/completions", json=CHAT_ASK).json()["usage"] is None


def test_log_probs_come_as_vllm_sends_them(client: MakeClient) -> None:
    asked = {"logprobs": True, "return_tokens_as_token_ids": True, "return_token_ids": True}

    chat = client().post("/v1/chat/completions", json=CHAT_ASK | asked).json()
    plain = client().post("/v1/chat/completions", json=CHAT_ASK | {"logprobs": True}).json()

    (choice,) = chat["choices"]
    shown = [token["token"] for token in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(token["logprob"] <= 0 for token in choice["logprobs"]["content"])
    assert len(choice["token_ids"]) == chat["usage"]["completion_tokens"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert "get" in "".join(token["token"] for token in plain["choices"][0]["logprobs"]["content"])
    tokenized = client().post("/tokenize", json={"model": "any", **CHAT_ASK}).json()
    assert tokenized["tokens"] == chat["prompt_token_ids"]
    assert tokenized["count"] == len(tokenized["tokens"])


def test_token_ids_can_be_attached_to_chat_messages(client: MakeClient) -> None:
    chat = client(return_token_id_information=True).post("/v1/chat/completions", json=CHAT_ASK).json()

    message = chat["choices"][0]["message"]
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"]) > 0
    assert message["prompt_token_ids"]


def test_log_probs_of_text_come_when_a_response_is_asked_to_include_them(client: MakeClient) -> None:
    http = client({"rules": [{"reply": {"text": "yes indeed"}}]})

    response = http.post("/v1/responses", json={"input": "?", "include": ["message.output_text.logprobs"]}).json()

    (part,) = response["output"][0]["content"]
    assert "".join(token["token"] for token in part["logprobs"]) == "yes indeed"


def test_it_can_stand_in_for_an_endpoint(client: MakeClient) -> None:
    models = client(model="stand-in").get("/v1/models").json()

    assert [model["id"] for model in models["data"]] == ["stand-in"]


def test_importing_it_loads_nothing_heavy() -> None:
    probe = (
        "import sys, responses_api_models.scripted_model.app\n"
        "sys.stdout.write(str({'ray', 'wandb', 'torch', 'pandas', 'openai', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()"
