"""One shard on a worker: a process of its own with its own servers, watched, told what to do, and stopped.

Nothing here knows of Ray; the worker passes in how to reach the driver.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.distributed.messages import Instruction, Report, ShardEnd, ShardOrder
from nemo_gym.keys import NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME
from nemo_gym.rollouts.lock import OutputInUseError, RunLock
from nemo_gym.rollouts.masked import masked_command
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress_state import ProgressState

Tell = Callable[[Report], Instruction]
"""Reports to the driver; raises when there is none any more."""

_PROGRAM = "nemo_gym.cli.shard_process"
_SEEN_WITHIN_S = 10.0
_FREE_WITHIN_S = 180.0
_ENDS_WITHIN_S = 60.0
_STEP_S = 0.1
_LOG_TAIL_BYTES = 4_000
EXIT_USER_MISTAKE = 2


def run_shard(order: ShardOrder, tell: Tell) -> ShardEnd:
    """Run a shard to its end, whatever that is; it does not outlive this call."""
    node = socket.gethostname()
    if not _comes_true(order.token.exists, _SEEN_WITHIN_S):
        return ShardEnd(EXIT_USER_MISTAKE, node, problem=_does_not_see(order, node))
    if order.attempt > 1:
        _comes_true(lambda: _is_free(order.output), _FREE_WITHIN_S)
    with _started(order) as (process, child):
        _watch(process, child, order, node, tell)
        child.reader.join(_ENDS_WITHIN_S)
    problem = "" if process.returncode == 0 else _tail(RolloutPaths(order.output).log)
    return ShardEnd(process.returncode, node, child.summary, problem)


class _Child:
    """What the shard's process has said so far."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.said: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] | None = None
        self.caps: Mapping[str, int] | None = None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "summary" in message:
                self.summary = message["summary"]
            else:
                self.said = message

    def give(self, caps: Mapping[str, int]) -> None:
        if caps == self.caps:
            return
        self.caps = caps
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has just ended
            self._process.stdin.write(json.dumps({"caps": caps}).encode() + b"\n")
            self._process.stdin.flush()

    def report(self, order: ShardOrder, node: str) -> Report:
        said = self.said
        if not said:
            return Report(order.shard, order.attempt, node)
        state = ProgressState.of_json(said["state"])
        return Report(order.shard, order.attempt, node, state, said["caps"], said["in_flight"], said["is_draining"])


@contextlib.contextmanager
def _started(order: ShardOrder) -> Iterator[tuple["subprocess.Popen[bytes]", _Child]]:
    paths = RolloutPaths(order.output)
    paths.log.parent.mkdir(parents=True, exist_ok=True)
    shown = [argument for argument in order.arguments if masked_command([argument]) == [argument]]
    secret = json.dumps([argument for argument in order.arguments if argument not in shown])
    with paths.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *shown],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=order.folder,
            env={**os.environ, **order.environment, NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME: secret},
            start_new_session=True,
        )
    try:
        yield process, _Child(process)
    finally:
        _end(process)


def _watch(process: "subprocess.Popen[bytes]", child: _Child, order: ShardOrder, node: str, tell: Tell) -> None:
    signals_sent = 0
    while process.poll() is None:
        instruction = tell(child.report(order, node))
        child.give(instruction.caps)
        signals_wanted = 2 if instruction.at_once else int(instruction.stop)
        while signals_sent < signals_wanted:
            process.send_signal(signal.SIGTERM)
            signals_sent += 1
            _wait(process, _STEP_S)
        _wait(process, order.report_every_s)
    tell(child.report(order, node))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Cut the line, on which the process ends in good order; what it started has a warden that outlives it."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if not _wait(process, _ENDS_WITHIN_S):
        process.kill()
        process.wait()
    process.stdout.close()


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _comes_true(condition: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_STEP_S)
    return True


def _is_free(output: Path) -> bool:
    """Whether the shard's former process, which may outlive its worker for a moment, has let go of the files."""
    try:
        with RunLock(RolloutPaths(output).lock):
            return True
    except OutputInUseError:
        return False


def _does_not_see(order: ShardOrder, node: str) -> str:
    return (
        f"node {node} does not see {order.token.parent}, the folder of +output_jsonl_fpath, as the driver sees it; "
        "choose a folder that is mounted on all nodes under the same path"
    )


def _tail(log: Path) -> str:
    """The end of a log, from the beginning of a line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return str(error)
    return text if len(text) < _LOG_TAIL_BYTES else text.partition("\n")[2]
