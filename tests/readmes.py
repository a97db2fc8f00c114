"""The commands of a README, typed by somebody in a folder that has nothing of ours in it.

Two things differ from what is written: the head server has a port of its own, since tests run side by side, and
addresses are those that a test gives.
"""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nemo_gym.paths import PARENT_DIR
from tests.ports import free_port
from tests.programs import WAIT_S, Program

Rollouts = list[dict[str, Any]]

_BLOCK = re.compile(r"^```(\w+)\n(?:# (\S+\.(?:yaml|py))(?::[^\n]*)?\n)?(.*?)^```", re.MULTILINE | re.DOTALL)


def modules(kind: str) -> list[str]:
    """The modules in one of the four folders, each with its README."""
    return sorted(readme.parent.name for readme in (PARENT_DIR / kind).glob("*/README.md"))


def commands_in(text: str) -> list[list[str]]:
    """What stands in the blocks of shell commands."""
    shell = "\n".join(block for language, _, block in _BLOCK.findall(text) if language == "bash")
    return [words for line in shell.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def play(readme: Path, folder: Path, replaced: Mapping[str, str] | None = None, *extra: str) -> dict[str, Rollouts]:
    """Type every command, which must end well; the rollouts of every collection, by the path of its output.

    `ng_run` stays up until the next one. Blocks that begin with the name of a file are written to it. `replaced` says
    what stands for something in the text, `extra` is added to every command that collects.
    """
    text = readme.read_text(encoding="utf-8")
    for written, real in (replaced or {}).items():
        assert written in text, f"{readme} does not mention {written}"
        text = text.replace(written, real)
    (folder / "env.yaml").write_text(f"head_server:\n  port: {free_port()}\n")
    for _, name, block in _BLOCK.findall(text):
        if name:
            (folder / name).write_text(block)
    collected = {}
    with ExitStack() as up:
        for command in commands_in(text):
            if command[0] == "ng_run":
                up.pop_all().close()
                up.enter_context(servers(command, folder))
                continue
            outputs = [word.partition("=")[2] for word in command if word.startswith("+output_jsonl_fpath=")]
            _run_to_its_end([*command, *(extra if outputs else ())], folder)
            for output in outputs:
                collected[output] = [json.loads(line) for line in (folder / output).read_text().splitlines()]
    return collected


def _run_to_its_end(command: list[str], folder: Path) -> None:
    program = Program(*command, folder=folder, environment=clean_environment())
    try:
        assert program.wait() == 0, f"{shlex.join(command)}\n{program.stdout}{program.stderr}"
    finally:
        program.stop()


@contextmanager
def servers(command: list[str], folder: Path) -> Iterator[None]:
    """`ng_run`, up; in the end Ctrl-C stops it."""
    program = Program(*command, folder=folder, environment=clean_environment())
    try:
        deadline_s = time.monotonic() + WAIT_S
        while "servers ready!" not in program.stdout:
            assert program.is_running, program.stdout + program.stderr
            assert time.monotonic() < deadline_s, program.stdout + program.stderr
            time.sleep(0.05)
        yield
        program.send(signal.SIGINT)
        assert program.wait() == 0
    finally:
        program.stop()


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
