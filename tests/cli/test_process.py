import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemo_gym.launch.process import ChildProcess, CommandLine, describe_exit, stop_all

Start = Callable[..., ChildProcess]
GENEROUS_S = 20.0


@pytest.fixture
def lines() -> list[bytes]:
    return []


@pytest.fixture
def start(lines: list[bytes]) -> Iterator[Start]:
    """Start a Python program; whatever is left of it is killed."""
    children: list[ChildProcess] = []

    def run(program: str, **options: object) -> ChildProcess:
        command = CommandLine([sys.executable, "-u", "-c", program], **options)  # type: ignore[arg-type]
        children.append(ChildProcess(command, lines.append))
        return children[-1]

    yield run
    for child in children:
        child.kill()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_output_of_both_streams_arrives_in_order_and_completely(start: Start, lines: list[bytes]) -> None:
    child = start("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three', end='')")
    assert child.wait(GENEROUS_S) == 0
    assert lines == [b"one\n", b"two\n", b"three"]


def test_a_very_long_line_arrives_in_pieces(start: Start, lines: list[bytes]) -> None:
    assert start("print('x' * 200_000)").wait(GENEROUS_S) == 0
    assert len(lines) > 1
    assert b"".join(lines) == b"x" * 200_000 + b"\n"


def test_it_runs_where_and_with_what_it_is_told(start: Start, lines: list[bytes], tmp_path: Path) -> None:
    start("import os; print(os.getcwd(), os.environ['A'])", folder=tmp_path, environment={"A": "b"}).wait(GENEROUS_S)
    assert lines == [f"{tmp_path} b\n".encode()]


def test_it_has_a_process_group_of_its_own(start: Start) -> None:
    child = start("import time; time.sleep(60)")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_stopping_asks_before_it_kills(start: Start, lines: list[bytes]) -> None:
    kind = start(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up')\nwhile True: time.sleep(0.01)"
    )
    stubborn = start(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\nwhile True: time.sleep(0.01)"
    )
    wait_for(lambda: len(lines) == 2)
    assert stop_all([kind, stubborn], grace_s=1.0) == [stubborn]
    assert kind.exit_code() == 7
    assert stubborn.exit_code() == -signal.SIGKILL


def test_stopping_reaches_what_the_process_started(start: Start, lines: list[bytes]) -> None:
    child = start(
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid)\ntime.sleep(60)"
    )
    wait_for(lambda: lines)
    stop_all([child], grace_s=GENEROUS_S)
    wait_for(lambda: is_gone(int(lines[0])))


def test_a_process_that_dies_takes_its_group_with_it(start: Start, lines: list[bytes]) -> None:
    child = start(
        "import os, signal, subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    wait_for(lambda: child.exit_code() is not None)
    assert child.exit_code() == -signal.SIGKILL
    wait_for(lambda: is_gone(int(lines[0])))


def test_waiting_is_bounded(start: Start) -> None:
    assert start("import time; time.sleep(60)").wait(0.05) is None


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ChildProcess(CommandLine([str(tmp_path / "nothing")]), lambda line: None)


def test_exits_are_described_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by signal 11 (SIGSEGV)"
    assert "SIGKILL; out of memory?" in describe_exit(-9)
    assert describe_exit(-1000) == "killed by signal 1000 (1000)"
