"""With one component dead or silent, every command ends by itself within its bound and names the component."""

import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from nemo_gym.runs.options import DEFAULT_MAX_REFUSED_S
from tests.chaos.fleet import AGENT, MODEL, RESOURCES, Fleet, counter_config, free_port, right_answers
from tests.chaos.lab import Job, Lab, Shared
from tests.chaos.processes import Command, HungError, program

MAX_SILENCE_S = 3.0
MAX_REFUSED_S = DEFAULT_MAX_REFUSED_S
NAMED_WITHIN_S = 5.0
HEAD = "head server"
_STARTING_UP_S = 45.0
"""Several of our commands starting at once, on a machine that others use, too; far less than any real hang."""
_BUSY_MACHINE_S = 10.0
BOUNDS_S = {
    "collect": 2 * MAX_SILENCE_S + _STARTING_UP_S,  # once for the rollouts, once for their metrics
    "collect, patient": MAX_REFUSED_S + _STARTING_UP_S,
    "collect, begun then": 30.0 + _STARTING_UP_S,  # what a client gives a head server
    "aggregate": 30.0 + MAX_SILENCE_S + _STARTING_UP_S,
    "status": 5.0 + 2.0 + _STARTING_UP_S,
    "validate": _STARTING_UP_S,
    "run": _STARTING_UP_S,
    "shutdown": 3.0 + _STARTING_UP_S,
    "e2e": 2 * MAX_SILENCE_S + 3.0 + _STARTING_UP_S,
}
_SILENCE = f"+max_silence_s={MAX_SILENCE_S:g}"
_REFUSED = f"+max_refused_s={MAX_SILENCE_S:g}"
_STATES = {"dead": signal.SIGKILL, "silent": signal.SIGSTOP}
_KEEPS_NOBODY_WAITING = {"validate"}


@dataclass
class HangRow:
    """One command with one component gone."""

    component: str
    state: str
    command: str
    took_s: float
    exit_code: int | None
    must_name: bool
    is_named: bool
    problem: str = ""
    named_s: float = 0.0
    """After how long, where that matters."""

    @property
    def is_good(self) -> bool:
        """In time, and by name."""
        in_time = self.exit_code is not None and self.took_s <= BOUNDS_S[self.command]
        in_time &= self.named_s <= NAMED_WITHIN_S + _BUSY_MACHINE_S
        return in_time and (self.is_named or not self.must_name) and not self.problem

    def line(self) -> str:
        """For the terminal."""
        mark = "ok  " if self.is_good else "FAIL"
        who = f"{self.command} with {self.component} {self.state}"
        said = "" if self.is_good else f" named: {self.is_named} {self.problem}"
        took = f"ended after {self.took_s:.1f} s of {BOUNDS_S[self.command]:g}"
        took += f", named after {self.named_s:.1f} s" if self.named_s else ""
        return f"{mark} {who:<74} {took}, exit {self.exit_code}{said}"

    def cells(self) -> list[str]:
        """For the page."""
        said = "its name" if self.is_named else "nothing, it needs none of it"
        said += f", after {self.named_s:.1f} s" if self.named_s else ""
        took, bound = f"{self.took_s:.1f} s", f"{BOUNDS_S[self.command]:g} s"
        return [self.component, self.state, f"`{self.command}`", took, bound, str(self.exit_code), said]


Add = Callable[[HangRow], None]


def check_hanging(folder: Path, short: bool, add: Callable[[Any], None]) -> None:
    """All of it; several at a time."""
    lab = Lab(folder / "hanging", Random("hanging"), Shared(folder))
    jobs: list[Callable[[Add], None]] = [
        lambda note: _silent_one_after_the_other(lab, note, [MODEL] if short else [AGENT, RESOURCES, MODEL])
    ]
    for component in [AGENT] if short else [AGENT, RESOURCES, MODEL]:
        jobs.append(lambda note, it=component: _one_dead(lab, note, it))  # type: ignore[misc]
    if not short:
        for component in (AGENT, RESOURCES, MODEL):
            jobs.append(lambda note, it=component: _run_notices(lab, note, it))  # type: ignore[misc]
            jobs += [lambda note, it=component, how=state: _e2e(lab, note, it, how) for state in _STATES]  # type: ignore[misc]
    jobs.append(lambda note: _head_dead(lab, note))
    jobs.append(lambda note: _endpoint_dead(lab, note))
    for component in [HEAD] if short else [HEAD, AGENT, MODEL]:
        jobs.append(lambda note, it=component: _at_work(lab, note, it, short))  # type: ignore[misc]

    def guarded(job: Callable[[Add], None]) -> None:
        try:
            job(add)
        except Exception:  # noqa: BLE001 - one broken check must not hide the others
            add(HangRow("?", "?", "run", 0.0, None, True, False, traceback.format_exc()))

    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(guarded, jobs))
    finally:
        lab.close()


