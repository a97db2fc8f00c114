"""An agent that is one function: what it gets, what it may return, and what becomes of its mistakes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.config_types import ConfigError
from nemo_gym.testing import MALFORMED, play
from responses_api_agents.function_agent.app import FunctionAgentConfig, load_function

ROOT = Path(__file__).parents[3]
CONFIGS = [
    ROOT / "resources_servers" / "string_match" / "configs" / "string_match.yaml",
    ROOT / "responses_api_agents" / "function_agent" / "configs" / "function_agent.yaml",
]
ROW = {"responses_create_params": {"input": "6 * 7?"}, "expected_answer": "42", "own_field": [7]}
RIGHT = {"rules": [{"reply": {"text": "42"}}]}
FUNCTIONS = """
import asyncio

async def text(row, model):
    assert row["expected_answer"] == "42" and row["own_field"] == [7]
    first, second = await asyncio.gather(model.create_response(input="a"), model.create_response(input="b"))
    return first.output_text

async def response(row, model):
    return await model.create_response(**row["responses_create_params"], temperature=0.5)

async def as_dict(row, model):
    return (await response(row, model)).model_dump()

async def silent(row, model):
    return ""

async def no_response(row, model):
    return {"answer": 42}

async def number(row, model):
    return 42

async def misspells(row, model):
    return await model.create_response(input="a", temprature=1)

async def crashes(row, model):
    return row["no such field"]

async def sleeps(row, model):
    await asyncio.sleep(60)

async def times_out_itself(row, model):
    await asyncio.wait_for(asyncio.sleep(60), 0.01)

async def takes_too_little(row):
    return ""

def is_not_async(row, model):
    return ""

class Agents:
    @staticmethod
    async def method(row, model):
        return "42"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_agents.py").write_text(FUNCTIONS)
    yield tmp_path
    sys.modules.pop("my_agents", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def rollout(folder: Path, function: str, script: Any = None, **agent_settings: Any) -> dict[str, Any]:
    block = {"resources_server": {"name": "string_match"}, "path": str(folder), **agent_settings}
    settings = {"function_agent": {"responses_api_agents": {"function_agent": {"function": function, **block}}}}
    (result,) = play(CONFIGS, [ROW], script=script or RIGHT, settings=settings, agent="function_agent")
    return result


def test_a_text_is_an_answer_and_counts_the_tokens_of_every_call(folder: Path) -> None:
    result = rollout(folder, "my_agents:text")
    one_call = rollout(folder, "my_agents:response")["response"]["usage"]["output_tokens"]

    assert (result["reward"], result["own_field"], result["response"]["model"]) == (1.0, [7], "scripted_model")
    assert result["response"]["usage"]["output_tokens"] == 2 * one_call
    (message,) = result["response"]["output"]
    assert message["content"][0]["text"] == "42"


@pytest.mark.parametrize("function", ["my_agents:response", "my_agents:as_dict", "my_agents:Agents.method"])
def test_a_response_is_an_answer_as_it_is(folder: Path, function: str) -> None:
    assert rollout(folder, function)["reward"] == 1.0


@pytest.mark.parametrize("function", ["my_agents:response", "my_agents:silent"])
def test_a_wrong_answer_scores_zero(folder: Path, function: str) -> None:
    assert rollout(folder, function, {"rules": [{"reply": {"text": "41"}}]})["reward"] == 0.0


def test_the_example_answers_in_two_calls(folder: Path) -> None:
    script = {
        "rules": [
            {"match": {"last_user_contains": "Answer: 41"}, "reply": {"text": "42"}},
            {"reply": {"text": "41"}},
        ]
    }

    result = rollout(folder, "responses_api_agents.function_agent.examples.ask_twice:run", script)

    assert result["reward"] == 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_response", "my_agents:no_response returned a dict that is no response"),
        ("number", "my_agents:number must return a text or a response, not int"),
        ("misspells", "temprature"),
        ("crashes", "no such field"),
    ],
)
def test_a_function_that_fails_fails_the_rollout(folder: Path, function: str, words: str) -> None:
    result = rollout(folder, f"my_agents:{function}")

    assert result["_ng_failure_class"] == "agent_error"
    assert words in result["_ng_failure_message"]


@pytest.mark.parametrize(
    ("function", "words"), [("sleeps", "took longer than timeout_s=0.2"), ("times_out_itself", "")]
)
def test_time_is_bounded(folder: Path, function: str, words: str) -> None:
    result = rollout(folder, f"my_agents:{function}", timeout_s=0.2)

    assert result["_ng_failure_class"] == "timeout"
    assert words in result["_ng_failure_message"]


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(folder: Path, habit: str) -> None:
    result = rollout(folder, "my_agents:response", MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_a_model_that_refuses_is_reported_as_what_it_is(folder: Path) -> None:
    script = {"faults": [{"kind": "status", "status": 429}]}

    assert rollout(folder, "my_agents:response", script)["_ng_failure_class"] == "rate_limited"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("not_there:run", "No module named 'not_there'"),
        ("my_agents:not_there", "has no attribute 'not_there'"),
        ("my_agents:is_not_async", "must be a function defined with `async def`"),
        ("my_agents:takes_too_little", "must take two arguments"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(folder: Path, reference: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_function(reference, str(folder))


def test_a_reference_without_function_is_refused() -> None:
    with pytest.raises(ValidationError, match="module:function"):
        FunctionAgentConfig.model_validate({"function": "my_agents"})
