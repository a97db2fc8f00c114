"""Programs over HTTP, and whole rollouts with scripted models."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym import PARENT_DIR
from nemo_gym.config_types import ConfigError
from nemo_gym.sandbox import IsolatedPool
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play, write_config_file
from resources_servers.code_gen.app import CodeGenResourcesServer, CodeGenResourcesServerConfig

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "code_gen.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
DOUBLE = {"unit_tests": {"inputs": ["2", "3"], "outputs": ["4", "6"]}, "source": "own"}


def make_server(**settings: Any) -> CodeGenResourcesServer:
    config = CodeGenResourcesServerConfig(
        name="code_gen", host="127.0.0.1", port=1, entrypoint="app.py", num_processes=1, **settings
    )
    return CodeGenResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_server(reasoning_format_penalty=-0.2, debug=True).complete_app()) as client:
        yield client


def post(client: TestClient, said: str, **row: Any) -> Any:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    params = {"responses_create_params": {"input": "?"}, "response": response}
    return client.post("/verify", json={**params, "verifier_metadata": DOUBLE, **row})


def test_the_verdict_shows_the_program_and_how_it_fared(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    text = "Double it:\n```python\nprint(2 * int(input()))\n```"

    verdict = post(client, text, own_field=1, difficulty="easy").json()

    assert (verdict["reward"], verdict["result"]) == (1.0, [True, True])
    assert verdict["extracted_model_code"] == "print(2 * int(input()))"
    assert verdict["extracted_model_output"] == text
    assert verdict["unit_tests_time_taken"] > 0
    assert (verdict["own_field"], verdict["difficulty"], verdict["verifier_metadata"]["source"]) == (1, "easy", "own")
    assert "code_gen: [True, True] in" in caplog.text


def test_a_wrong_program_scores_zero_and_says_where(client: TestClient) -> None:
    verdict = post(client, "```\nprint(4)\n```", verifier_metadata={**DOUBLE, "difficulty": "hard"}).json()

    assert (verdict["reward"], verdict["result"], verdict["difficulty"]) == (0.0, [True, -2], "hard")
    assert verdict["metadata"]["expected"] == "6"


@pytest.mark.parametrize(("said", "output"), [("", None), ("I cannot.", "I cannot.")])
def test_no_program_scores_zero(client: TestClient, said: str, output: str | None) -> None:
    verdict = post(client, said).json()

    assert (verdict["reward"], verdict["extracted_model_output"], verdict["extracted_model_code"]) == (
        0.0,
        output,
        None,
    )
    assert verdict["result"] is None


def test_thoughts_in_the_answer_cost_the_reward(client: TestClient) -> None:
    verdict = post(client, "<think>hm</think>\n```\nprint(2 * int(input()))\n```").json()

    assert (verdict["reward"], verdict["reasoning_format_violation_rate"]) == (-0.2, 1.0)
    assert verdict["result"] == [True, True]


def test_a_row_without_usable_tests_is_refused_and_not_scored_zero(client: TestClient) -> None:
    answer = post(client, "```\nprint(4)\n```", verifier_metadata={"unit_tests": {"inputs": ["1"], "outputs": []}})

    assert answer.status_code == 422
    assert "outputs" in answer.text


def test_a_program_reaches_neither_keys_nor_files_nor_the_network(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_API_KEY", "very secret")
    (tmp_path / "env.yaml").write_text("very secret")
    handover = write_config_file(OmegaConf.create({"auth_token": "very secret"}))
    listening = socket.create_server(("127.0.0.1", 0))
    program = f"""
import os, socket

def attempt(action):
    try:
        return action()
    except OSError as error:
        return "kept out"

print([value for value in os.environ.values() if "secret" in value])
for action in (
    lambda: open("/proc/{os.getpid()}/environ").read(),
    lambda: open("/proc/self/environ").read(),
    lambda: open("/proc/%d/environ" % os.getppid()).read(),
    lambda: os.listdir("/proc"),
    lambda: open({str(tmp_path / "env.yaml")!r}).read(),
    lambda: open("../" * 40 + {str(tmp_path / "env.yaml")[1:]!r}).read(),
    lambda: open({str(handover)!r}).read(),
    lambda: open({str(PARENT_DIR / "pyproject.toml")!r}).read(),
    lambda: os.symlink({str(tmp_path)!r}, "link") or open("link/env.yaml").read(),
    lambda: open("link/new", "w"),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: socket.create_connection({listening.getsockname()}, timeout=1),
    lambda: os.kill(os.getppid(), 9),
    lambda: os.fork(),
):
    print(attempt(action))
