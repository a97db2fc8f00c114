"""Runs that grow and shrink, and runs of a part of their input, from the commands' point of view."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.compare.measure import Wanted, measure_run
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.runs.profile import profile_run
from nemo_gym.schemas.cli_config import RewardProfileConfig
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, keys_in, lines_in, right_away, rows_of, write_rows

aggregate = command_named("aggregate_rollouts")


Key = tuple[int, int]


def _reward(task: int, rollout: int) -> float:
    return float((task * 7 + rollout * 3) % 5 < 2)


async def _always_the_same(row: Row, attempt: int) -> Row:
    """An agent whose reward depends on the rollout alone."""
    answer = await right_away(row, attempt)
    return {**answer, "reward": _reward(row["_ng_task_index"], row["_ng_rollout_index"])}


def _keys(tasks: Any, rollouts: int = 1) -> list[Key]:
    return [(task, rollout) for task in tasks for rollout in range(rollouts)]


def _metrics(path: str) -> list[Row]:
    """Without what differs between any two runs."""
    entries: list[Row] = json.loads(Path(path).read_text())
    return [{name: value for name, value in entry.items() if name != "percentiles"} for entry in entries]


def _manifest(path: str = "out_manifest.json") -> Row:
    content: Row = json.loads(Path(path).read_text())
    return content


def _aggregate(capsys: pytest.CaptureFixture[str], fake_run: FakeRun, *options: str) -> Row:
    capsys.readouterr()
    aggregate.run([f"+head_server.port={fake_run.port}", "+json=true", *options])
    summary: Row = json.loads(capsys.readouterr().out)
    return summary


def _refused(fake_run: FakeRun, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        aggregate.run([f"+head_server.port={fake_run.port}", *options])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_more_repeats_and_a_longer_input_make_exactly_what_is_missing(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = _always_the_same
    write_rows(Path("in.jsonl"), rows_of(100))
    assert collect("+num_repeats=2").exit_code == 0
    write_rows(Path("in.jsonl"), rows_of(150))

    done = collect("+num_repeats=4", "+resume_from_cache=true")

    assert done.exit_code == 0, done.stderr
    assert Counter(fake_run.keys()) == Counter(_keys(range(150), 4))
    assert keys_in(Path("out.jsonl")) == _keys(range(150), 4)
    assert "Extending the run: input: was" in done.stderr
    asked = [(each["input_rows"], each["num_repeats"], each["rollouts"]) for each in _manifest()["history"]]
    assert asked == [(100, 2, 200), (150, 4, 600)]
    assert collect("+num_repeats=4", "++output_jsonl_fpath=once.jsonl").exit_code == 0
    assert _metrics("out_aggregate_metrics.json") == _metrics("once_aggregate_metrics.json")


def test_an_input_that_grew_otherwise_is_another_one(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    collect()
    for rows in ([*rows_of(1), {"n": 9, "responses_create_params": {}}, *rows_of(9)[2:]], rows_of(2)):
        write_rows(Path("in.jsonl"), rows)
        done = collect("+resume_from_cache=true")
        assert done.exit_code == 2
        assert "input: was" in done.stderr
    write_rows(Path("in.jsonl"), rows_of(3))
    with Path("in.jsonl").open("a") as file:
        file.write(
            json.dumps({"_ng_task_index": 1, "responses_create_params": {"input": "takes a number that is taken"}})
        )
    done = collect("+resume_from_cache=true")
    assert done.exit_code == 2
    assert "would come out differently" in done.stderr
    assert fake_run.asked["/run"] == 3


def test_asking_for_less_keeps_what_there_is_and_measures_what_is_asked_for(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def fails_sometimes(row: Row, attempt: int) -> Row:
        if row["_ng_task_index"] == 8 or row["_ng_rollout_index"] == 3:
            return {"_ng_failure_class": "my_own", "_ng_failure_terminal": True}
        return await _always_the_same(row, attempt)

    fake_run.answer = fails_sometimes
    write_rows(Path("in.jsonl"), rows_of(10))
    assert collect("+num_repeats=4").exit_code == 1
    before, asked = Path("out.jsonl").read_bytes(), fake_run.asked["/run"]

    done = collect("+num_repeats=2", "+limit=6", "+resume_from_cache=true", "+json=true")

    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    finished = len(lines_in(Path("out.jsonl")))
    assert (summary["expected"], summary["finished"], summary["missing"], summary["given_up"]) == (12, 12, 0, 0)
    assert summary["no_longer_asked"] == finished - 12
    assert summary["coverage"]["alpha"]["expected"] == {"rollouts": 12, "tasks": 6}
    assert summary["coverage"]["alpha"]["failed"] == {"rollouts": 0, "tasks": 0}
    assert "28 rollouts are no longer asked for" in done.stderr
    assert (Path("out.jsonl").read_bytes(), fake_run.asked["/run"]) == (before, asked)
    assert collect("+num_repeats=2", "+limit=6", "++output_jsonl_fpath=once.jsonl").exit_code == 0
    assert _metrics("out_aggregate_metrics.json") == _metrics("once_aggregate_metrics.json")
    files = {"materialized_inputs_jsonl_fpath": "out_materialized_inputs.jsonl", "rollouts_jsonl_fpath": "out.jsonl"}
    assert profile_run(RewardProfileConfig.model_validate(files)).completion["completed_rollout_rows"] == 12
    measured = measure_run("out", [Path("out.jsonl")], Wanted(["reward"]), by_rows=True)
    assert (measured.rollouts, measured.asked, measured.failed.total(), len(measured.tasks)) == (12, 12, 0, 6)
    again = collect("+num_repeats=2", "+limit=6", "+resume_from_cache=true")
    assert (again.exit_code, "Nothing to do: 12 of 12" in again.stdout) == (0, True)
    assert f"{finished - 12} more in the file that are no longer asked for" in again.stdout


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (["+tasks=[3,10-12]"], [3, 10, 11, 12]),
        (["+tasks=10-12"], [10, 11, 12]),
        (["+tasks=3"], [3]),
        (['+where=level == "hard" and 5 < n'], [6, 9, 12]),
        (["+where=n not in [0, 1] and n < 5"], [2, 3, 4]),
        (["+shuffle_seed=3", "+tasks=[0-4]"], [0, 1, 2, 3, 4]),
        (["+tasks=[3,10-12]", '+where=level == "hard"', "+limit=1"], [3]),
    ],
)
def test_a_command_takes_only_the_tasks_that_are_chosen(
    fake_run: FakeRun, collect: Collect, options: list[str], tasks: list[int]
) -> None:
    rows = [{**row, "level": "easy" if n % 3 else "hard"} for n, row in enumerate(rows_of(13))]
    write_rows(Path("in.jsonl"), rows)

    done = collect(*options)

    assert done.exit_code == 0, done.stderr
    assert keys_in(Path("out.jsonl")) == _keys(tasks)
    assert f"Chosen: {len(tasks)} of the 13 rows of " in done.stderr
    for row in lines_in(Path("out_materialized_inputs.jsonl")):
        assert row["n"] == row["_ng_task_index"]


def test_a_selection_that_is_dropped_grows_into_the_whole(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = _always_the_same
    write_rows(Path("in.jsonl"), rows_of(9))
    assert collect("+sample=4", "+sample_seed=7").exit_code == 0
    first = set(fake_run.keys())
    assert len(first) == 4
    assert collect("+sample=6", "+sample_seed=7", "+resume_from_cache=true").exit_code == 0
    assert len(set(fake_run.keys())) == len(fake_run.keys()) == 6

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0, done.stderr
    assert "Extending the run: selection: was +sample=6 +sample_seed=7, now not set" in done.stderr
    assert Counter(fake_run.keys()) == Counter(_keys(range(9)))
    assert [each["selection"].get("sample") for each in _manifest()["history"]] == [4, 6, None]
    assert collect("++output_jsonl_fpath=once.jsonl").exit_code == 0
    assert _metrics("out_aggregate_metrics.json") == _metrics("once_aggregate_metrics.json")


def test_what_failed_is_run_elsewhere_and_merged_into_the_whole(
    fake_run: FakeRun, collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {(1, 1), (4, 0), (4, 1)}

    async def breaks(row: Row, attempt: int) -> Row:
        if (row["_ng_task_index"], row["_ng_rollout_index"]) in broken:
            return {"_ng_failure_class": "my_own", "_ng_failure_terminal": True}
        return await _always_the_same(row, attempt)

    fake_run.answer = breaks
    write_rows(Path("in.jsonl"), rows_of(6))
    assert collect("+num_repeats=2").exit_code == 1
    broken.clear()
    fake_run.rows.clear()

    done = collect("+num_repeats=2", "+only=failed", "+of=out.jsonl", "++output_jsonl_fpath=mended.jsonl", "+json=true")

    assert done.exit_code == 0, done.stderr
    assert sorted(fake_run.keys()) == [(1, 1), (4, 0), (4, 1)]
    assert json.loads(done.stdout)["coverage"]["alpha"]["expected"] == {"rollouts": 3, "tasks": 2}
    merged = _aggregate(capsys, fake_run, "+input_glob=out.jsonl,mended.jsonl", "+output_jsonl_fpath=all.jsonl")
    assert (merged["records"], merged["missing"], merged["different_duplicates"]) == (12, 0, 0)
    assert merged["coverage"]["alpha"]["expected"] == {"rollouts": 12, "tasks": 6}
    unsolved = collect("+only=unsolved", "+of=all.jsonl", "++output_jsonl_fpath=again.jsonl")
    assert unsolved.exit_code == 0, unsolved.stderr
    hard = [task for task in range(6) if not any(_reward(task, rollout) for rollout in range(2))]
    assert keys_in(Path("again.jsonl")) == _keys(hard)
    Path("all.jsonl").unlink()
    gone = collect("+only=unsolved", "+of=all.jsonl", "++output_jsonl_fpath=again.jsonl", "+resume_from_cache=true")
    assert (gone.exit_code, "Nothing to do" in gone.stdout) == (0, True)


def test_shards_of_a_selection_make_one_run_and_those_of_two_do_not(
    fake_run: FakeRun, collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(20))
    combine = ["+input_glob=out-shard*.jsonl", "+output_jsonl_fpath=out.jsonl"]
    for shard in (1, 2):
        assert collect(f"+shard={shard}/2", "+where=4 < n", "+sample=6", "+num_repeats=2").exit_code == 0

    summary = _aggregate(capsys, fake_run, *combine)

    assert (summary["records"], summary["missing"]) == (12, 0)
    assert summary["coverage"]["alpha"]["expected"] == {"rollouts": 12, "tasks": 6}
    assert len({row["n"] for row in fake_run.rows}) == 6
    assert collect("+shard=2/2", "+where=3 < n", "+sample=6", "+num_repeats=2").exit_code == 0
    said = _refused(fake_run, capsys, *combine)
    assert "their selection differs: +where=4 < n +sample=6 +sample_seed=0 in out-shard001of002.jsonl" in said


def test_shards_that_are_asked_for_less_are_measured_by_that(
    fake_run: FakeRun, collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run.answer = _always_the_same
    write_rows(Path("in.jsonl"), rows_of(8))
    for shard in (1, 2):
        assert collect(f"+shard={shard}/2", "+num_repeats=3").exit_code == 0
    for shard in (1, 2):
        done = collect(f"+shard={shard}/2", "+num_repeats=2", "+resume_from_cache=true")
        assert done.exit_code == 0, done.stderr

    summary = _aggregate(capsys, fake_run, "+input_glob=out-shard*.jsonl", "+output_jsonl_fpath=out.jsonl")

    assert (summary["records"], summary["no_longer_asked"], summary["missing"]) == (16, 8, 0)
    assert summary["coverage"]["alpha"]["expected"] == {"rollouts": 16, "tasks": 8}
    assert keys_in(Path("out.jsonl")) == _keys(range(8), 2)
    assert collect("+num_repeats=2", "++output_jsonl_fpath=once.jsonl").exit_code == 0
    assert _metrics("out_aggregate_metrics.json") == _metrics("once_aggregate_metrics.json")


@pytest.mark.usefixtures("head_config")
def test_python_programs_choose_and_shrink_as_the_command_does(fake_run: FakeRun) -> None:
    fake_run.answer = _always_the_same
    write_rows(Path("in.jsonl"), rows_of(8))

    def collect(**options: Any) -> list[Key]:
        files = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "alpha"}
        config = RolloutCollectionConfig.model_validate({**files, **options})
        results = asyncio.run(RolloutCollectionHelper().run_from_config(config))
        return [(result["_ng_task_index"], result["_ng_rollout_index"]) for result in results]

    assert collect(tasks=["2-4"], num_repeats=2) == _keys([2, 3, 4], 2)
    assert collect(tasks="3-5", num_repeats=1, resume_from_cache=True) == _keys([3, 4, 5])
    assert Counter(fake_run.keys()) == Counter([*_keys([2, 3, 4], 2), (5, 0)])
    assert len(fake_run.metric_requests[-1]["verify_responses"]) == 3
    assert _manifest()["agents"] == {"alpha": {"tasks": 3, "rollouts": 3}}


def test_servers_may_be_called_like_the_options(fake_run: FakeRun, collect: Collect) -> None:
    block = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}
    Path("mine.yaml").write_text(json.dumps({"where": block, "tasks": block, "sample": {"size": 3}, "only": {}}))
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect("+config_paths=[mine.yaml]")

    assert done.exit_code == 0, done.stderr
    assert keys_in(Path("out.jsonl")) == _keys(range(2))


def test_a_selection_that_leaves_nothing_touches_nothing(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    for options, says in (
        (["+where=n > 5"], "Error: +where=n > 5 leaves none of the 2 rows of "),
        (["+where=m > 5"], "there is no 'm'"),
        (["+tasks=[1,7]"], "in.jsonl go by 0 to 1"),
        (["+only=failed"], "+only=failed needs +of="),
    ):
        done = collect(*options)
        assert (done.exit_code, says in done.stderr) == (2, True), done.stderr
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]
