"""A run in shards, from the commands' point of view."""

import json
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun

aggregate = command_named("aggregate_rollouts")


def write_rows(count: int) -> None:
    rows = [{"responses_create_params": {"input": f"task {n}"}} for n in range(count)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_shards_are_collected_one_by_one_and_combined_when_all_are_there(
    collect: Collect, fake_run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(3)
    combine = [f"+head_server.port={fake_run.port}", "+input_glob=out-shard*.jsonl", "+output_jsonl_fpath=out.jsonl"]
    for place, says in ((1, "ng_aggregate_rollouts"), (2, "ng_aggregate_rollouts"), (4, "no rows to roll out")):
        done = collect(f"+shard={place}/4", "+num_repeats=2")
        assert (done.exit_code, says in done.stdout) == (0, True), done
    assert not Path("out-shard001of004_aggregate_metrics.json").exists()

    with pytest.raises(SystemExit) as refused:
        aggregate.run(combine)
    assert refused.value.code == 2
    assert "out-shard003of004.jsonl" in capsys.readouterr().err

    assert collect("+shard_index=2", "+num_shards=4", "+num_repeats=2").exit_code == 0
    aggregate.run([*combine, "+json=true"])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["records"], summary["missing"]) == (6, 0)
    assert sorted(fake_run.keys()) == [(task, rollout) for task in range(3) for rollout in range(2)]
    assert Path("out_aggregate_metrics.json").is_file()


def test_an_impossible_shard_is_a_mistake_that_touches_nothing(collect: Collect) -> None:
    write_rows(1)
    done = collect("+shard=5/4")

    assert done.exit_code == 2
    assert "+shard=5/4" in done.stderr
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]
