import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from nemo_gym.rollouts.lock import RunLock

with RunLock(Path("out.lock")):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def _another_collector(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_lock_is_gone_when_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    for _ in range(2):
        with RunLock(path):
            assert json.loads(path.read_bytes())["pid"] == os.getpid()
        assert not path.exists()


def test_a_second_collector_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with _another_collector(tmp_path) as other:
        with (
            pytest.raises(ConfigError, match=rf"process {other.pid} is already collecting") as caught,
            RunLock(tmp_path / "out.lock"),
        ):
            pass
        assert str(tmp_path / "out.lock") in str(caught.value)
        assert (tmp_path / "out.lock").exists()


def test_a_second_collector_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    with RunLock(path):
        with pytest.raises(ConfigError, match=str(os.getpid())), RunLock(path):
            pass
        assert path.exists()


def test_the_lock_of_a_killed_collector_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "out.lock"
    with _another_collector(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=30)
        assert path.exists()
        with RunLock(path):
            assert json.loads(path.read_bytes())["pid"] == os.getpid()
    assert f"from process {other.pid}, which is gone" in caplog.text


def test_a_living_process_named_in_the_file_is_respected_even_without_a_kernel_lock(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    path.write_text(f"{os.getppid()}\n")
    with pytest.raises(ConfigError, match=rf"process {os.getppid()} "), RunLock(path):
        pass


def test_another_process_that_got_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    path.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname(), "process_start": "1"}))
    with RunLock(path):
        pass


def _no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_where_the_kernel_has_no_locks_the_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_kernel_locks(monkeypatch)
    path = tmp_path / "out.lock"
    with RunLock(path):
        with pytest.raises(ConfigError, match=str(os.getpid())), RunLock(path):
            pass
        assert path.exists()
    assert not path.exists()


def test_where_the_kernel_has_no_locks_another_host_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernel_locks(monkeypatch)
    path = tmp_path / "out.lock"
    path.write_text('{"pid": 5, "host": "elsewhere", "since": "2026-01-01T00:00:00.000Z"}')
    with pytest.raises(ConfigError, match=r"process 5 on elsewhere .*since 2026.*delete the lock file"), RunLock(path):
        pass


@pytest.mark.parametrize("content", ["", "nonsense", "[1]", '{"pid": -1}', '{"pid": "x"}', '{"pid": 5, "host": "no"}'])
def test_a_file_that_names_no_living_process_here_is_taken_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.lock"
    path.write_text(content)
    with RunLock(path):
        pass
    assert not path.exists()


def test_the_lock_of_a_successor_in_a_new_folder_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    with RunLock(path):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
