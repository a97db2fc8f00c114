"""Whole rollouts for training: every turn begins with the tokens of the turns before it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient, SimpleServer
from nemo_gym.testing import Address, register_local_app
from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.scripted_model.app import ScriptedModel, ScriptedModelConfig
from responses_api_models.vllm_model.app import VLLMModel

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ROW = {"responses_create_params": {"input": "Is it warmer in Oslo or in Rome?", "tools": [TOOL]}}
AGENT = {
    "resources_server": {"type": "resources_servers", "name": "environment"},
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
}
TURNS: list[dict[str, Any]] = [
    {"reasoning": "First\n one. ", "calls": ["Oslo"]},
    {"reasoning": "Only thinking."},
    {"text": " And  the other.\n", "calls": ["Rome", "Bari"]},
    {"reasoning": "Done.", "text": "\n\nBoth are cold. "},
]


def rollout(base_url: str, **model_settings: Any) -> dict[str, Any]:
    """One rollout, with the model's endpoint at a real address and the other servers in memory."""
    servers: dict[str, tuple[type[SimpleServer], dict[str, Any]]] = {
        "environment": (SimpleWeatherResourcesServer, {}),
        "policy_model": (
            VLLMModel,
            {
                "base_url": base_url,
                "api_key": "none",
                "model": "m",
                "return_token_id_information": True,
                "uses_reasoning_parser": True,
                **model_settings,
            },
        ),
        "agent": (SimpleAgent, AGENT),
    }
    blocks = {
        name: {"resources_servers": {"any": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **settings}}}
        for port, (name, (_, settings)) in enumerate(servers.items(), 20_001)
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(blocks)
    )

    async def play() -> dict[str, Any]:
        for name, (server_class, _) in servers.items():
            config_class: Any = server_class.model_fields["config"].annotation
            block = blocks[name]["resources_servers"]["any"]
            server = server_class(config=config_class(name=name, **block), server_client=client)
            register_local_app(name, server.complete_app(), [Address("127.0.0.1", block["port"])])
        answer = await client.post("agent", "/run", json=ROW)
        body = await answer.read()
        assert answer.status == 200, body
        result: dict[str, Any] = json.loads(body)
        return result

    return asyncio.run(play())


def trained_items(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The items with token ids, after checking them as a trainer does."""
    items = [item for item in result["response"]["output"] if "generation_token_ids" in item]
    seen: list[int] = []
    for item in items:
        assert item["prompt_token_ids"][: len(seen)] == seen
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    return items


def scripted(serve: Callable[[FastAPI], str]) -> str:
    """The address of a scripted model that plays the endpoint."""

    def reply(turn: dict[str, Any]) -> dict[str, Any]:
        calls = [{"name": "get_weather", "arguments": {"city": city}} for city in turn.get("calls", ())]
        said: dict[str, Any] = {name: turn[name] for name in ("reasoning", "text") if name in turn}
        return {**said, "tool_calls": calls} if calls else said

    turns = [TURNS[0], *TURNS[2:]]  # thinking and going on counts as one turn there
    rules = [{"match": {"turn": number}, "reply": reply(turn)} for number, turn in enumerate(turns, 1)]
    config = ScriptedModelConfig(
        name="endpoint", host="127.0.0.1", port=1, entrypoint="app.py", script={"rules": rules}
    )
    return f"{serve(ScriptedModel(config=config, server_client=MagicMock(spec=ServerClient)).complete_app())}/v1"


@pytest.mark.parametrize("inline", [False, True])
def test_tokens_are_contiguous_over_turns_with_the_scripted_endpoint(
    serve: Callable[[FastAPI], str], inline: bool
) -> None:
    result = rollout(scripted(serve), request_prompt_and_generation_token_ids=inline)

    assert len(trained_items(result)) == 3
    kinds = [item["type"] for item in result["response"]["output"]]
    assert kinds == [
        *("reasoning", "function_call", "function_call_output"),
        *("message", "function_call", "function_call", "function_call_output", "function_call_output"),
        *("reasoning", "message"),
    ]
    assert result["reward"] == 1.0


@pytest.mark.parametrize("inline", [False, True])
def test_tokens_are_contiguous_over_turns_with_an_endpoint_that_renders_bytes(
    start_vllm: Callable[..., Any], inline: bool
) -> None:
    replies = [
        {
            **turn,
            "calls": [
                {"name": "get_weather", "arguments": json.dumps({"city": city})} for city in turn.get("calls", ())
            ],
        }
        for turn in TURNS
    ]
    vllm = start_vllm(replies=replies)

    result = rollout(vllm.url, request_prompt_and_generation_token_ids=inline)

    items = trained_items(result)
    assert [bytes(item["generation_token_ids"]).decode() for item in items] == [
        '<think>First\n one. </think>[get_weather {"city": "Oslo"}]<end>',
        "<think>Only thinking.</think><end>",
        ' And  the other.\n[get_weather {"city": "Rome"}][get_weather {"city": "Bari"}]<end>',
        "<think>Done.</think>\n\nBoth are cold. <end>",
    ]
    prompt = bytes(items[-1]["prompt_token_ids"]).decode()
    assert prompt.count("The weather in Rome is cold.") == 1
    earlier = [message for message in vllm.requests[-1]["messages"] if message["role"] == "assistant"]
    assert [message["generation_token_ids"] for message in earlier] == [
        item["generation_token_ids"] for item in items[:-1]
    ]


def test_for_evaluation_no_token_ids_are_asked_for(start_vllm: Callable[..., Any]) -> None:
    vllm = start_vllm()

    result = rollout(vllm.url, return_token_id_information=False)

    assert trained_items(result) == []
    assert "logprobs" not in vllm.requests[0]


def test_a_rollout_whose_conversation_no_longer_fits_is_scored_as_it_is(start_vllm: Callable[..., Any]) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    vllm = start_vllm(max_model_len=300, replies=[{"calls": [call]}])

    result = rollout(vllm.url)

    assert result["response"]["status"] == "incomplete"
    assert 1 < len(vllm.requests) < 10
    assert len(trained_items(result)) == len(vllm.requests) - 1