def _ended(component: str, state: str, running: dict[str, Command], since_s: float) -> list[HangRow]:
    """Wait for commands, each within its bound."""
    longest_s = max(BOUNDS_S[name] for name in running)
    while time.monotonic() < since_s + longest_s and any(_running(running)):
        time.sleep(0.05)
    return [_row(component, state, name, it, since_s) for name, it in running.items()]


def _running(commands: dict[str, Command]) -> list[bool]:
    """Of each, so that the end of each is noticed when it comes."""
    return [command.is_running for command in commands.values()]


def _row(component: str, state: str, command: str, running: Command, since_s: float) -> HangRow:
    try:
        code: int | None = running.wait(0.0)
        problem = "a traceback" if re.search("^Traceback", running.printed, re.MULTILINE) else ""
    except HungError as error:
        code, problem = None, str(error)
    must_name = command not in _KEEPS_NOBODY_WAITING and code != 0
    took_s = (running.ended_s or time.monotonic()) - since_s
    return HangRow(component, state, command, took_s, code, must_name, component in running.printed, problem)


def _clients(fleet: Fleet, folder: Path, finished: Path) -> dict[str, Sequence[str]]:
    """Commands that talk to servers, begun after the fault."""
    head = f"+head_server.port={fleet.head_port}"
    return {
        "aggregate": [
            program("ng_aggregate_rollouts"),
            head,
            f"+input_glob={finished}",
            f"+output_jsonl_fpath={folder / 'all.jsonl'}",
            _SILENCE,
        ],
        "status": [program("ng_status"), head],
    }


def _slow_model() -> dict[str, Any]:
    return counter_config(alone=True, script=right_answers(latency_s=0.2))


def _small_finished_run(lab: Lab, fleet: Fleet, name: str) -> Path:
    job = Job(
        lab, fleet, rows=4, repeats=1, folder=lab.folder / name / "finished", options=("+disable_aggregation=true",)
    )
    with job.collecting() as collector:
        collector.wait()
    return job.output


def _each_command(lab: Lab, fleet: Fleet, component: str, state: str, note: Add, finished: Path) -> None:
    """A collector that is at work, and questions that are asked afterwards."""
    folder = lab.folder / f"{component}-{state}"
    job = Job(lab, fleet, rows=400, repeats=4, folder=folder, options=(_SILENCE,))
    with job.collecting() as collector:
        collector.wait_until(lambda: job.finished >= 1)
        pid = fleet.signal_server(component, _STATES[state])
        since_s = time.monotonic()
        try:
            commands = _clients(fleet, folder, finished).items()
            clients = {name: Command(arguments, folder, name) for name, arguments in commands}
            for row in _ended(component, state, {"collect": collector, **clients}, since_s):
                note(row)
        finally:
            if state == "silent":
                os.kill(pid, signal.SIGCONT)


def _silent_one_after_the_other(lab: Lab, note: Add, components: Sequence[str]) -> None:
    fleet = lab.fleet(_slow_model())
    finished = _small_finished_run(lab, fleet, "silent")
    for component in components:
        _each_command(lab, fleet, component, "silent", note, finished)
    if len(components) > 1:
        _head_silent(lab, note, fleet, finished)
    pids = fleet.pids()
    for component in components:
        os.kill(pids[component], signal.SIGSTOP)
    fleet.launcher.send(signal.SIGTERM)
    (row,) = _ended(components[-1], "silent", {"shutdown": fleet.launcher}, time.monotonic())
    row.must_name, row.component = True, " and ".join(components)
    note(row)


def _head_silent(lab: Lab, note: Add, fleet: Fleet, finished: Path) -> None:
    fleet.launcher.send(signal.SIGSTOP)
    since_s = time.monotonic()
    folder = lab.folder / "head-silent"
    begun = {**_clients(fleet, folder, finished), "collect, begun then": _collect_anew(fleet, finished)}
    begun["validate"] = [program("ng_validate"), f"+config_paths=[{fleet.folder / 'servers.yaml'}]"]
    clients = {name: Command(arguments, folder, name.partition(",")[0]) for name, arguments in begun.items()}
    for row in _ended(HEAD, "silent", clients, since_s):
        note(row)
    fleet.launcher.send(signal.SIGCONT)


def _collect_anew(fleet: Fleet, finished: Path) -> list[str]:
    return [
        program("ng_collect_rollouts"),
        f"+head_server.port={fleet.head_port}",
        f"+input_jsonl_fpath={finished.with_name('in.jsonl')}",
        "+output_jsonl_fpath=anew.jsonl",
        _SILENCE,
    ]


