"""The test driver: real servers in memory, results and failures as the collector would have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config_types import ConfigError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.testing import MALFORMED, check_examples, play

FOLDER = PARENT_DIR / "resources_servers" / "example_single_tool_call"
CONFIG = FOLDER / "configs" / "example_single_tool_call.yaml"
AGENT = "example_single_tool_call_simple_agent"
ROW = {"responses_create_params": {"input": "Is it cold in Oslo?"}, "own_field": "kept"}
SECOND_AGENT = {
    "second_agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "resources_server": {"type": "resources_servers", "name": "example_single_tool_call"},
                "model_server": {"type": "responses_api_models", "name": "second_model"},
            }
        }
    }
}


def said(result: dict[str, Any]) -> str:
    text: str = result["response"]["output"][-1]["content"][0]["text"]
    return text


def test_rows_are_rolled_out_in_order_and_keep_their_fields_and_indices() -> None:
    rows = [{**ROW, "_ng_task_index": number, "_ng_rollout_index": 0} for number in (4, 2, 7)]

    results = play(CONFIG, rows, script={"rules": [{"reply": {"text": "${} is what I say: {last_user}"}}]})

    assert [result["_ng_task_index"] for result in results] == [4, 2, 7]
    assert all((result["reward"], result["own_field"]) == (1.0, "kept") for result in results)
    assert said(results[0]) == "${} is what I say: Is it cold in Oslo?"


def test_a_script_may_be_a_file_and_the_config_a_text() -> None:
    script = "responses_api_models/scripted_model/scripts/weather.yaml"
    rows = check_examples(FOLDER)

    results = play(
        "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml", rows, script=script
    )

    assert all(said(result).startswith("Take a coat") for result in results)


def test_a_failed_rollout_becomes_a_record_without_a_reward() -> None:
    script = {"faults": [{"kind": "status", "status": 429}]}

    (result,) = play(CONFIG, [{**ROW, "_ng_task_index": 1, "_ng_rollout_index": 0}], script=script)

    assert result["_ng_failure_class"] == "rate_limited"
    assert (result["_ng_failure_server"], result["_ng_task_index"]) == ("policy_model", 1)
    assert "reward" not in result


def test_several_agents_and_models_are_told_apart_by_name() -> None:
    options: dict[str, Any] = {
        "script": {"rules": [{"reply": {"text": "first"}}]},
        "models": {"second_model": {"rules": [{"reply": {"text": "second"}}]}},
        "settings": SECOND_AGENT,
    }

    with pytest.raises(ConfigError, match=r"second_agent.*name one"):
        play(CONFIG, [ROW], **options)
    rows = [ROW, {**ROW, "agent_ref": {"type": "responses_api_agents", "name": "second_agent"}}]
    assert [said(result) for result in play([CONFIG], rows, agent=AGENT, **options)] == ["first", "second"]


@pytest.mark.parametrize("habit", MALFORMED)
def test_no_malformed_model_crashes_the_driver(habit: str) -> None:
    (result,) = play(CONFIG, [ROW], script=MALFORMED[habit])

    assert "reward" in result or result["_ng_failure_class"] == "agent_error"


def write_examples(folder: Path, rows: int = 5, rollouts: int = 5, counted: int = 5, asked: str = "hi") -> None:
    data = folder / "data"
    data.mkdir()
    row = {"responses_create_params": {"input": "hi"}}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
    rollout = {"responses_create_params": {"input": asked}, "response": response, "reward": 1.0}
    (data / "example.jsonl").write_text((json.dumps(row) + "\n") * rows)
    (data / "example_rollouts.jsonl").write_text((json.dumps(rollout) + "\n") * rollouts)
    (data / "example_metrics.json").write_text(json.dumps({"Number of examples": counted}))


def test_complete_examples_are_returned(tmp_path: Path) -> None:
    write_examples(tmp_path)

    assert check_examples(tmp_path) == [{"responses_create_params": {"input": "hi"}}] * 5


@pytest.mark.parametrize(
    ("flaw", "complaint"),
    [
        ({"rows": 4}, r"example\.jsonl must have 5 rows, it has 4"),
        ({"counted": 4}, r"example_metrics\.json"),
        ({"rollouts": 6}, r"example_rollouts\.jsonl must have 5 lines, it has 6"),
        ({"asked": "something else"}, "collect anew"),
    ],
)
def test_incomplete_examples_are_named(tmp_path: Path, flaw: dict[str, Any], complaint: str) -> None:
    write_examples(tmp_path, **flaw)

    with pytest.raises(AssertionError, match=complaint):
        check_examples(tmp_path)
