"""A run that is steered from a second process while it is made, and what it does when nobody sits in front of it."""

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.cli.commands import collecting
from nemo_gym.errors import ConfigError
from nemo_gym.runs import sockets
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import address_in
from nemo_gym.runs.sockets import (
    MOST_REQUEST_BYTES,
    NoAnswerError,
    Request,
    ask,
    attend,
    listening,
    run_id,
    socket_folders,
)
from nemo_gym.view.runs import Run
from tests.collection.fakes import FakeRun, Row, failing_with, keys_in, lines_in, right_away, rows_of, write_rows
from tests.collection.processes import Collector, wait_until
from tests.programs import WAIT_S, Program

control_command = command_named("control")
status_command = command_named("status")


OUTPUT = RolloutPaths(Path("out.jsonl"))
Start = Callable[..., Collector]


class Gate:
    """An agent that lets rollouts through when it is told to."""

    def __init__(self) -> None:
        self.let_through = 0
        """How many rows, by number, may end."""

    async def __call__(self, row: Row, attempt: int) -> Row:
        while row["n"] >= self.let_through:  # noqa: ASYNC110 - it is opened in another thread
            await asyncio.sleep(0.01)
        return await right_away(row, attempt)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sockets of this test alone, in a place whose name is short enough."""
    folder = Path(tempfile.mkdtemp(prefix="ng", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))  # runs are looked for there, too: without it, those of other tests
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(fake_run: FakeRun) -> Iterator[Start]:
    """Start a collector on in.jsonl and out.jsonl."""
    collectors: list[Collector] = []

    def begin(*options: str, **settings: Any) -> Collector:
        collectors.append(Collector(*arguments(fake_run), *options, **settings))
        return collectors[-1]

    yield begin
    for collector in collectors:
        collector.stop()


def arguments(fake_run: FakeRun) -> list[str]:
    return [
        f"+head_server.port={fake_run.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
    ]


def control(*options: str, code: int = 0, command: Any = control_command) -> str:
    """What a command says that asks the run, whose collector is another process."""
    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained):
        try:
            command.run(list(options))
            exit_code = 0
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
    assert exit_code == code, complained.getvalue()
    return said.getvalue() if code == 0 else complained.getvalue()


def asked(*options: str) -> Any:
    return json.loads(control("+run=out.jsonl", "+json=true", *options))


def is_listening() -> bool:
    return address_in(OUTPUT) is not None


def finished() -> int:
    return len(lines_in(OUTPUT.rollouts)) if OUTPUT.rollouts.exists() else 0


def steered() -> list[Row]:
    steered: list[Row] = json.loads(OUTPUT.manifest.read_text())["steered"]
    return steered


def test_pausing_holds_back_what_has_not_started_and_caps_change_in_flight(fake_run: FakeRun, start: Start) -> None:
    gate = Gate()
    fake_run.answer = gate
    write_rows(Path("in.jsonl"), rows_of(12))
    collector = start("+num_samples_in_parallel=2")
    wait_until(lambda: is_listening() and fake_run.in_flight == 2, collector)

    assert "The run is paused; 2 rollouts are in flight" in control("+run=out.jsonl", "+pause=true")
    gate.let_through = 2
    wait_until(lambda: finished() == 2, collector)
    status = asked()["status"]
    assert (status["state"], status["done"], status["total"], status["in_flight"]) == ("paused", 2, 12, 0)
    assert len(fake_run.rows) == 2, "a paused run has sent something"

    told = control("+run=out.jsonl", "+set={num_samples_in_parallel: 5, rollout_timeout_s: 99}")
    assert "num_samples_in_parallel=5, rollout_timeout_s=99.0" in told
    assert "The run is running; " in control("+run=out.jsonl", "+resume=true")
    wait_until(lambda: fake_run.in_flight == 5, collector)
    assert "num_samples_in_parallel={" in control("+run=out.jsonl", "+set={num_samples_in_parallel: {alpha: 7}}")
    wait_until(lambda: fake_run.in_flight == 7, collector)

    gate.let_through = 12
    assert collector.wait() == 0, collector.stderr
    assert fake_run.most_in_flight == 7
    assert [entry["did"] for entry in steered()] == ["pause", "set", "resume", "set"]
    assert steered()[1]["value"] == {"num_samples_in_parallel": 5, "rollout_timeout_s": 99.0}
    assert not list(socket_folders()[0].iterdir()), "the socket outlives its collector"


def test_one_rollout_is_cancelled_and_tried_again(fake_run: FakeRun, start: Start) -> None:
    gate = Gate()
    fake_run.answer = gate
    gate.let_through = 1
    write_rows(Path("in.jsonl"), rows_of(3))
    collector = start("+fail_fast=true")
    wait_until(lambda: is_listening() and finished() == 1, collector)

    listed = asked("+in_flight=true")["in_flight"]
    assert [(each["rollout"], each["agent"], each["attempt"]) for each in listed["in_flight"]] == [
        ("1/0", "alpha", 1),
        ("2/0", "alpha", 1),
    ]
    assert "2 rollouts in flight" in control("+run=out.jsonl", "+in_flight=true")
    assert "Cancelled: 1/0" in control("+run=out.jsonl", "+cancel=1/0")
    assert "+cancel=1/0 is not in flight" in control("+run=out.jsonl", "+cancel=1/0", code=2)
    wait_until(lambda: len(lines_in(OUTPUT.failures)) == 1, collector)
    assert lines_in(OUTPUT.failures)[0]["_ng_failure_class"] == "cancelled"
    assert asked()["status"]["failed"] == 1

    assert asked("+retry=failed")["retry"]["retried"] == 1
    wait_until(lambda: fake_run.keys().count((1, 0)) == 2, collector)
    status = asked()["status"]
    assert (status["failed"], status["done"], status["in_flight"]) == (0, 1, 2)
    gate.let_through = 3
    assert collector.wait() == 0, collector.stderr
    assert keys_in(OUTPUT.rollouts) == [(0, 0), (1, 0), (2, 0)]
    assert fake_run.rows[-1]["_ng_attempt_index"] == 1


def test_what_failed_for_good_is_tried_again_while_the_run_goes_on(fake_run: FakeRun, start: Start) -> None:
    gate, refusing = Gate(), failing_with(422, lambda row: row["n"] == 0)
    is_mended = False

    async def answer(row: Row, attempt: int) -> Any:
        return await (refusing if row["n"] == 0 and not is_mended else gate)(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(2))
    collector = start()
    wait_until(lambda: is_listening() and OUTPUT.failures.exists() and bool(lines_in(OUTPUT.failures)), collector)
    wait_until(lambda: asked()["status"]["failed"] == 1, collector)
    is_mended = True
    gate.let_through = 1
    assert "To be tried again: 1 rollouts" in control("+run=out.jsonl", "+retry=failed")
    wait_until(lambda: finished() == 1, collector)
    assert asked("+retry=failed")["retry"]["retried"] == 0
    gate.let_through = 2
    assert collector.wait() == 0, collector.stderr
    assert "2 of 2 finished" in collector.stdout
    assert "failed" not in next(line for line in collector.stdout.splitlines() if line.startswith("Rollouts:"))


def test_a_timeout_that_is_lowered_ends_what_is_in_flight_and_a_stop_leaves_the_rest(
    fake_run: FakeRun, start: Start
) -> None:
    fake_run.answer = Gate()
    write_rows(Path("in.jsonl"), rows_of(3))
    collector = start("+max_attempts=1", "+num_samples_in_parallel=2")
    wait_until(lambda: is_listening() and fake_run.in_flight == 2, collector)
    control("+run=out.jsonl", "+pause=true")
    control("+run=out.jsonl", "+set={rollout_timeout_s: 0.1}")
    wait_until(lambda: [line["_ng_failure_class"] for line in lines_in(OUTPUT.failures)] == ["timeout"] * 2, collector)
    control("+run=out.jsonl", "+set={rollout_timeout_s: null}")
    control("+run=out.jsonl", "+resume=true")
    wait_until(lambda: len(fake_run.rows) == 3, collector)

    assert "The run stops; the 1 rollouts in flight have ten seconds" in control("+run=out.jsonl", "+stop=true")
    assert "are let go" in control("+run=out.jsonl", "+stop=true")
    assert collector.wait() == 130
    assert "Stopped early: stopped by ng_control" in collector.stdout
    assert "+resume_from_cache=true" in collector.stderr


def test_a_budget_is_raised_while_the_run_goes_on(fake_run: FakeRun, start: Start) -> None:
    gate = Gate()
    fake_run.answer = gate
    write_rows(Path("in.jsonl"), rows_of(12))
    prices = "+prices={a-model: {input: 1, output: 1}}"
    collector = start("+max_total_tokens=11", "+num_samples_in_parallel=1", prices)
    wait_until(lambda: is_listening() and fake_run.in_flight == 1, collector)
    assert "can be another number, but not be lifted" in control(
        "+run=out.jsonl", "+set={max_total_tokens: null}", code=2
    )
    assert "cannot be changed" in control("+run=out.jsonl", "+set={max_output_tokens_total: 5}", code=2)
    assert "max_total_tokens=500" in control("+run=out.jsonl", "+set={max_total_tokens: 500}")
    gate.let_through = 11
    wait_until(lambda: finished() == 11, collector)
    wait_for(lambda: asked()["status"]["done"] == 11)
    assert asked()["status"]["cost_usd"] is not None
    assert "$" in control("+run=out.jsonl")
    gate.let_through = 12

    assert collector.wait() == 0, collector.stderr
    assert "of max_total_tokens=500 used" in collector.stdout


def test_what_cannot_be_is_refused_and_changes_nothing(fake_run: FakeRun, start: Start) -> None:
    fake_run.answer = Gate()
    write_rows(Path("in.jsonl"), rows_of(1))
    collector = start()
    wait_until(is_listening, collector)
    for options, words in [
        (["+set={num_samples_in_parallel: -1}"], "num_samples_in_parallel"),
        (["+set={rollout_timeout_s: soon}"], "rollout_timeout_s"),
        (["+set={num_samples_in_parallel: auto}"], "auto is for the start of a run"),
        (["+set={rollout_timeout: 5}"], "did you mean 'rollout_timeout_s'?"),
        (["+set={num_repeats: 5}"], "cannot be changed while a run goes on"),
        (["+set={}"], "+set wants options and values"),
        (["+pause=true", "+resume=true"], "exclude each other"),
        (["+retry=all"], "failed"),
        (["+run=elsewhere.jsonl"], f"+run=elsewhere.jsonl is not one of them; being collected here: {Path.cwd()}/out"),
    ]:
        said = control("+run=out.jsonl", *options, code=2) if "+run" not in options[0] else control(*options, code=2)
        assert words in said

    assert steered() == []
    assert "1 run going on" in control(f"+run={run_id(Path('out.jsonl'))[:6]}")
    collector.send(signal.SIGKILL)
    collector.wait()
    assert "no run" in control(code=2)
    assert not list(socket_folders()[0].iterdir()), "a dead collector's socket is still there"


def test_status_lists_runs_beside_servers(fake_run: FakeRun, start: Start) -> None:
    gate = Gate()
    fake_run.answer, gate.let_through = gate, 4
    write_rows(Path("in.jsonl"), rows_of(5))
    collector = start()
    wait_until(lambda: is_listening() and finished() == 4, collector)
    head = f"+head_server.port={fake_run.port}"

    said = control(head, command=status_command)
    assert said.startswith("No NeMo Gym servers found running.")
    assert "4/5" in said
    assert said.rstrip().endswith("1 run going on")
    assert json.loads(control(head, "+json=true", command=status_command)) == []
    both = json.loads(control(head, "+json=true", "+runs=true", command=status_command))
    (run,) = both["runs"]
    assert both["servers"] == []
    assert run["output"] == str(Path.cwd() / "out.jsonl")
    assert run["scores"]["alpha"]["mean"] == 1.0
    assert run["eta_s"] > 0
    assert Run(RolloutPaths(Path("out.jsonl").absolute()), Path.cwd(), None).summary()["live"]["in_flight"] == 1
    gate.let_through = 5
    assert collector.wait() == 0


def test_a_run_leaves_the_terminal_and_is_shown_again(fake_run: FakeRun) -> None:
    gate = Gate()
    fake_run.answer, gate.let_through = gate, 2
    write_rows(Path("in.jsonl"), rows_of(4))
    command = Program("ng_collect_rollouts", *arguments(fake_run), "+detach=true", "+on_end=tee told.json")
    assert command.wait() == 0, command.stderr
    assert "How it is doing: ng_attach +run=out.jsonl" in command.stdout
    assert "Log: out.log" in command.stdout
    status = asked()["status"]
    assert os.getsid(status["pid"]) == status["pid"], "it has not left"

    showing = Program("ng_attach", "+run=out.jsonl", name="attached")
    wait_for(lambda: "Collecting rollouts:  50% 2/4" in showing.stderr)
    showing.send(signal.SIGINT)
    assert showing.wait() == 0
    assert "The run goes on" in showing.stderr

    showing = Program("ng_attach", name="attached")
    wait_for(lambda: "Collecting rollouts:" in showing.stderr)
    gate.let_through = 4
    assert showing.wait() == 0, showing.stderr
    assert f"The run has ended: 4 of 4 rollouts are in {Path.cwd()}/out.jsonl" in showing.stdout
    wait_for(lambda: Path("told.json").exists() and Path("told.json").read_text().endswith("\n"))
    assert json.loads(Path("told.json").read_text())["finished"] == 4
    log = Path("out.log").read_text()
    assert "Collecting rollouts: 100% 4/4" in log
    assert "detach" not in " ".join(json.loads(OUTPUT.manifest.read_text())["command"])


def test_what_keeps_a_run_from_beginning_is_said_before_the_terminal_is_left(fake_run: FakeRun) -> None:
    command = Program("ng_collect_rollouts", *arguments(fake_run), "+detach=true", "+log_fpath=logs/mine.txt")

    assert command.wait() == 2
    assert "in.jsonl" in command.stderr
    assert "in.jsonl" in Path("logs/mine.txt").read_text()


def test_whoever_wants_to_know_the_end_is_told_however_it_comes(fake_run: FakeRun, collect: Any) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    missing = collect("+on_end=no-such-program --at all")
    assert (missing.exit_code, Path("out.jsonl").exists()) == (2, False)
    assert "there is no program 'no-such-program'" in missing.stderr
    unended = collect('+on_end=echo "what')
    assert unended.exit_code == 2
    assert "log_fpath" in collect("+log_fpath=x.log").stderr

    fake_run.answer = failing_with(422, lambda row: row["n"] == 1)
    ended = collect("+on_end=dd of='with blanks.json' status=none")
    assert ended.exit_code == 1
    told = json.loads(Path("with blanks.json").read_text())
    assert (told["finished"], told["missing"], told["exit_code"], told["error"]) == (1, 1, 1, None)

    failing = collect("+resume_from_cache=true", "+on_end=false")
    assert failing.exit_code == 1
    assert "+on_end ended with code 1: false" in failing.stderr
    refused = collect("+resume_from_cache=true", "+agent_name=beta", "+on_end=tee told.json")
    assert refused.exit_code == 2
    assert json.loads(Path("told.json").read_text())["exit_code"] == 2


def test_a_command_that_never_ends_is_not_waited_for(
    fake_run: FakeRun, collect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_ON_END_WITHIN_S", 0.2)
    write_rows(Path("in.jsonl"), rows_of(1))

    ended = collect("+on_end=sleep 1000")

    assert ended.exit_code == 0
    assert "+on_end did not end within 0.2 s" in ended.stderr


def test_a_run_goes_on_without_a_socket(
    fake_run: FakeRun, collect: Any, monkeypatch: pytest.MonkeyPatch, runtime_folder: Path
) -> None:
    monkeypatch.setattr(sockets, "socket_folders", lambda: [runtime_folder / ("long" * 40), Path("out.jsonl/x")])
    write_rows(Path("in.jsonl"), rows_of(2))

    ended = collect()

    assert ended.exit_code == 0
    assert ended.stderr.count("This run cannot be steered") == 1


def test_clients_that_are_rude_do_not_hold_a_run_up(fake_run: FakeRun, start: Start) -> None:
    gate = Gate()
    fake_run.answer = gate
    write_rows(Path("in.jsonl"), rows_of(3))
    collector = start("+num_samples_in_parallel=1")
    wait_until(is_listening, collector)
    address = address_in(OUTPUT)
    assert address is not None
    rude = [connect(address) for _ in range(4)]
    rude[0].sendall(b"not JSON\n[1]\n{}\n")
    rude[1].sendall(b"x" * (MOST_REQUEST_BYTES + 10))
    rude[2].sendall(b'{"do": "sta')
    said = rude[0].makefile().readline()
    assert json.loads(said) == {"ok": False, "error": "a request is one JSON object on a line of its own"}
    assert "at most" in rude[1].makefile().readline()
    for value in ("nothing", None, {"a": 1}):
        with pytest.raises(ConfigError, match="cannot"):
            ask(address, {"do": value})

    assert ask(address, {"do": "status"})["total"] == 3
    gate.let_through = 3
    assert collector.wait() == 0, collector.stderr
    for connection in rude:
        connection.close()


def test_a_socket_that_is_taken_away_is_made_again(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> None:
    """As when the folder of a user who logs out is removed."""
    monkeypatch.setattr("nemo_gym.runs.sockets._LOOK_EVERY_S", 0.02)
    announced: list[Path] = []

    async def answer(request: Request) -> dict[str, Any]:
        return {"done": 3}

    async def lose_it() -> None:
        attending_it = asyncio.create_task(attend(Path("out.jsonl"), answer, announced.append))
        async with asyncio.timeout(WAIT_S):
            while len(announced) < 2:
                await asyncio.sleep(0.01)
                if announced and announced[0].exists():
                    shutil.rmtree(announced[0].parent)
            assert (await asyncio.to_thread(ask, announced[1], {"do": "status"}))["done"] == 3
        attending_it.cancel()
        await asyncio.wait([attending_it])

    asyncio.run(lose_it())
    assert not announced[1].exists()


def test_the_socket_is_the_users_alone(runtime_folder: Path) -> None:
    with listening(Path("out.jsonl")) as (_, address):
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
        assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
        assert address.parent == runtime_folder / "nemo_gym"
        address.parent.chmod(0o755)
        with pytest.raises(NoAnswerError, match="not in a private folder"):
            ask(address, {"do": "status"})
        with listening(Path("other.jsonl")) as (_, other):
            assert other.parent == runtime_folder / f"nemo_gym-{os.geteuid()}", "a folder that others can look into"
    elsewhere = Path("/tmp") / "0123456789ab-01234567.sock"
    with pytest.raises(NoAnswerError, match="not in a private folder"):
        ask(elsewhere, {"do": "status"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")
def test_another_user_is_refused(fake_run: FakeRun, start: Start, runtime_folder: Path) -> None:
    fake_run.answer = Gate()
    write_rows(Path("in.jsonl"), rows_of(1))
    collector = start()
    wait_until(is_listening, collector)
    address = address_in(OUTPUT)
    assert address is not None

    assert "PermissionError" in as_nobody(f"s.connect({str(address)!r})")
    runtime_folder.chmod(0o755)  # and now as if nobody had taken care of the folders
    address.parent.chmod(0o755)
    address.chmod(0o666)
    assert "this run is another user" in as_nobody(f"s.connect({str(address)!r}); print(s.recv(1000))")
    as_nobody(f"s.connect({str(address)!r}); s.sendall(b'{{}}'); s.sendall({STOP!r})")
    assert collector.is_running
    assert steered() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try this")
def test_a_socket_of_another_user_is_not_asked(runtime_folder: Path) -> None:
    with listening(Path("out.jsonl")) as (_, address):
        pass
    runtime_folder.chmod(0o777)
    address.parent.chmod(0o777)
    listen = f"s.bind({str(address)!r}); s.listen(); print('ready', flush=True); s.settimeout(60); s.accept()"
    with subprocess.Popen([sys.executable, "-c", NOBODY + listen], stdout=subprocess.PIPE) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"ready\n"
        address.parent.chmod(0o700)
        with pytest.raises(NoAnswerError, match="another user listens"):
            ask(address, {"do": "status"})


STOP = b'{"do": "stop"}\n'
NOBODY = "import os, socket; s = socket.socket(socket.AF_UNIX); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"


def as_nobody(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", NOBODY + program], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    return done.stdout + done.stderr


def connect(address: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(WAIT_S)
    connection.connect(str(address))
    return connection


def wait_for(condition: Callable[[], bool]) -> None:
    by_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < by_s, "waited in vain"
        time.sleep(0.02)
