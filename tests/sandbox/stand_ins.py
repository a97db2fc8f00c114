"""Stand-ins for container programs, on the PATH of a test and of what it starts."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class StandIn:
    """One container program, and what it has been asked."""

    def __init__(self, name: str, folder: Path) -> None:
        self.state = folder / "state"
        self.bin = folder / "bin"
        (self.state / "containers").mkdir(parents=True)
        self.bin.mkdir()
        program = self.bin / name
        script = HERE / f"{name}_stand_in.py"
        program.write_text(
            f"#!/bin/sh\nSTAND_IN_STATE='{self.state}' exec '{sys.executable}' -S -E '{script}' \"$@\"\n"
        )
        program.chmod(0o755)

    @property
    def path(self) -> str:
        """The PATH on which it comes first."""
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def run(self, *arguments: str) -> None:
        """What somebody else asks of it."""
        (program,) = self.bin.iterdir()
        subprocess.run([program, *arguments], check=True, capture_output=True)

    def calls(self, *verbs: str) -> list[list[str]]:
        """The command lines that begin so."""
        lines = (self.state / "calls.jsonl").read_text().splitlines()
        return [call for line in lines if (call := json.loads(line))[: len(verbs)] == list(verbs)]

    def containers(self) -> dict[str, Any]:
        """Those that exist, by name."""
        files = [*self.state.glob("containers/*.json"), *self.state.glob("instances/*.json")]
        found = {}
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # it is just being removed
                found[file.stem] = json.loads(file.read_text())
        return found


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn("docker", tmp_path / "docker")
    monkeypatch.setenv("PATH", stand_in.path)
    return stand_in


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn("apptainer", tmp_path / "apptainer")
    monkeypatch.setenv("PATH", stand_in.path)
    return stand_in