"""
    tests = {"unit_tests": {"inputs": [""], "outputs": ["[]" + "\nkept out" * 14]}}

    with listening:
        verdict = post(client, f"```python\n{program}\n```", verifier_metadata=tests).json()

    assert verdict["reward"] == 1.0, verdict["metadata"]
    assert [path.name for path in tmp_path.iterdir()] == ["env.yaml"]


def test_it_refuses_to_start_where_programs_cannot_be_isolated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = {**(IsolatedPool.__init__.__kwdefaults__ or {}), "layers": ("seccomp",)}
    monkeypatch.setattr(IsolatedPool.__init__, "__kwdefaults__", defaults)

    with pytest.raises(ConfigError, match=r"would run unprotected.*allow_unsandboxed: true"):
        make_server()

    unprotected = make_server(allow_unsandboxed=True)
    assert "WITHOUT a sandbox" in caplog.text
    with TestClient(unprotected.complete_app()) as client:
        assert post(client, "```\nprint(2 * int(input()))\n```").json()["reward"] == 1.0


def test_more_memory_than_the_machine_has_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    make_server(memory_limit_mb=10**8)

    assert "has not the memory for 1 programs of 100000000 MB each" in caplog.text


def test_metrics_are_told_per_difficulty() -> None:
    server = make_server()
    tasks: list[list[dict[str, Any]]] = [
        [{"reward": reward, "extracted_model_code": "a", "difficulty": "easy"} for reward in (1.0, 0.0)],
        [{"reward": -0.2, "extracted_model_code": None, "difficulty": "hard"}] * 2,
    ]

    metrics = server.compute_metrics(tasks)
    key_metrics = server.get_key_metrics({"mean/reward": 0.15, **metrics})

    assert (metrics["pass@2/accuracy"], metrics["easy/pass@2/accuracy"], metrics["hard/pass@2/accuracy"]) == (
        50,
        100,
        0,
    )
    assert metrics["pass@1[avg-of-2]/accuracy/avg_sample_std_dev"] > 0
    assert key_metrics == {
        "mean/reward": 0.15,
        "pass@1[avg-of-2]/accuracy": 25.0,
        "pass@1[avg-of-2]/no_answer": 50.0,
        "pass@2/accuracy": 50.0,
    }


def test_a_perfect_model_scores_one_and_further_fields_stay() -> None:
    results = play(CONFIG, [{**row, "source": {"page": 7}} for row in ROWS], script=str(RIGHT))

    assert [result["reward"] for result in results] == [1.0] * 5
    assert all(result["source"] == {"page": 7} for result in results)


def test_a_wrong_model_scores_zero() -> None:
    results = play(CONFIG, ROWS, script={"rules": [{"reply": {"text": "```python\nprint(6 * 9)\n```"}}]})

    assert [result["reward"] for result in results] == [0.0] * 5
    assert [result["result"] for result in results] == [[-2], [-2], [-4], [-2], [-4]]


def test_programs_that_kill_themselves_are_counted() -> None:
    kill = {
        "match": {"last_user_contains": "[kill]"},
        "reply": {"text": "```\nimport os\nos.kill(os.getpid(), 9)\n```"},
    }
    script = {"rules": [kill], **yaml.safe_load(RIGHT.read_text())}
    script["answers"]["jsonl"] = str(FOLDER / "data" / "example.jsonl")
    marked = {"responses_create_params": {"input": [{"role": "user", "content": "[kill]"}]}}

    results = play(CONFIG, [*ROWS[:3], *({**row, **marked} for row in [ROWS[0]] * 6)], script=script)

    assert sorted(result["reward"] for result in results) == [0.0] * 6 + [1.0] * 3


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"
