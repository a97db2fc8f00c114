"""Servers of a whole checkout of another nemo-gym run with this package, wherever theirs could be found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.compat.foreign_checkout import write_checkout
from tests.ports import free_port

BIN = Path(sys.executable).parent
OBSERVED = ("+observability_enabled=true", "+model_call_capture_dir=/tmp/not-used")


@contextmanager
def running(folder: Path, *options: str, **environment: str) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """`ng_run` in a folder on the checkout's config; what is yielded collects two rollouts from it."""
    head = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))}
    common = {"cwd": folder, "env": {**env, **environment}, "text": True}
    servers = subprocess.Popen(
        [BIN / "ng_run", "+config_paths=[newest.yaml]", f"+head_server.port={head}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **common,  # type: ignore[call-overload]
    )

    def collect() -> list[dict[str, Any]]:
        (folder / "in.jsonl").write_text('{"responses_create_params": {"input": "hi"}}\n' * 2)
        done = subprocess.run(
            [
                *(BIN / "ng_collect_rollouts", f"+head_server.port={head}", "+agent_name=newest_agent"),
                *("+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl"),
            ],
            capture_output=True,
            timeout=60,
            check=False,
            **common,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]

    try:
        assert servers.stdout is not None
        said = []
        for line in servers.stdout:
            said.append(line)
            if "servers ready!" in line:
                break
        else:
            pytest.fail("".join(said))
        yield collect
    finally:
        servers.terminate()
        servers.communicate(timeout=30)


def test_servers_of_a_checkout_in_an_extra_root_run_with_this_package(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    write_checkout(root, workers=2)

    with running(tmp_path, NEMO_GYM_EXTRA_ROOTS=str(root)) as collect:
        results = collect()

    assert [result["agent_from"] for result in results] == ["the checkout"] * 2
    assert [result["reward"] for result in results] == [1.0, 1.0]
    assert {result["id_of_run"] for result in results} == {None}
    assert {result["rollout_of_verify"] for result in results} == {None}
    assert all(result["model_at"].endswith("/v1") and "ng-rollout" not in result["model_at"] for result in results)


def test_the_rollout_id_travels_through_servers_of_a_checkout_that_is_the_current_folder(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    write_checkout(root)

    # On PYTHONPATH theirs comes second: named first, it would be Python itself that takes it.
    with running(root, *OBSERVED, PYTHONPATH=f"{PARENT_DIR}:{root}") as collect:
        results = collect()

    for result in results:
        rollout_id = f"{result['_ng_task_index']}-{result['_ng_rollout_index']}"
        assert result["id_of_run"] == result["rollout_of_verify"] == rollout_id
        assert result["response"]["output"][0]["content"][0]["text"] == rollout_id  # what the model saw
        assert result["model_at"].endswith(f"/ng-rollout/{rollout_id}/v1")


@pytest.mark.usefixtures("bare_pytest")
def test_tests_of_such_a_server_import_this_package(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    write_checkout(root)
    tests = root / "responses_api_agents/simple_agent/tests/test_app.py"
    tests.parent.mkdir()
    tests.write_text(
        "from nemo_gym.server_utils import ServerClient\n"
        "from responses_api_agents.simple_agent.app import WHERE\n\n\n"
        "def test_where():\n    assert WHERE == 'the checkout'\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}

    done = subprocess.run(
        [BIN / "ng_test", "+entrypoint=responses_api_agents/simple_agent"],
        cwd=root,
        env={**env, "NEMO_GYM_EXTRA_ROOTS": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
