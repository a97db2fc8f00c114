"""Going on with a run, and extending it, through the command."""

import json
import os
from pathlib import Path

import pytest

from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, failing_with, keys_in, lines_in, right_away, rows_of, write_rows


def test_what_is_finished_is_not_collected_again(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(503, lambda row: row["n"] % 2 == 1)
    write_rows(Path("in.jsonl"), rows_of(6))
    assert collect("+max_attempts=1").exit_code == 1
    fake_run.answer = right_away
    fake_run.rows.clear()

    done = collect("+max_attempts=1", "+resume_from_cache=true")

    assert done.exit_code == 0
    assert sorted(fake_run.keys()) == [(1, 0), (3, 0), (5, 0)]
    assert [row["_ng_attempt_index"] for row in fake_run.rows] == [1, 1, 1]
    assert keys_in(Path("out.jsonl")) == [(n, 0) for n in range(6)]
    assert "Rollouts: 6 of 6 finished, 3 of them before" in done.stdout
    assert "(since resuming)" in done.stdout


def test_metrics_of_a_resumed_run_cover_everything_in_the_file(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(503, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(3))
    collect("+max_attempts=1")
    fake_run.answer = right_away

    collect("+max_attempts=1", "+resume_from_cache=true")

    before, after = fake_run.metric_requests
    assert [record["_ng_task_index"] for record in before["verify_responses"]] == [1, 2]
    assert [record["_ng_task_index"] for record in after["verify_responses"]] == [0, 1, 2]


def test_metrics_of_fewer_rollouts_are_out_of_date_once_a_run_goes_on(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect("+limit=1")
    fake_run.metrics_status = 500

    collect("+limit=2", "+resume_from_cache=true")

    assert len(lines_in(Path("out.jsonl"))) == 2
    assert Path("out_aggregate_metrics.json").stat().st_mtime == 0


@pytest.mark.parametrize(
    ("options", "extended", "keys"),
    [
        (["+num_repeats=1"], "+num_repeats=2", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (["+num_repeats=2", "+limit=1"], "+limit=2", [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_more_repeats_or_rows_extend_a_run(
    options: list[str], extended: str, keys: list[tuple[int, int]], fake_run: FakeRun, collect: Collect
) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect(*options)
    first = fake_run.asked["/run"]

    done = collect(*options, extended, "+resume_from_cache=true")

    assert done.exit_code == 0
    assert "Extending the run" in done.stderr
    assert keys_in(Path("out.jsonl")) == keys
    assert fake_run.asked["/run"] == len(keys)
    assert first == 2


def test_a_changed_run_is_refused_with_a_list_of_changes_and_nothing_is_touched(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect("+num_repeats=2", "+responses_create_params.temperature=0.5")
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}

    changes = ["+num_repeats_add_seed=true", "+responses_create_params.temperature=0.7"]
    done = collect("+num_repeats=2", *changes, "+resume_from_cache=true")

    assert done.exit_code == 2
    assert "num_repeats_add_seed: was False, now True" in done.stderr
    assert "responses_create_params.temperature: was 0.5, now 0.7" in done.stderr
    assert "+allow_changed_config=true" in done.stderr
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_without_a_manifest_the_rows_on_disk_are_taken_with_one_notice(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    Path("out_manifest.json").unlink()
    Path("out.jsonl").write_bytes(Path("out.jsonl").read_bytes().splitlines(keepends=True)[0])

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0
    assert done.stderr.count("out_manifest.json does not exist") == 1
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0)]


def test_a_torn_last_line_is_kept_aside_and_its_rollout_made_again(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    collect()
    whole = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(whole[:-20])
    torn = whole[:-20].rpartition(b"\n")[2]

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0
    assert "lines [3] were damaged and are now in out.jsonl.corrupt" in done.stderr
    assert Path("out.jsonl.corrupt").read_bytes() == torn + b"\n"
    assert keys_in(Path("out.jsonl")) == [(0, 0), (1, 0), (2, 0)]
    assert fake_run.asked["/run"] == 4


def test_a_finished_run_needs_no_servers_and_no_file_of_it_changes(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path().iterdir()}

    done = collect("+resume_from_cache=true", "+head_server.port=1")

    assert done.exit_code == 0
    assert "Nothing to do: 2 of 2 rollouts finished before." in done.stdout
    assert "mean/reward" in done.stdout
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path().iterdir()} == before


def test_what_was_given_up_needs_no_servers_either(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()

    done = collect("+resume_from_cache=true", "+head_server.port=1")
    retry = collect("+resume_from_cache=true", "+retry_exhausted=true", "+head_server.port=1")

    assert done.exit_code == 1
    assert "Nothing to do: 1 of 2 rollouts finished before, 1 given up." in done.stdout
    assert retry.exit_code == 2
    assert "Could not connect to the head server" in retry.stderr


@pytest.mark.parametrize("change", ["no metrics", "older metrics", "more repeats", "an unfinished rollout"])
def test_servers_are_needed_when_something_is_to_be_done(change: str, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    options = ["+resume_from_cache=true", "+head_server.port=1"]
    if change == "no metrics":
        Path("out_aggregate_metrics.json").unlink()
    elif change == "older metrics":
        os.utime("out_aggregate_metrics.json", (1, 1))
    elif change == "more repeats":
        options.append("+num_repeats=2")
    else:
        Path("out.jsonl").write_bytes(Path("out.jsonl").read_bytes().splitlines(keepends=True)[0])

    done = collect(*options)

    assert done.exit_code == 2
    assert "Could not connect to the head server" in done.stderr


def test_an_agent_that_is_gone_by_the_time_of_resuming_is_named(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(503, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))
    collect("+max_attempts=1")
    fake_run.agents = ("gamma",)

    done = collect("+max_attempts=1", "+resume_from_cache=true")

    assert done.exit_code == 2
    assert "has no agent called 'alpha'" in done.stderr
    assert len(lines_in(Path("out_failures.jsonl"))) == 1


def test_attempts_of_all_runs_count_together(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))

    collect("+max_attempts=1")
    collect("+max_attempts=3", "+resume_from_cache=true")

    failures = lines_in(Path("out_failures.jsonl"))
    assert [line.get("_ng_attempt_index") for line in failures] == [None, 1, 2]
    assert fake_run.keys().count((0, 0)) == 3


def test_failures_of_the_infrastructure_never_count_towards_the_cap(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(429, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(1))

    for _ in range(3):
        collect("+max_attempts=2", "+resume_from_cache=true")

    failures = lines_in(Path("out_failures.jsonl"))
    assert [line["_ng_counts_as_attempt"] for line in failures] == [False] * 6
    assert [line.get("_ng_attempt_index") for line in failures] == [None, 1, 2, 3, 4, 5]


def test_the_manifest_says_what_was_run_and_how_it_ended(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.config = {"policy_api_key": "planted-secret", "note": "kept"}
    fake_run.answer = failing_with(500, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))

    collect("+num_repeats=2")

    manifest = json.loads(Path("out_manifest.json").read_text())
    assert manifest["counts"] == {
        "expected": 4,
        "success": 2,
        "failed_attempts": 6,
        "discarded_attempts": 0,
        "missing": 2,
    }
    assert manifest["models"] == ["a-model"]
    assert manifest["agents"] == {"alpha": {"tasks": 2, "rollouts": 4}}
    assert manifest["options"]["num_repeats"] == 2
    assert manifest["input"]["path"].endswith("in.jsonl")
    assert len(manifest["input"]["sha256"]) == 64
    assert manifest["started_at"] <= manifest["ended_at"]
    assert manifest["config"]["note"] == "kept"
    assert "planted-secret" not in Path("out_manifest.json").read_text()
    assert manifest["command"]
    assert set(manifest["versions"]) >= {"nemo_gym", "python"}
