"""Collectors as processes of their own, forked from one that has everything imported: they start at once."""

import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PROGRAM = """
import os, resource, signal, sys

for stream, path in ((1, OUT), (2, ERR)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
signal.signal(signal.SIGINT, signal.default_int_handler)
if LARGEST_FILE:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
sys.argv = ["/usr/bin/ng_collect_rollouts", *ARGUMENTS]
os.chdir(FOLDER)

from nemo_gym.cli.commands.collect_rollouts import main
main()
"""
_PRELOADED = ["nemo_gym.cli.commands.collect_rollouts", "nemo_gym.rollout_collection", "nemo_gym.cli.results", "uvloop"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)
WAIT_S = 60.0


class Collector:
    """One `ng_collect_rollouts`, running."""

    def __init__(self, *options: str, largest_file: int = 0, name: str = "collector") -> None:
        folder = Path.cwd()
        self.stdout_path, self.stderr_path = folder / f"{name}.out", folder / f"{name}.err"
        program = folder / "collector_program.py"
        program.write_text(_PROGRAM)
        given = {
            "ARGUMENTS": list(options),
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
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; minus a signal's number when one killed it."""
        self._process.join(WAIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the collector did not end within {WAIT_S:g} s:\n{self.stderr}")
        return self._process.exitcode

    def stop(self) -> None:
        """Leave nothing behind."""
        self._process.kill()
        self._process.join(WAIT_S)


def wait_until(condition: Callable[[], bool], collector: Collector) -> None:
    """Wait for something that a running collector brings about."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert collector.is_running, f"the collector ended early:\n{collector.stderr}"
        assert time.monotonic() < deadline_s, f"waited in vain:\n{collector.stderr}"
        time.sleep(0.005)
