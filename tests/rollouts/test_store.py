import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.rollouts import store as store_module
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.store import RolloutStore, StoreError, archive_previous


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


def test_files_reach_the_disk_now_and_then_and_at_the_end(paths: RolloutPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with RolloutStore(paths) as store:
        for task in range(10):
            store.append(_row(task), {})
        assert synced == []
        monkeypatch.setattr(store_module, "SYNC_EVERY_S", 0.0)
        store.append(_row(10), {})
    assert len(synced) == 4


def test_a_disk_that_fails_to_sync_is_not_passed_over(paths: RolloutPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="Input/output error"), RolloutStore(paths) as store:
        store.append(_row(0), {})
    assert json.loads(paths.rollouts.read_text())["_ng_task_index"] == 0


FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.store import RolloutStore, StoreError

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
