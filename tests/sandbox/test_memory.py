"""Whose doing it was that a program was killed: proved by the kernel's count of kills and by the memory there was."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_gym.sandbox import process as memory
from nemo_gym.sandbox.child import Limits
from nemo_gym.sandbox.process import IsolatedProcess, SandboxError, Work, has_room

RUN_PYTHON = """
import time

def run(payload):
    print("running", flush=True)
    time.sleep(30)
"""
LIMITS = Limits(wall_s=30, cpu_s=10, memory_mb=128)

KilledCall = Callable[..., str]


@pytest.fixture
def killed_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KilledCall]:
    """A real program, killed from outside; the kernel's counter is a file that counts it or does not."""
    (tmp_path / "sleeping.py").write_text(RUN_PYTHON)
    counter = tmp_path / "vmstat"
    counter.write_text("nr_free_pages 1\noom_kill 7\n")
    monkeypatch.setattr(memory, "_KILLS", counter)
    processes: list[IsolatedProcess] = []

    def call(room_mb: float, is_counted: bool) -> str:
        process = IsolatedProcess(room_mb)
        processes.append(process)
        process.isolate(Work("sleeping", (tmp_path,)), ["landlock", "seccomp"])

        def kill() -> None:
            child = child_of(process._process.pid)
            if is_counted:
                counter.write_text("nr_free_pages 1\noom_kill 8\n")
            os.kill(child, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            outcome = process.call("sleep", LIMITS)
        finally:
            killer.join()
        return f"{outcome.end} {outcome.detail}"

    yield call
    for process in processes:
        process.close()


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        child = children.read_text().split()
        seccomp = [] if not child else Path(f"/proc/{child[0]}/status").read_text().splitlines()
        if any(line.split() == ["Seccomp_filters:", "2"] for line in seccomp):  # its work has begun
            time.sleep(0.1)
            return int(child[0])
        time.sleep(0.01)
    raise AssertionError("there is no child")


needs_linux = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the kernel does not list children"
)


@needs_linux
def test_a_program_that_the_kernel_killed_for_the_memory_of_others_is_not_judged(killed_call: KilledCall) -> None:
    with pytest.raises(SandboxError, match="because others left it no memory; give this machine more"):
        killed_call(room_mb=1024, is_counted=True)


@needs_linux
@pytest.mark.parametrize(("room_mb", "is_counted"), [(1024, False), (100, True), (0, True)])
def test_nothing_else_excuses_a_program_that_was_killed(
    killed_call: KilledCall, room_mb: float, is_counted: bool
) -> None:
    assert killed_call(room_mb, is_counted) == "killed SIGKILL"


def test_what_is_left_in_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 2097152 kB\n")
    for folder, limit in ((inner, "max"), (inner.parent, str(1 << 30))):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(700 << 20))
        (folder / "memory.stat").write_text(f"anon 1\nactive_file {100 << 20}\ninactive_file {200 << 20}\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")

    assert memory.available_mb() == 1024 - 700 + 300
    (inner / "memory.max").write_text(str(500 << 20))
    assert memory.available_mb() == 100
    (tmp_path / "own").unlink()
    assert memory.available_mb() == 2048


def test_work_has_room_with_its_folder_and_what_the_kernel_keeps_for_it() -> None:
    assert has_room(1024, 1152)
    assert not has_room(1024, 1151)
    assert not has_room(64, 0)