def _one_dead(lab: Lab, note: Add, component: str) -> None:
    fleet = Fleet(lab.folder / f"dead-{component}", _slow_model(), is_watched=False)
    try:
        finished = _small_finished_run(lab, fleet, f"dead-{component}")
        _each_command(lab, fleet, component, "dead", note, finished)
    finally:
        fleet.stop()


def _at_work(lab: Lab, note: Add, component: str, short: bool) -> None:
    """A collector with the patience it has by itself, whose head and servers, or one of its servers, are killed."""
    is_head = component == HEAD
    fleet = Fleet(lab.folder / f"at-work-{component.replace(' ', '-')}", _slow_model(), is_watched=is_head)
    command, options = ("collect", (_REFUSED,)) if short else ("collect, patient", ())
    try:
        job = Job(lab, fleet, rows=400, repeats=4, folder=fleet.folder / "job", options=options)
        with job.collecting() as collector:
            collector.wait_until(lambda: job.finished >= 1)
            said_before = len(collector.stderr_path.read_bytes())
            if is_head:
                fleet.launcher.send(signal.SIGKILL)
            else:
                fleet.signal_server(component, signal.SIGKILL)
            note(_named_and_ended(component, command, collector, said_before))
    finally:
        fleet.stop()


def _endpoint_dead(lab: Lab, note: Add) -> None:
    """Nobody listens where a model server asks, and nobody ever has."""
    config = counter_config()
    kind = {"entrypoint": "app.py", "openai_api_key": "none", "openai_model": "any"}
    address = f"http://127.0.0.1:{free_port()}/v1"
    config[MODEL] = {"responses_api_models": {"openai_model": {**kind, "openai_base_url": address}}}
    fleet = Fleet(lab.folder / "endpoint-dead", config)
    try:
        patience = f"+model_endpoint_readiness_timeout_seconds={MAX_SILENCE_S:g}"
        job = Job(lab, fleet, rows=8, repeats=1, folder=fleet.folder / "job", options=(patience,))
        with job.collecting() as collector:
            collector.wait_until(lambda: collector.has_begun)
            note(_named_and_ended("policy_base_url", "collect", collector, 0))
    finally:
        fleet.stop()


def _named_and_ended(component: str, command: str, collector: Command, said_before: int) -> HangRow:
    """How long after the fault it was named in what was not `said_before`, in bytes, and ended."""
    since_s = time.monotonic()
    name = component.encode()
    is_named = collector.wait_until(lambda: name in collector.stderr_path.read_bytes()[said_before:], BOUNDS_S[command])
    named_s = time.monotonic() - since_s
    (row,) = _ended(component, "dead", {command: collector}, since_s)
    row.named_s, row.must_name, row.is_named = named_s, True, is_named
    return row


def _head_dead(lab: Lab, note: Add) -> None:
    """Nobody listens where the head server should be."""
    folder = lab.folder / "head-dead"
    folder.mkdir(parents=True)
    rows = folder / "in.jsonl"
    rows.write_text('{"responses_create_params": {"input": "hi"}, "agent_ref": {"name": "agent"}}\n')
    head = f"+head_server.port={free_port()}"
    collect = [program("ng_collect_rollouts"), head, "+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl"]
    since_s = time.monotonic()
    status = Command([program("ng_status"), head], folder, "status")
    begun = {"collect, begun then": Command(collect, folder, "collect"), "status": status}
    for row in _ended(HEAD, "dead", begun, since_s):
        note(row)


def _run_notices(lab: Lab, note: Add, component: str) -> None:
    fleet = Fleet(lab.folder / f"run-{component}", counter_config(alone=True))
    try:
        fleet.signal_server(component, signal.SIGKILL)
        (row,) = _ended(component, "dead", {"run": fleet.launcher}, time.monotonic())
        row.must_name = True
        note(row)
    finally:
        fleet.stop()


def _e2e(lab: Lab, note: Add, component: str, state: str) -> None:
    folder = lab.folder / f"e2e-{component}-{state}"
    folder.mkdir(parents=True)
    (folder / "servers.yaml").write_text(yaml.safe_dump(_slow_model()))
    port = free_port()
    options = ["+config_paths=[servers.yaml]", f"+head_server.port={port}", "+split=example", _SILENCE]
    output = folder / "out.jsonl"
    command = [program("ng_e2e_collect_rollouts"), *options, "+num_repeats=500", f"+output_jsonl_fpath={output}"]
    running = Command([*command, "+num_samples_in_parallel=8"], folder, "e2e")
    try:
        running.wait_until(lambda: output.exists() and output.stat().st_size > 0)
        pids = Fleet.pids_at(port)
        os.kill(pids[component], _STATES[state])
        (row,) = _ended(component, state, {"e2e": running}, time.monotonic())
        row.must_name = True
        note(row)
    finally:
        running.stop()
