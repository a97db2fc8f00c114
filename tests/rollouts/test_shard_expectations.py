import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.combine.expectations import Expectations, find_expectations
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import RecordIndex
from nemo_gym.runs.manifest import Expected, RunManifest


def row(task: Any, rollout: int, agent: str = "alpha") -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": agent}}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return path


def expectations(
    *shards: Path, manifests: dict[Path, RunManifest] | None = None, without: list[RolloutPaths] | None = None
) -> Expectations:
    index = RecordIndex(shards)
    index.read()
    return find_expectations(index, index.in_key_order(), manifests or {}, without or [])


def manifest(**agents: tuple[int, int]) -> RunManifest:
    return RunManifest(agents={name: Expected(tasks=tasks, rollouts=n) for name, (tasks, n) in agents.items()})


def test_a_shard_with_as_many_rollouts_as_its_manifest_asks_for_is_complete_without_reading_its_inputs(
    tmp_path: Path,
) -> None:
    shard = write(tmp_path / "a.jsonl", [row(0, 0), row(0, 1), row(3, 0, "beta")])
    (tmp_path / "a_materialized_inputs.jsonl").write_text("this would be an error\n")

    found = expectations(shard, manifests={shard: manifest(alpha=(1, 2), beta=(1, 1))})

    assert (found.is_known, found.missing.number) == (True, 0)
    assert found.by_agent == {"alpha": Expected(tasks=1, rollouts=2), "beta": Expected(tasks=1, rollouts=1)}


def test_materialized_inputs_say_which_rollouts_are_missing(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [row(1, 0), row(0, 1)])
    write(tmp_path / "a_materialized_inputs.jsonl", [row(task, rollout) for task in (0, 1, 2) for rollout in (0, 1)])

    found = expectations(shard)

    assert found.missing.number == 4
    assert found.missing.first == ((0, 0), (1, 1), (2, 0), (2, 1))
    assert found.of("alpha") == Expected(tasks=3, rollouts=6)


def test_shards_that_overlap_are_not_counted_twice(tmp_path: Path) -> None:
    shards = [write(tmp_path / f"{name}.jsonl", [row(0, 0), row(0, 1)]) for name in "ab"]

    found = expectations(*shards, manifests={shard: manifest(alpha=(1, 2)) for shard in shards})

    assert found.of("alpha") == Expected(tasks=1, rollouts=2)


def test_a_manifest_alone_says_how_many_are_missing_but_not_which(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [row(0, 0)])

    found = expectations(shard, manifests={shard: manifest(alpha=(3, 6), beta=(1, 2))})

    assert (found.missing.number, found.missing_unnamed) == (0, 7)
    assert found.by_agent == {"alpha": Expected(tasks=3, rollouts=6), "beta": Expected(tasks=1, rollouts=2)}


def test_without_manifest_and_inputs_nothing_is_known(tmp_path: Path) -> None:
    known = write(tmp_path / "a.jsonl", [row(0, 0)])
    unknown = write(tmp_path / "b.jsonl", [row(1, 0)])

    found = expectations(known, unknown, manifests={known: manifest(alpha=(1, 1))})

    assert not found.is_known
    assert found.of("alpha") is None


def test_everything_of_a_run_without_rollouts_is_missing(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [row(0, 0)])
    write(tmp_path / "b_materialized_inputs.jsonl", [row(1, 0), row(1, 1)])

    found = expectations(shard, manifests={shard: manifest(alpha=(1, 1))}, without=[RolloutPaths(tmp_path / "b.jsonl")])

    assert found.missing.first == ((1, 0), (1, 1))
    assert found.of("alpha") == Expected(tasks=2, rollouts=3)


def test_only_the_first_missing_rollouts_are_named(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [row(0, 0)])
    write(tmp_path / "a_materialized_inputs.jsonl", [row(task, 0) for task in range(100)])

    missing = expectations(shard).missing

    assert (missing.number, len(missing.first), missing.first[-1]) == (99, 10, (10, 0))


def test_text_indices_are_expected_and_missed_like_numbers(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [row("x", 0), row(1, 0)])
    write(tmp_path / "a_materialized_inputs.jsonl", [row("x", 0), row("x", 1), row("y", 0), row(1, 0)])

    found = expectations(shard)

    assert set(found.missing.first) == {("x", 1), ("y", 0)}
    assert found.of("alpha") == Expected(tasks=3, rollouts=4)
    assert expectations(shard, manifests={shard: manifest(alpha=(2, 2))}).of("alpha") == Expected(tasks=2, rollouts=2)


def test_unusable_input_lines_are_counted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard = write(tmp_path / "a.jsonl", [row(0, 0)])
    (tmp_path / "a_materialized_inputs.jsonl").write_text(json.dumps(row(0, 0)) + '\n{}\n{"_ng_task')

    assert expectations(shard).of("alpha") == Expected(tasks=1, rollouts=1)
    assert "2 lines do not say which rollout" in caplog.text
