"""The commands as the original's documentation teaches them, typed in a shell: each a process of its own."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.ports import free_port
from tests.programs import WAIT_S, Program, run_program

GYM, NG = "gym", "ng"
ANY_PORT = "+head_server.port=0"
ENVIRONMENT = "example_single_tool_call"
ROWS = PARENT_DIR / "resources_servers" / ENVIRONMENT / "data/example.jsonl"


def typed(folder: Path, *words: str, code: int = 0) -> str:
    done = run_program(*words, folder=folder)
    assert done.returncode == code, done.stderr
    assert "deprecated" not in done.stderr
    return done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[str]:
    """What `gym env start` starts, until Ctrl-C; the option that names its head server."""
    head = f"+head_server.port={free_port()}"
    words = (GYM, "env", "start", "--environment", ENVIRONMENT, "--model-type", "scripted_model", head)
    started = Program(*words, folder=tmp_path)
    try:
        until = time.monotonic() + WAIT_S
        while len(json.loads(typed(tmp_path, GYM, "env", "status", "--json", head))) < 3:
            assert started.is_running, started.stderr
            assert time.monotonic() < until, started.stderr
            time.sleep(0.2)
        yield head
        started.send(signal.SIGINT)
        assert started.wait() in (0, 130)
    finally:
        started.stop()


def test_servers_in_one_terminal_and_rollouts_from_another(servers: str, tmp_path: Path) -> None:
    status = json.loads(typed(tmp_path, GYM, "env", "status", "--json", servers))
    assert {server["server_type"] for server in status} >= {"resources_servers", "responses_api_agents"}
    agent = f"{ENVIRONMENT}_simple_agent"
    run = [GYM, "eval", "run", "--no-serve", "--agent", agent, "--input", str(ROWS), "--output", "results/out.jsonl"]
    typed(tmp_path, *run, "--limit", "2", "--num-repeats", "2", "--concurrency", "4", "--temperature", "0.5", servers)
    rollouts = tmp_path / "results/out.jsonl"
    assert len(records(rollouts)) == 4
    inputs = tmp_path / "results/out_materialized_inputs.jsonl"
    assert {row["responses_create_params"]["temperature"] for row in records(inputs)} == {0.5}
    typed(tmp_path, GYM, "eval", "profile", "--inputs", str(inputs), "--rollouts", str(rollouts))
    assert (tmp_path / "results/out_reward_profiling.jsonl").exists()
    resumed = [*run, "--limit", "2", "--num-repeats", "2", "--temperature", "0.5", "--resume", servers]
    typed(tmp_path, *resumed)
    assert len(records(rollouts)) == 4
    told = run_program(*resumed, "--environment", "mcqa", "-m", "another", "--split", "example", folder=tmp_path)
    assert told.returncode == 0
    assert "Warning: --environment, --model: with --no-serve the servers are those that run already\n" in told.stderr
    assert "Warning: --split: the rows are those of --input\n" in told.stderr


def test_everything_in_one_command_and_scored_again(tmp_path: Path) -> None:
    run = [NG, "eval", "run", "--environment", ENVIRONMENT, "--model-type", "scripted_model", "--split", "example"]
    typed(tmp_path, *run, "-o", "results/all.jsonl", "--limit", "2", "--num-repeats", "1", ANY_PORT)
    assert [record["reward"] for record in records(tmp_path / "results/all.jsonl")] == [1.0, 1.0]
    again = [GYM, "eval", "reverify", "--environment", ENVIRONMENT, "--rollouts", "results/all.jsonl", ANY_PORT]
    typed(tmp_path, *again, "--inputs", "results/all_materialized_inputs.jsonl", "-o", "results/again.jsonl", "--force")
    scored = [path for path in (tmp_path / "results").iterdir() if path.name.endswith("again.jsonl")]
    assert len(records(scored[0])) == 2
    typed(tmp_path, GYM, "eval", "aggregate", "-i", "results/all.jsonl", "-o", "results/sum.jsonl", "+offline=true")
    assert len(records(tmp_path / "results/sum.jsonl")) == 2


def test_a_new_environment_is_written_checked_and_found(tmp_path: Path) -> None:
    typed(tmp_path, GYM, "env", "init", "--resources-server", "dice")
    assert (tmp_path / "resources_servers/dice/app.py").exists()
    data = tmp_path / "resources_servers/dice/data"
    for split in ("train", "validation"):
        shutil.copy(data / "example.jsonl", data / f"{split}.jsonl")
    assert "Config is valid." in typed(tmp_path, GYM, "env", "validate", "--resources-server", "dice")
    names = [row["name"] for row in json.loads(typed(tmp_path, GYM, "list", "resources-servers", "--json"))]
    assert "dice" in names
    model = ["--model-type", "openai_model", "-m", "m", "--model-url", "http://x/v1", "--model-api-key", "secret"]
    config = "resources_servers/dice/configs/dice.yaml"
    resolved = typed(tmp_path, GYM, "env", "resolve", "--config", config, *model)
    assert "secret" not in resolved
