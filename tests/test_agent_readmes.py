"""The commands in the READMEs of agents, word for word, in a folder that has nothing of ours in it."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

AGENTS = PARENT_DIR / "responses_api_agents"
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
READY_WITHIN_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def commands(agent: str) -> list[list[str]]:
    text = "\n".join(BASH.findall((AGENTS / agent / "README.md").read_text()))
    lines = text.replace("\\\n", " ").replace("8123", str(free_port())).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@contextmanager
def servers(arguments: list[str], folder: Path) -> Iterator[None]:
    """`ng_run`, up."""
    with (folder / "ng_run.log").open("wb") as log:
        process = subprocess.Popen(
            [script("ng_run"), *arguments], cwd=folder, env=clean_environment(), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + READY_WITHIN_S
            while "servers ready!" not in (printed := (folder / "ng_run.log").read_text()):
                assert process.poll() is None, printed
                assert time.monotonic() < deadline, printed
                time.sleep(0.1)
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def run_commands(agent: str, folder: Path) -> list[dict[str, object]]:
    (folder / "env.yaml").write_text(f"head_server:\n  port: {free_port()}\n")
    (run, *run_arguments), (collect, *collect_arguments) = commands(agent)
    assert (run, collect) == ("ng_run", "ng_collect_rollouts")
    with servers(run_arguments, folder):
        done = subprocess.run(
            [script(collect), *collect_arguments],
            cwd=folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (output,) = (word.partition("=")[2] for word in collect_arguments if word.startswith("+output_jsonl_fpath"))
    return [json.loads(line) for line in (folder / output).read_text().splitlines()]


@pytest.mark.parametrize("agent", ["function_agent", "non_executing_simple_agent", "remote_agent"])
def test_every_command_works_and_the_examples_are_all_right(agent: str, tmp_path: Path) -> None:
    rollouts = run_commands(agent, tmp_path)

    assert [rollout["reward"] for rollout in rollouts] == [1.0] * 5
