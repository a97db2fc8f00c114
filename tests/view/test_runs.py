import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import RunLock, is_being_written
from nemo_gym.runs.manifest import Expected, RunManifest, write_manifest
from nemo_gym.view.runs import Judged, Run, find_runs, newest_first, run_details
from tests.view.files import failure, lines, rollout, write_run


def summary_of(paths: RolloutPaths, root: Path) -> dict[str, Any]:
    run = Run(paths, root, None)
    run.refresh()
    try:
        return run.summary()
    finally:
        run.close()


def manifest(paths: RolloutPaths, expected: int, repeats: int = 2, **more: Any) -> None:
    agents = {"agent_a": Expected(tasks=expected // repeats, rollouts=expected)}
    options = {"output_jsonl_fpath": str(paths.rollouts), "num_repeats": repeats}
    write_manifest(RunManifest(agents=agents, options=options, models=["model_a"], **more), paths.manifest)


def test_runs_below_a_folder(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", [rollout(0, 0)], [failure(1, 0)])
    two = write_run(tmp_path / "a" / "b", [rollout(0, 0)], name="other")
    begun = write_run(tmp_path / "c", [], name="begun")
    manifest(begun, 4)
    begun.rollouts.unlink()
    write_run(tmp_path / ".hidden", [rollout(0, 0)])
    write_run(tmp_path / "a" / "rollouts.previous" / "1", [rollout(0, 0)])
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "x"}}\n')
    (tmp_path / "text.jsonl").write_text("hello\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    outside = write_run(tmp_path.parent / f"{tmp_path.name}-outside", [rollout(0, 0)])
    (tmp_path / "link.jsonl").symlink_to(outside.rollouts)
    (tmp_path / "inside.jsonl").symlink_to(two.rollouts)  # is shown once, by its own name

    found = [run.rollouts.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)]
    assert sorted(found) == ["a/b/other.jsonl", "a/rollouts.jsonl", "c/begun.jsonl"]
    assert find_runs(one.rollouts) == [one]


def test_files_are_judged_once_and_again_when_they_change(tmp_path: Path) -> None:
    judged: Judged = {}
    paths = write_run(tmp_path, [])
    other = tmp_path / "other.jsonl"
    other.write_text("text\n")
    assert find_runs(tmp_path, judged) == []
    paths.rollouts.write_bytes(lines([rollout(0, 0)]))
    assert find_runs(tmp_path, judged) == [paths]
    before = dict(judged)
    with paths.rollouts.open("ab") as file:
        file.write(lines([rollout(1, 0)]))
    assert find_runs(tmp_path, judged) == [paths]
    assert judged == before
    paths.rollouts.unlink()
    other.write_bytes(lines([rollout(0, 0)]))
    assert [run.rollouts for run in find_runs(tmp_path, judged)] == [other]


def test_how_a_run_stands(tmp_path: Path) -> None:
    rollouts = [rollout(task, repeat, float(repeat == 0)) for task in range(4) for repeat in range(2)]
    paths = write_run(tmp_path / "math", rollouts[:6], [failure(3, 0), failure(3, 0), failure(0, 0, "connect")])
    manifest(paths, 8, started_at="2026-01-01T00:00:00.000Z", ended_at="2026-01-01T00:05:00.000Z")
    summary = summary_of(paths, tmp_path)

    assert summary["path"] == "math/rollouts.jsonl"
    assert (summary["name"], summary["folder"], summary["agents"], summary["models"]) == (
        "rollouts",
        "math",
        ["agent_a"],
        ["model_a"],
    )
    assert (summary["expected"], summary["done"], summary["failed"], summary["tasks"]) == (8, 6, 1, 4)
    assert (summary["state"], summary["has_failures"], summary["wall_time_s"]) == ("stopped", True, 300)
    assert summary["coverage"] == "6 of 8 scored, 1 failed: timeout; 1 missing"
    assert summary["failures"] == {"timeout": 1}
    assert summary["score"]["mean"] == 0.5
    assert summary["score"]["rollouts"] == 6
    low, high = summary["score"]["ci95"]
    assert 0 < low < 0.5 < high < 1
    assert summary["pass_at_k"]["pass@k"] == 100.0
    assert summary["tokens"] == {"input_tokens": 60, "output_tokens": 30, "total_tokens": 90}
    assert (summary["indexed"], summary["problem"], summary["live"]) == (True, None, None)
    json.dumps(summary)


@pytest.mark.parametrize(
    ("finished", "failed", "ended", "state"),
    [(4, [], True, "finished"), (4, [], False, "finished"), (3, [3], True, "failed"), (3, [3], False, "stopped")],
)
def test_states(tmp_path: Path, finished: int, failed: list[int], ended: bool, state: str) -> None:
    paths = write_run(tmp_path, [rollout(task, 0) for task in range(finished)], [failure(task, 0) for task in failed])
    manifest(paths, 4, 1, ended_at="2026-01-01T00:00:00.000Z" if ended else None)

    assert summary_of(paths, tmp_path)["state"] == state


def test_a_run_without_a_manifest_and_a_damaged_one(tmp_path: Path) -> None:
    paths = write_run(tmp_path, [rollout("a", 0, 0.5), rollout("b", 0, 2.5), b"{"])
    summary = summary_of(paths, tmp_path)
    assert (summary["state"], summary["expected"], summary["coverage"]) == (
        "finished",
        None,
        "2 scored; 1 damaged lines",
    )
    assert (summary["score"]["mean"], summary["tasks"], summary["damaged"]) == (1.5, 2, 1)
    paths.manifest.write_text("{")
    paths.aggregate_metrics.write_text("[5, {}]")
    run = Run(paths, tmp_path, None)
    run.refresh()
    assert "cannot be read" in run.summary()["problem"]
    assert run_details(run)["metrics"] == []
    assert run_details(run)["manifest"] is None
    paths.aggregate_metrics.write_text('[{"agent_ref": {"name": "a"}, "key_metrics": {"mean/reward": 1}}]')
    assert run_details(run)["metrics"] == [{"agent": "a", "key_metrics": {"mean/reward": 1}}]
    assert run_details(run)["files"][0]["name"] == "rollouts.jsonl"


def test_running_is_known_from_the_lock_without_touching_it(tmp_path: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0)])
    manifest(paths, 4, 1, started_at="2026-01-01T00:00:00.000Z")
    assert not is_being_written(paths)
    with RunLock(paths.lock):
        before = paths.lock.stat()
        assert is_being_written(paths)
        summary = summary_of(paths, tmp_path)
        assert summary["state"] == "running"
        assert summary["coverage"] == "1 of 4 scored; 3 to come"
        assert summary["live"] == {"rate_per_s": None, "eta_s": None, "in_flight": None}
        assert summary["wall_time_s"] > 1000
        assert paths.lock.stat() == before
    assert not is_being_written(paths)
    killed = (
        "import os, sys, pathlib, nemo_gym.runs.lock as lock; lock.RunLock(pathlib.Path(sys.argv[1])).__enter__(); "
    )
    subprocess.run([sys.executable, "-c", f"{killed}os._exit(9)", paths.lock], check=False)
    assert paths.lock.exists()
    assert not is_being_written(paths)
    paths.lock.write_text('{"pid": 1, "host": "elsewhere"}')
    assert is_being_written(paths)
    for path in (paths.lock, paths.rollouts):
        os.utime(path, (0, 0))
    assert not is_being_written(paths)


def test_runs_are_listed_newest_first() -> None:
    runs = [{"started_at": when, "path": path} for when, path in (("2026-01", "b"), (None, "c"), ("2026-02", "a"))]
    assert [run["path"] for run in newest_first(runs)] == ["a", "b", "c"]


def test_rollouts_cost_what_the_prices_of_the_run_say(tmp_path: Path) -> None:
    long = rollout(1, 0, 1.0, {"type": "message", "role": "assistant", "content": "x" * 3_000_000})
    paths = write_run(tmp_path, [rollout(0, 0), long], [failure(2, 0)])
    run = Run(paths, tmp_path, None)
    run.refresh()
    assert run.table.shown(0)["cost_usd"] is None

    prices = {"model_a": {"input": 1.0, "output": 2.0}}
    write_manifest(RunManifest(options={"prices": prices}, models=["model_a"]), paths.manifest)

    assert [run.table.shown(row)["cost_usd"] for row in range(3)] == [20 / 1e6, 20 / 1e6, None]
    run.close()
