"""Commands of ours as processes of their own, forked from one that has everything imported: they start at once."""

import multiprocessing
import os
import runpy
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PROGRAM = """
import os, resource, runpy, signal, sys
from importlib import import_module

for stream, path in ((1, OUT), (2, ERR)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
signal.signal(signal.SIGINT, signal.default_int_handler)
if LARGEST_FILE:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
os.environ.clear()
os.environ.update(ENVIRONMENT)
os.chdir(FOLDER)
program, *arguments = COMMAND
sys.argv = [f"/usr/bin/{program}", *arguments]
if COMMAND[:2] == ["python", "-m"]:
    sys.argv = ["python", *arguments[2:]]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
else:
    import_module(f"nemo_gym.cli.commands.{program.removeprefix('ng_')}").main()
"""
_PRELOADED = [
    "nemo_gym.cli.commands.collect_rollouts",
    "nemo_gym.cli.e2e",
    "nemo_gym.cli.results",
    "nemo_gym.rollout_collection",
    "nemo_gym.servers.head",
    "uvicorn",
    "uvloop",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)
WAIT_S = 120.0


class Program:
    """One command, running: `ng_<name>` or `python -m <module>`, with its arguments."""

    def __init__(
        self,
        *command: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest_file: int = 0,
        name: str | None = None,
    ) -> None:
        folder = folder or Path.cwd()
        stem = name or command[0]
        self.stdout_path, self.stderr_path = folder / f"{stem}.out", folder / f"{stem}.err"
        for path in (self.stdout_path, self.stderr_path):
            path.unlink(missing_ok=True)  # of an earlier one, whose words would be taken for this one's
        self.command: Sequence[str] = command
        program = folder / ".program.py"
        program.write_text(_PROGRAM)
        given = {
            "COMMAND": list(command),
            "ENVIRONMENT": dict(os.environ if environment is None else environment),
            "OUT": str(self.stdout_path),
            "ERR": str(self.stderr_path),
            "FOLDER": str(folder),
            "LARGEST_FILE": largest_file,
        }
        self._process: ForkServerProcess = _CONTEXT.Process(target=runpy.run_path, args=(str(program), given))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text() if self.stdout_path.exists() else ""

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text() if self.stderr_path.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; minus a signal's number when one killed it."""
        self._process.join(WAIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"{self.command[0]} did not end within {WAIT_S:g} s:\n{self.stderr}")
        return self._process.exitcode

    def stop(self) -> None:
        """Leave nothing behind."""
        self._process.kill()
        self._process.join(WAIT_S)
