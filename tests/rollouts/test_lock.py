import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import OutputInUseError, RunLock, only_writer
from nemo_gym.runs.store import RolloutStore
from tests.rollouts.racing import WITHOUT_LOCKS, racers

HOLD = """
import sys, time
from pathlib import Path
from nemo_gym.runs.lock import RunLock

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
        assert json.loads(path.read_bytes())["pid"] == os.getpid()


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


@pytest.mark.parametrize("left_behind", [None, '{"pid": 4194305}', '{"pid": 4194305, "process_start": "1"}'])
@pytest.mark.parametrize("kernel", ["with locks", "without locks"])
def test_of_collectors_that_race_exactly_one_wins(tmp_path: Path, kernel: str, left_behind: str | None) -> None:
    with racers(tmp_path, 4, has_locks=kernel == "with locks") as race:
        for number in range(12):
            path = tmp_path / f"out{number}.lock"
            if left_behind is not None:
                path.write_text(left_behind)
            assert race(path) == 1
    assert list(tmp_path.iterdir()) == []


def test_where_the_kernel_has_no_locks_the_lock_of_a_killed_collector_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    path.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname(), "process_start": "1"}))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS + HOLD],
        cwd=tmp_path,
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("held\n", 0), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "nonsense", "[1]"])
def test_where_the_kernel_has_no_locks_a_file_that_names_nobody_is_left_to_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    _no_kernel_locks(monkeypatch)
    path = tmp_path / "out.lock"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{path} names nobody.*delete it"), RunLock(path):
        pass
    assert path.read_text() == content


def test_where_the_kernel_has_no_locks_another_container_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernel_locks(monkeypatch)
    path = tmp_path / "out.lock"
    path.write_text(json.dumps({"pid": 4194305, "host": socket.gethostname(), "pid_namespace": "pid:[1]"}))
    with pytest.raises(ConfigError, match="process 4194305 is already collecting"), RunLock(path):
        pass


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_lock_file_that_is_a_symbolic_link_is_not_followed(tmp_path: Path, is_dangling: bool) -> None:
    precious, path = tmp_path / "precious", tmp_path / "out.lock"
    if not is_dangling:
        precious.write_text("mine")
    path.symlink_to(precious)
    with pytest.raises(ConfigError, match=f"{path} is a symbolic link.*remove it"), RunLock(path):
        pass
    assert precious.exists() is not is_dangling
    assert is_dangling or precious.read_text() == "mine"


def _hard_link(first: Path, other: Path) -> None:
    first.write_text("")
    other.hardlink_to(first)


def _symbolic_link(first: Path, other: Path) -> None:
    first.write_text("")
    other.symlink_to(first)


def _link_to_a_link(first: Path, other: Path) -> None:
    between = first.with_name("between.jsonl")
    between.symlink_to(first)
    other.symlink_to(between)


OTHER_NAMES: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": _symbolic_link,
    "symbolic link to nothing yet": lambda first, other: other.symlink_to(first),
    "symbolic link to a symbolic link": _link_to_a_link,
    "hard link": _hard_link,
}


@pytest.mark.parametrize("which_first", ["the file", "its other name"])
@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_an_output_is_recognised_by_another_name(tmp_path: Path, kind: str, which_first: str) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    names = [tmp_path / "here" / "out.jsonl", tmp_path / "there" / "other.jsonl"]
    OTHER_NAMES[kind](*names)
    if which_first != "the file":
        names.reverse()
    first, second = map(RolloutPaths, names)
    with only_writer(first), pytest.raises(OutputInUseError), only_writer(second):
        pass
    with only_writer(second):
        pass
    assert not list(tmp_path.glob("*/*.lock"))


def test_an_output_that_gets_another_name_while_it_is_written_is_recognised(tmp_path: Path) -> None:
    first, second = RolloutPaths(tmp_path / "out.jsonl"), RolloutPaths(tmp_path / "other.jsonl")
    with only_writer(first) as lock, RolloutStore(first, lock):
        second.rollouts.hardlink_to(first.rollouts)
        with pytest.raises(OutputInUseError, match="by another name"), only_writer(second):
            pass


def test_an_output_is_recognised_through_a_linked_folder_and_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    with only_writer(RolloutPaths(Path("out.jsonl"))):
        for folder in (tmp_path / "linked", tmp_path / "real", Path("../linked")):
            with pytest.raises(OutputInUseError), only_writer(RolloutPaths(folder / "out.jsonl")):
                pass


def test_an_output_is_recognised_through_a_bind_mount(tmp_path: Path) -> None:
    for folder in ("real", "bound"):
        (tmp_path / folder).mkdir()
    mount = subprocess.run(["mount", "--bind", tmp_path / "real", tmp_path / "bound"], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("mounting takes more rights")
    try:
        real, bound = (RolloutPaths(tmp_path / folder / "out.jsonl") for folder in ("real", "bound"))
        with only_writer(real), pytest.raises(OutputInUseError), only_writer(bound):
            pass
    finally:
        subprocess.run(["umount", tmp_path / "bound"], check=True)


def test_where_the_kernel_has_no_locks_a_file_with_two_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_kernel_locks(monkeypatch)
    _hard_link(tmp_path / "out.jsonl", tmp_path / "other.jsonl")
    with (
        pytest.raises(ConfigError, match=r"has 2 names \(hard links\)"),
        only_writer(RolloutPaths(tmp_path / "out.jsonl")),
    ):
        pass


def test_a_link_that_leads_to_itself_ends_in_words(tmp_path: Path) -> None:
    paths = RolloutPaths(tmp_path / "out.jsonl")
    paths.rollouts.symlink_to(paths.rollouts)
    with pytest.raises(ConfigError, match=r"out\.jsonl"), only_writer(paths) as lock, RolloutStore(paths, lock):
        pass
