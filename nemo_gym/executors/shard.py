"""One shard: a process of its own with its own servers, watched by the worker that started it, and the line between.

`run_shard` is the worker's end; nothing here knows of Ray, the worker passes in how to reach the driver. `Channel` is
the shard's end: reports go out on stdout, caps come in on stdin, one JSON object each, and what the shard itself prints
goes to its log. The line is also its lifeline: when it is cut, nobody waits for the shard any more, and another one may
be on its way to go on with the same files; so it ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.collect.adaptive import Load
from nemo_gym.collect.budget import Budget
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.progress import Progress, ProgressState
from nemo_gym.executors.caps import (
    PACE,
    WHOLE_PACE,
    Instruction,
    Report,
    caps_of,
    in_flight_by_cap,
    led_by_the_driver,
    with_caps,
)
from nemo_gym.executors.steering import LedControl
from nemo_gym.keys import NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME
from nemo_gym.paths import OWN_PACKAGE_FIRST, append_own, make_folder
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import OutputInUseError, only_writer
from nemo_gym.runs.manifest import masked_command
from nemo_gym.runs.options import Concurrency
from nemo_gym.runs.options.sharding import Shard

logger = logging.getLogger(__name__)

Tell = Callable[[Report], Instruction]
"""Reports to the driver; raises when there is none any more."""

EXIT_USER_MISTAKE = 2
_PROGRAM = "nemo_gym.cli.shard_process"
_SEEN_WITHIN_S = 10.0
_FREE_WITHIN_S = 180.0
_ENDS_WITHIN_S = 60.0
_STEP_S = 0.1
_LOG_TAIL_BYTES = 4_000
_TELL_EVERY_S = 0.5
_LETS_GO_AFTER_S = 0.5


@dataclass(frozen=True)
class ShardOrder:
    """What a worker needs to run one shard; can be pickled."""

    shard: Shard
    attempt: int
    """Counted from 1; more than one means that a worker was lost."""
    arguments: Sequence[str]
    """Options of `ng_collect_rollouts`."""
    output: Path
    """The rollouts file of the shard, absolute."""
    token: Path
    """A file of the driver beside it: a node that does not see it does not share the folder."""
    folder: Path | None
    """Where to run; None for the folder that Ray made for the task."""
    environment: Mapping[str, str] = field(default_factory=dict)
    report_every_s: float = 0.5


@dataclass(frozen=True)
class ShardEnd:
    """How a shard ended whose worker lived to tell; can be pickled."""

    exit_code: int
    node: str
    summary: Mapping[str, Any] | None = None
    """What `RunSummary.as_json` says, when it got that far."""
    problem: str = ""
    """The end of its log, or what kept it from starting."""


def run_shard(order: ShardOrder, tell: Tell) -> ShardEnd:
    """Run a shard to its end, whatever that is; it does not outlive this call."""
    node = socket.gethostname()
    if not _comes_true(order.token.exists, _SEEN_WITHIN_S):
        return ShardEnd(EXIT_USER_MISTAKE, node, problem=_does_not_see(order, node))
    if order.attempt > 1:
        _comes_true(lambda: _is_free(order.output), _FREE_WITHIN_S)
    with _started(order) as (process, child):
        _watch(process, child, order, node, tell)
    problem = "" if process.returncode == 0 else _tail(RolloutPaths(order.output).log)
    return ShardEnd(process.returncode, node, child.summary, problem)


class _Child:
    """What the shard's process has said so far."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.said: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] | None = None
        self.given: Mapping[str, Any] | None = None
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

    def give(self, instruction: Instruction) -> None:
        """Pass on what is to be done, if it is something else than before."""
        given = {"caps": instruction.caps, "orders": instruction.orders, "allowance": instruction.allowance}
        if given == self.given:
            return
        self.given = given
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has just ended
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            self._process.stdin.flush()

    def report(self, order: ShardOrder, node: str) -> Report:
        said = self.said
        if not said:
            return Report(order.shard, order.attempt, node)
        state = ProgressState.of_json(said["state"])
        loads = {agent: Load(*load) for agent, load in said["loads"].items()}
        caps, in_flight = said["caps"], said["in_flight"]
        return Report(
            order.shard,
            order.attempt,
            node,
            state,
            caps,
            in_flight,
            said["is_draining"],
            answers=said["answers"],
            spent=said["spent"],
            allowance=said["allowance"],
            is_held=said["is_held"],
            loads=loads,
        )


