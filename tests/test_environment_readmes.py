"""The commands in the READMEs of environments, word for word, in a folder that has nothing of ours in it."""

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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

ENVIRONMENTS = PARENT_DIR / "resources_servers"
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
READY_WITHIN_S = 90


def commands(module: str) -> list[list[str]]:
    blocks = BASH.findall((ENVIRONMENTS / module / "README.md").read_text())
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder; the head server's port alone differs from the default, so that tests can run side by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "env.yaml").write_text(f"head_server:\n  port: {port}\n")
    return tmp_path


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


@pytest.mark.parametrize(
    "module",
    [
        "code_gen",
        "equivalence_llm_judge",
        "example_multi_step",
        "example_session_state_mgmt",
        "example_single_tool_call",
        "instruction_following",
        "math_with_judge",
        "mcqa",
        "reasoning_gym",
        "string_match",
    ],
)
def test_every_command_works_and_the_examples_are_all_right(module: str, folder: Path) -> None:
    given = commands(module)
    with ExitStack() as up:
        for command, *arguments in given:
            if command == "ng_run":
                up.pop_all().close()
                up.enter_context(servers(arguments, folder))
                continue
            done = subprocess.run(
                [script(command), *arguments],
                cwd=folder,
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr

    assert [command for command, *_ in given][:2] == ["ng_run", "ng_collect_rollouts"]
    rollouts = [json.loads(line) for line in (folder / "results" / f"{module}.jsonl").read_text().splitlines()]
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * 5
