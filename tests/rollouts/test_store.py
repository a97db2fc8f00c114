import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import Outcome
from nemo_gym.runs.store import FileChangedError, RolloutStore, StoreError, archive_previous


@pytest.fixture
def paths(tmp_path: Path) -> RolloutPaths:
    return RolloutPaths(tmp_path / "out.jsonl")


def _row(task: int, agent: str = "alpha") -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}, "case": "x"}


def test_results_are_routed_by_what_the_agent_says_about_them(paths: RolloutPaths) -> None:
    results: list[tuple[str, dict[str, Any]]] = [
        ("alpha", {"reward": 1.0, "response": {"usage": {"total_tokens": 21}}}),
        ("beta", {"reward": 0.0, "_ng_failure_class": "transient"}),
        ("alpha", {"reward": 0.0, "_ng_failure_class": "kill_shaped", "_ng_no_persist": True}),
        ("beta", {"reward": 0.0, "_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True}),
    ]
    with RolloutStore(paths) as store:
        outcomes = [store.append(_row(task, agent), result) for task, (agent, result) in enumerate(results)]
    assert outcomes == [Outcome.SUCCESS, Outcome.FAILURE, Outcome.DISCARDED, Outcome.FAILURE]
    assert store.counts == {Outcome.SUCCESS: 1, Outcome.FAILURE: 2, Outcome.DISCARDED: 1}
    assert paths.rollouts.read_text() == (
        '{"reward":1.0,"response":{"usage":{"total_tokens":21}},"_ng_task_index":0,"_ng_rollout_index":0,'
        '"agent_ref":{"name":"alpha"}}\n'
    )
    assert paths.failures.read_text() == (
        '{"reward":0.0,"_ng_failure_class":"transient","_ng_task_index":1,"_ng_rollout_index":0,'
        '"agent_ref":{"name":"beta"}}\n'
        '{"reward":0.0,"_ng_failure_class":"timeout_exceeded","_ng_failure_terminal":true,"_ng_task_index":3,'
        '"_ng_rollout_index":0,"agent_ref":{"name":"beta"}}\n'
    )


def test_both_files_exist_after_any_run(paths: RolloutPaths) -> None:
    with RolloutStore(paths):
        pass
    assert paths.rollouts.read_bytes() == paths.failures.read_bytes() == b""


def test_a_line_is_in_the_file_as_soon_as_it_is_appended(paths: RolloutPaths) -> None:
    with RolloutStore(paths) as store:
        store.append(_row(0), {"reward": 1.0})
        assert json.loads(paths.rollouts.read_text())["reward"] == 1.0


def test_earlier_lines_stay(paths: RolloutPaths) -> None:
    paths.rollouts.write_text('{"earlier":true}\n')
    with RolloutStore(paths) as store:
        store.append(_row(0), {"reward": 1.0})
    assert [len(json.loads(line)) for line in paths.rollouts.read_text().splitlines()] == [1, 4]


class Syncs:
    """Counts what was brought to the disk: how long each file was when it last was."""

    def __init__(self) -> None:
        self.length_of: dict[int, int] = {}
        self.count = 0

    def __call__(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        os.fsync(descriptor)
        self.length_of[stat.st_ino] = stat.st_size
        self.count += 1

    def has(self, path: Path) -> bool:
        stat = path.stat()
        return self.length_of.get(stat.st_ino) == stat.st_size

    def wait_for(self, path: Path) -> None:
        deadline_s = time.monotonic() + 30
        while not self.has(path):
            assert time.monotonic() < deadline_s, f"{path} was never brought to the disk"
            time.sleep(0.005)


def test_what_was_written_reaches_the_disk_although_nothing_more_is_written(paths: RolloutPaths) -> None:
    syncs = Syncs()
    with RolloutStore(paths, sync=syncs, sync_after_s=0.05) as store:
        for task in range(3):  # also the second time, and the third
            store.append(_row(task), {"_ng_failure_class": "x"} if task == 1 else {})
            syncs.wait_for(paths.failures if task == 1 else paths.rollouts)
        time.sleep(0.3)
        assert syncs.count <= 6  # nothing to do, nothing done


def test_what_was_written_reaches_the_disk_at_the_end_whatever_the_interval(paths: RolloutPaths) -> None:
    syncs = Syncs()
    with RolloutStore(paths, sync=syncs, sync_after_s=3600.0) as store:
        for task in range(10):
            store.append(_row(task), {})
        assert syncs.count == 0
    assert syncs.has(paths.rollouts)
    assert syncs.has(paths.failures)


def test_what_was_written_during_a_sync_is_brought_to_the_disk_by_the_next(paths: RolloutPaths) -> None:
    under_way, may_end = threading.Event(), threading.Event()
    syncs = Syncs()

    def slow(descriptor: int) -> None:
        syncs(descriptor)
        under_way.set()
        assert may_end.wait(30)

    with RolloutStore(paths, sync=slow, sync_after_s=0.01) as store:
        store.append(_row(0), {})
        assert under_way.wait(30)
        store.append(_row(1), {})
        may_end.set()
    assert syncs.has(paths.rollouts)


def test_a_disk_that_fails_to_sync_is_not_passed_over(paths: RolloutPaths) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(StoreError, match="Input/output error"), RolloutStore(paths, sync=fail) as store:
        store.append(_row(0), {})
    assert json.loads(paths.rollouts.read_text())["_ng_task_index"] == 0


def test_a_disk_that_fails_to_sync_stops_the_run_at_the_next_rollout(paths: RolloutPaths) -> None:
    failed = threading.Event()

    def fail(descriptor: int) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    def append_on_and_on() -> None:
        for task in range(1_000):
            store.append(_row(task), {})
            assert failed.wait(30)

    store = RolloutStore(paths, sync=fail, sync_after_s=0.0)
    with pytest.raises(StoreError, match="Input/output error"), store:
        append_on_and_on()
    assert store.counts[Outcome.SUCCESS] < 1_000


FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.store import RolloutStore, StoreError

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
with RolloutStore(RolloutPaths(Path("out.jsonl"))) as store:
    for task in range(100):
        try:
            store.append({"_ng_task_index": task, "_ng_rollout_index": 0}, {"text": "x" * 300})
        except StoreError as error:
            sys.exit(str(error))
"""


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "out.jsonl" in done.stderr
    assert "+resume_from_cache=true" in done.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["_ng_task_index"] for line in lines] == [0, 1]


@pytest.mark.parametrize("at_once", [1_000_000, 1_000, 1])
def test_a_long_line_is_written_whole_also_by_a_system_that_takes_less_at_once(
    paths: RolloutPaths, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:at_once]))
    text = "x" * 2_000
    with RolloutStore(paths) as store:
        for task in range(2):
            store.append(_row(task), {"text": text})
    store.verify()

    lines = [json.loads(line) for line in paths.rollouts.read_text().splitlines()]
    assert [(line["_ng_task_index"], line["text"] == text) for line in lines] == [(0, True), (1, True)]


def test_an_earlier_run_is_moved_as_a_whole(paths: RolloutPaths, caplog: pytest.LogCaptureFixture) -> None:
    for path in paths.of_one_run:
        path.write_text(path.name)
    unrelated = paths.rollouts.with_name("out_other.jsonl")
    unrelated.touch()
    folder = archive_previous(paths)
    assert folder is not None
    assert folder.parent == paths.previous
    assert folder.name.endswith("Z")
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in paths.of_one_run)
    assert all(path.read_text() == path.name for path in folder.iterdir())
    assert sorted(path.name for path in paths.rollouts.parent.iterdir()) == ["out.previous", "out_other.jsonl"]
    assert str(folder) in caplog.text


def test_runs_of_the_same_second_are_kept_apart(paths: RolloutPaths) -> None:
    folders = []
    for _ in range(3):
        paths.rollouts.touch()
        folders.append(archive_previous(paths))
    assert len(set(folders)) == 3


def test_nothing_is_moved_when_there_is_nothing(paths: RolloutPaths) -> None:
    assert archive_previous(paths) is None
    assert list(paths.rollouts.parent.iterdir()) == []


@pytest.mark.parametrize("loss", ["the folder is moved", "the file is replaced"])
def test_a_file_that_is_no_longer_in_its_place_is_not_written_to(loss: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    paths = RolloutPaths(folder / "out.jsonl")
    row = {"_ng_task_index": 0, "_ng_rollout_index": 0}

    with RolloutStore(paths) as store:
        store.append(row, {"reward": 1.0})
        folder.rename(tmp_path / "elsewhere")
        if loss == "the file is replaced":
            folder.mkdir()
            paths.rollouts.touch()
        with pytest.raises(StoreError, match="no longer the file that this run writes to"):
            store.append(row, {"reward": 1.0})
        if loss == "the file is replaced":
            shutil.rmtree(folder)
        (tmp_path / "elsewhere").rename(folder)  # what was moved back is as it was
        store.append(row, {"reward": 1.0})


def test_a_file_that_was_removed_after_the_last_rollout_is_noticed_at_the_end(paths: RolloutPaths) -> None:
    with pytest.raises(StoreError, match="no longer"), RolloutStore(paths):
        paths.rollouts.unlink()


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}\n")


def _replace_by_copy(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


ATTACKS: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "one byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "grown by zeros": lambda path: os.truncate(path, path.stat().st_size + 100),
    "appended to": _append,
    "removed": Path.unlink,
    "replaced by a copy": _replace_by_copy,
}
MOMENTS = ["before the next rollout", "before the end", "after the end", "before it is opened again"]


def _attacked(store: RolloutStore, path: Path, result: dict[str, Any], attack: Callable[[Path], None], at: str) -> None:
    with store:
        store.append(_row(0), dict(result))
        if at.startswith("before the"):
            attack(path)
        if at == "before the next rollout":
            store.append(_row(1), dict(result))
            return
    attack(path)
    if at == "after the end":
        store.verify()
    else:
        with store:
            pass


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["rollouts", "failures"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_files_that_somebody_else_changes_are_noticed(paths: RolloutPaths, attack: str, name: str, moment: str) -> None:
    path: Path = getattr(paths, name)
    result: dict[str, Any] = {} if name == "rollouts" else {"_ng_failure_class": "x"}
    with pytest.raises(FileChangedError, match=rf"{path}.*\+resume_from_cache=true"):
        _attacked(RolloutStore(paths), path, result, ATTACKS[attack], moment)


def test_lines_that_somebody_else_overwrites_are_missed_at_the_end(paths: RolloutPaths) -> None:
    paths.rollouts.write_text('{"earlier":true}\n')
    with RolloutStore(paths) as store:
        for task in range(3):
            store.append(_row(task), {})
        with paths.rollouts.open("r+b") as file:
            file.seek(-20, os.SEEK_END)
            file.write(bytes(20))
    with pytest.raises(FileChangedError, match="holds 2 of the 3 lines"):
        store.verify()


def test_files_that_stay_as_they_were_are_sound(paths: RolloutPaths) -> None:
    paths.rollouts.write_text('{"earlier":true}\n')
    store = RolloutStore(paths)
    store.expect_unchanged()
    for task in range(3):
        with store:
            store.append(_row(task), {})
    store.verify()
    assert len(paths.rollouts.read_bytes().splitlines()) == 4


def test_files_that_change_between_planning_and_opening_are_noticed(paths: RolloutPaths) -> None:
    paths.rollouts.write_text('{"earlier":true}\n')
    store = RolloutStore(paths)
    store.expect_unchanged()
    os.truncate(paths.rollouts, 0)
    with pytest.raises(FileChangedError, match="shortened"), store:
        pytest.fail("it was opened")


def test_a_sidecar_that_is_a_symbolic_link_is_not_followed(paths: RolloutPaths, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    paths.failures.symlink_to(precious)
    with pytest.raises(ConfigError, match=f"{paths.failures} is a symbolic link.*remove it"), RolloutStore(paths):
        pass
    assert precious.read_text() == "mine"


def test_an_output_that_is_a_symbolic_link_leads_where_its_owner_wants(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    paths = RolloutPaths(tmp_path / "out.jsonl")
    paths.rollouts.symlink_to(tmp_path / "disk" / "real.jsonl")
    with RolloutStore(paths) as store:
        store.append(_row(0), {})
    assert paths.rollouts.is_symlink()
    assert json.loads((tmp_path / "disk" / "real.jsonl").read_text())["_ng_task_index"] == 0
