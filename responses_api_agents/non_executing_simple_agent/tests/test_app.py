"""Tool calls are judged and not carried out."""

from pathlib import Path
from typing import Any

import pytest

from nemo_gym.testing import MALFORMED, play

ROOT = Path(__file__).parents[3]
CONFIGS = [
    ROOT / "resources_servers" / "example_multi_step" / "configs" / "example_multi_step.yaml",
    ROOT / "responses_api_agents" / "non_executing_simple_agent" / "configs" / "non_executing_simple_agent.yaml",
]
AGENT = "non_executing_simple_agent"
ROW = {
    "responses_create_params": {"input": "Extract the values 1 and 2."},
    "id": 1,
    "expected_synonym_values": [1, 2],
    "expected_synonyms": ["a", "b"],
    "minefield_label": "c",
    "minefield_label_value": 3,
    "own_field": [7],
}


def rollout(reply: dict[str, Any] | None = None, *, script: Any = None, **agent_settings: Any) -> dict[str, Any]:
    """A rollout in which the model always replies like this, or by script."""
    block = {"resources_server": {"name": "example_multi_step_resources_server"}, **agent_settings}
    settings = {AGENT: {"responses_api_agents": {AGENT: block}}}
    said = script or {"rules": [{"reply": reply}]}
    (result,) = play(CONFIGS, [ROW], script=said, settings=settings, agent=AGENT)
    return result


def call(*values: int) -> dict[str, Any]:
    return {"name": "extract_synonym_values", "arguments": {"synonym_values": list(values)}}


def kinds(result: dict[str, Any]) -> list[str]:
    return [item["type"] for item in result["response"]["output"]]


def test_a_tool_call_ends_the_conversation_and_is_judged() -> None:
    result = rollout({"reasoning": "Hm.", "tool_call": call(1, 2)})

    assert kinds(result) == ["reasoning", "function_call"]
    assert (result["reward"], result["own_field"]) == (1.0, [7])


def test_several_calls_are_one_answer() -> None:
    result = rollout({"text": "Let me see.", "tool_calls": [call(9), call(2, 1)]})

    assert kinds(result) == ["message", "function_call", "function_call"]
    assert (result["reward"], result["order_instruction_following_failure"]) == (0.0, True)


def test_a_message_ends_the_conversation_too() -> None:
    assert kinds(rollout({"text": "1 and 2"})) == ["message"]


def test_a_model_that_only_thinks_is_asked_again_but_not_for_ever() -> None:
    slow = {
        "rules": [
            {"match": {"conversation_contains": "Ah."}, "reply": {"tool_call": call(1, 2)}},
            {"match": {"conversation_contains": "Hm."}, "reply": {"reasoning": "Ah."}},
            {"reply": {"reasoning": "Hm."}},
        ]
    }
    patient = rollout(script=slow)
    stalled = rollout({"reasoning": "Hm."}, max_idle_turns=2)
    limited = rollout({"reasoning": "Hm."}, max_steps=1)

    assert kinds(patient) == ["reasoning", "reasoning", "function_call"]
    assert (kinds(stalled), stalled["ng_stop_reason"]) == (["reasoning"] * 2, "no_actionable_output")
    assert kinds(limited) == ["reasoning"]


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    result = rollout(script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"