def _environment(order: ShardOrder, secret: str) -> dict[str, str]:
    environment = {
        **inherited_environment(),
        **order.environment,
        NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME: secret,
    }
    path = os.pathsep.join(filter(None, [str(OWN_PACKAGE_FIRST), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


@contextlib.contextmanager
def _started(order: ShardOrder) -> Iterator[tuple["subprocess.Popen[bytes]", _Child]]:
    paths = RolloutPaths(order.output)
    make_folder(paths.log.parent)
    shown = [argument for argument in order.arguments if masked_command([argument]) == [argument]]
    secret = json.dumps([argument for argument in order.arguments if argument not in shown])
    with append_own(paths.log) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, *shown],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=order.folder,
            env=_environment(order, secret),
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
        child.give(instruction)
        signals_wanted = 2 if instruction.at_once else int(instruction.stop)
        while signals_sent < signals_wanted:
            process.send_signal(signal.SIGTERM)
            signals_sent += 1
            _wait(process, _STEP_S)
        _wait(process, order.report_every_s)
    child.reader.join(_ENDS_WITHIN_S)  # its last words may still be on their way, and belong into the last report
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
        with only_writer(RolloutPaths(output)):
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


class Channel:
    """The shard's end of the line."""

    def __init__(self, incoming: int, outgoing: int, on_cut: Callable[[], None]) -> None:
        self._incoming, self._outgoing, self._on_cut = incoming, outgoing, on_cut
        self._sending = threading.Lock()
        self.caps: Mapping[str, int] = {}
        """The latest that came in."""
        self.share_pace: Callable[[float], None] = lambda share: None
        """Told which part of the pace of model servers is this shard's."""
        self.orders: Mapping[str, Any] | None = None
        self.allowance: Mapping[str, float] = {}
        """The same of the run's budgets."""
        self._on_caps: Callable[[], None] = lambda: None

    @classmethod
    def over_stdio(cls) -> "Channel":
        """Take stdin and stdout for the line; whatever is printed from now on goes where stderr goes."""
        channel = cls(os.dup(0), os.dup(1), end_this_process)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        threading.Thread(target=channel.listen, name="shard-channel", daemon=True).start()
        return channel

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something; when nobody listens any more, nothing happens here."""
        line = json.dumps(message, default=str).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._outgoing, line) :]

    def listen(self) -> None:
        """Take what comes in until the line is cut."""
        with contextlib.suppress(OSError), os.fdopen(self._incoming, "rb") as lines:
            for line in lines:
                said = json.loads(line)
                self.caps, self.orders = said["caps"], said.get("orders")
                self.allowance = said.get("allowance") or {}
                self._on_caps()
        self._on_cut()

    @contextlib.contextmanager
    def steering(self, concurrency: Concurrency, dispatch: Dispatch, progress: Progress) -> Iterator[None]:
        """Let the caps that come in hold for `dispatch` and report how it is doing.

        `concurrency` says which caps there are; until the first come in, nothing starts. What this machine can take is
        never exceeded.
        """
        loop = asyncio.get_running_loop()
        steered = _Steered(self, concurrency, dispatch, progress)

        def on_caps() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to steer
                loop.call_soon_threadsafe(steered.apply)

        self._on_caps = on_caps
        steered.apply()
        steered.tick()
        try:
            yield
        finally:
            self._on_caps = lambda: None
            steered.close()


class _Steered:
    """The rollouts of a shard under what came in over its channel."""

    def __init__(self, channel: Channel, concurrency: Concurrency, dispatch: Dispatch, progress: Progress) -> None:
        self._channel, self._dispatch, self._progress = channel, dispatch, progress
        self._budget = next((policy for policy in dispatch.policies if isinstance(policy, Budget)), None)
        self._adaptive = adaptive = led_by_the_driver(dispatch)
        self._concurrency = concurrency if adaptive is None else adaptive.most
        self._own = dispatch.concurrency if adaptive is None else adaptive.most
        self._in_force: Mapping[str, int] = {}
        self._control = LedControl(dispatch, self._take_over)
        self._timer: asyncio.TimerHandle | None = None

    def apply(self) -> None:
        """Let what came in hold; before that nothing may start, nor be used of a budget."""
        channel, budget = self._channel, self._budget
        self._control.heed(channel.orders)
        self._in_force = channel.caps or dict.fromkeys(caps_of(self._concurrency), 0)
        self._set_own(self._own)
        if PACE in self._in_force:
            channel.share_pace(self._in_force[PACE] / WHOLE_PACE)
        if budget is not None:
            budget.obey(channel.allowance or dict.fromkeys(budget.limits, 0.0))
        self._tell()

    def tick(self) -> None:
        """Report, and again after a while."""
        self._tell()
        self._timer = asyncio.get_running_loop().call_later(_TELL_EVERY_S, self.tick)

    def close(self) -> None:
        """Report a last time."""
        self._control.close()
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def _take_over(self, concurrency: Concurrency) -> None:
        """Go by other caps of the whole run; of those that are new the shard has no share until it is told one."""
        self._concurrency, told = concurrency, self._channel.caps or {}
        names = [*caps_of(concurrency), *(name for name in self._in_force if name == PACE)]
        self._in_force = {name: told.get(name, 0) for name in names}
        self._set_own(concurrency)

    def _set_own(self, concurrency: Concurrency) -> None:
        self._own = concurrency
        self._dispatch.set_concurrency(with_caps(concurrency, self._in_force))

    def _tell(self) -> None:
        dispatch, in_force = self._dispatch, self._in_force
        taken = in_flight_by_cap(self._concurrency, dispatch.in_flight, dispatch.in_flight_by_agent)
        if PACE in in_force and dispatch.in_flight:  # they go on to ask at that pace, also at the end
            taken[PACE] = in_force[PACE]
        self._channel.send(
            {
                "state": asdict(self._progress.state()),
                "caps": in_force,
                "in_flight": taken,
                "is_draining": dispatch.is_draining,
                "loads": self._adaptive.loads() if self._adaptive else {},
                "answers": self._control.answers,
                **self._spending(),
            }
        )

    def _spending(self) -> dict[str, Any]:
        """What is reported of a run with a budget, and of one without."""
        if self._budget is None:
            return {"spent": {}, "allowance": {}, "is_held": False}
        allowance = self._channel.allowance
        is_held = self._budget.is_held and bool(allowance)
        return {"spent": self._budget.spent, "allowance": allowance, "is_held": is_held}


class SteeredCollector(RolloutCollectionHelper):
    """Collects rollouts under caps that come from elsewhere."""

    channel: Any
    concurrency: Any

    def _following(self, dispatch: Dispatch, progress: Progress) -> contextlib.AbstractContextManager[object]:
        steering: contextlib.AbstractContextManager[object]
        steering = self.channel.steering(self.concurrency, dispatch, progress)
        return steering


def end_this_process() -> None:
    """Stop in good order without waiting for what is in flight; if that fails, some other way."""
    logger.warning("The worker that started this shard is gone; stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LETS_GO_AFTER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ENDS_WITHIN_S)
    os._exit(1)
