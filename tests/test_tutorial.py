"""The tutorial, word for word: servers in one terminal, the collector in another, no file of ours in the folder."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
OPENAI_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
SCRIPTED_MODEL = "responses_api_models/scripted_model/configs/scripted_model.yaml"
COLLECT = [
    "+agent_name=example_single_tool_call_simple_agent",
    "+input_jsonl_fpath=resources_servers/example_single_tool_call/data/example.jsonl",
    "+output_jsonl_fpath=results/example_single_tool_call_rollouts.jsonl",
    "+limit=5",
    "+num_repeats=2",
]


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}


@contextmanager
def ng_run(folder: Path, *arguments: str) -> Iterator[str]:
    """The servers, up; yields what ng_run printed until then."""
    process = subprocess.Popen(
        [script("ng_run"), *arguments],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read)
    overdue = threading.Timer(90, process.kill)
    overdue.start()
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if "servers ready!" in line:
                break
        assert "servers ready!" in printed, printed
        drain.start()
        yield printed
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        overdue.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
        if drain.ident is not None:
            drain.join()
        process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder; the head server's port alone differs from the default, so that tests can run side by side."""
    (tmp_path / "env.yaml").write_text(f"head_server:\n  port: {free_port()}\n")
    return tmp_path


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script(command), *arguments], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=120
    )


def check_collection(folder: Path) -> None:
    collected = run(folder, "ng_collect_rollouts", *COLLECT)
    assert collected.returncode == 0, collected.stderr
    assert "Collecting rollouts: 100%" in collected.stderr
    assert "10/10" in collected.stderr
    assert "results/example_single_tool_call_rollouts_aggregate_metrics.json" in collected.stdout
    rollouts = [
        json.loads(line)
        for line in (folder / "results/example_single_tool_call_rollouts.jsonl").read_text().splitlines()
    ]
    assert len(rollouts) == 10
    assert {rollout["reward"] for rollout in rollouts} == {1.0}
    kinds = [item["type"] for item in rollouts[0]["response"]["output"]]
    assert {"function_call", "function_call_output", "message"} <= set(kinds)


def test_without_a_key_on_the_embedded_model(folder: Path) -> None:
    with ng_run(folder, f"+config_paths=[{ENVIRONMENT},{SCRIPTED_MODEL}]") as printed:
        assert "All 3 / 3 servers ready!" in printed
        status = run(folder, "ng_status")
        assert "3 servers found (3 healthy, 0 unhealthy)" in status.stdout
        check_collection(folder)


def test_with_an_openai_compatible_endpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("endpoint")
    port = free_port()
    endpoint = f"++policy_model.responses_api_models.scripted_model.port={port}"
    with ng_run(elsewhere, f"+config_paths=[{SCRIPTED_MODEL}]", endpoint, "+head_server.port=0"):
        with (folder / "env.yaml").open("a") as env:
            env.write(f"policy_base_url: http://127.0.0.1:{port}/v1\npolicy_api_key: any\npolicy_model_name: any\n")
        with ng_run(folder, f"+config_paths=[{ENVIRONMENT},{OPENAI_MODEL}]") as printed:
            assert "All 3 / 3 servers ready!" in printed
            check_collection(folder)


def test_without_a_model_the_error_names_the_way_to_try_things(folder: Path) -> None:
    refused = run(folder, "ng_run", f"+config_paths=[{ENVIRONMENT}]")

    assert refused.returncode == 2
    assert "+model=scripted to try things without a key" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_quickstart_ends_well_and_says_what_to_run_next(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_gym.cli.quickstart"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "Collecting rollouts: 100%" in done.stderr
    assert "mean/reward" in done.stdout
    assert "ng_collect_rollouts +agent_name=" in done.stdout
    assert (folder / "results/quickstart/rollouts.jsonl").read_text().count("\n") == 20
