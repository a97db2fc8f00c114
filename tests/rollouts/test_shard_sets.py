"""What the aggregate command says about shards that do not make up one run, and what it makes of those that do."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.combine.aggregation import AggregationSummary, RolloutAggregationHelper
from nemo_gym.combine.shard_metrics import Hooks
from nemo_gym.combine.shards import ShardSetError
from nemo_gym.errors import ConfigError
from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.runs.options import RolloutAggregationConfig, RolloutCollectionConfig
from nemo_gym.runs.record import Result
from nemo_gym.runs.run import open_run

TASKS = 7


class Source:
    def hooks_of(self, agent: str) -> Hooks | None:
        return Hooks()

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        return compute_aggregate_metrics(list(records)).model_dump()


def aggregate(input_glob: str = "out-shard*.jsonl", **options: Any) -> AggregationSummary:
    given = {"input_glob": input_glob, "output_jsonl_fpath": "merged.jsonl", "offline": True, **options}
    config = RolloutAggregationConfig.model_validate(given)
    return asyncio.run(RolloutAggregationHelper(loader=Source).aggregate(config))


@pytest.fixture(autouse=True)
def _rows() -> None:
    rows = [{"responses_create_params": {"input": f"task {n}"}} for n in range(TASKS)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(shard: str | None, output: str = "out.jsonl", reward: float = 1.0, **options: Any) -> Path:
    """Collect one shard from an agent that answers at once; task 3 fails first."""
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": output, "agent_name": "a", "num_repeats": 2}
    config = RolloutCollectionConfig.model_validate({**given, "shard": shard, **options})
    Path(output).parent.mkdir(exist_ok=True)
    with open_run(config) as run:
        plan = run.plan()
        with run.store as store:
            for row in plan:
                if row["_ng_task_index"] == 3:
                    store.append(row, {"_ng_failure_class": "connect", "_ng_failure_message": "gone"})
                store.append(row, {"reward": reward * (row["_ng_task_index"] % 2)})
    return config.paths.rollouts


def test_all_shards_together_are_the_run_in_one_piece() -> None:
    whole = run(None, "whole.jsonl")
    for place in (3, 1, 2):
        run(f"{place}/3")
    summary = aggregate()

    assert (summary.records, summary.missing, summary.remarks()) == (2 * TASKS, 0, [])
    sorted_whole = sorted(whole.read_text().splitlines(), key=lambda line: json.loads(line)["_ng_task_index"])
    assert Path("merged.jsonl").read_text().splitlines() == sorted_whole
    for ending in ("_materialized_inputs.jsonl", "_failures.jsonl"):
        assert Path(f"merged{ending}").read_text() == Path(f"whole{ending}").read_text()


def test_a_shard_run_twice_is_refused_unless_it_is_said_which_one_counts() -> None:
    run("1/2"), run("2/2"), run("2/2", "again/out.jsonl", reward=0.5)
    both = "out-shard*.jsonl,again/out-shard*.jsonl"

    with pytest.raises(ShardSetError) as refused:
        aggregate(both)
    assert "shard 2/2: out-shard002of002.jsonl, again/out-shard002of002.jsonl" in str(refused.value)
    assert not Path("merged.jsonl").exists()
    assert aggregate(both, on_duplicate="first").different_duplicates > 0


def test_a_missing_shard_is_refused_by_the_name_it_would_have() -> None:
    run("1/3"), run("3/3")

    with pytest.raises(ShardSetError) as refused:
        aggregate()
    assert "1 of 3 shards of this run are missing: out-shard002of003.jsonl" in str(refused.value)
    assert "out-shard001of003.jsonl, out-shard003of003.jsonl" in str(refused.value)
    summary = aggregate(allow_missing_shards=True)
    assert summary.as_json()["missing_shards"] == ["out-shard002of003.jsonl"]
    assert summary.as_json()["missing"] is None
    assert not Path("merged_materialized_inputs.jsonl").exists()


def test_shards_without_manifests_are_known_by_their_names() -> None:
    run("1/3").with_name("out-shard001of003_manifest.json").unlink()

    with pytest.raises(ShardSetError, match=r"2 of 3 shards .* missing: out-shard002of003.jsonl"):
        aggregate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"responses_create_params": {"temperature": 0.5}}, "temperature: not set in"),
        ({"limit": 5}, "their number of rows differs: 7 in"),
        ({"shard": "2/4"}, "is one of 4"),
    ],
)
def test_shards_of_different_configurations_are_refused_with_their_names(options: dict[str, Any], says: str) -> None:
    first = run("1/2")
    second = run(**{"shard": "2/2", **options})

    with pytest.raises(ConfigError, match=says) as refused:
        aggregate()
    assert str(first) in str(refused.value)
    assert str(second) in str(refused.value)


def test_shards_of_different_inputs_are_refused_with_their_names() -> None:
    run("1/2")
    with Path("in.jsonl").open("a") as file:
        file.write(json.dumps({"responses_create_params": {"input": "one more"}}) + "\n")
    run("2/2")

    named = r"in\.jsonl \(\d+ bytes\) in out-shard00"
    with pytest.raises(ShardSetError, match=rf"their input differs: .*{named}1of002.jsonl; .*{named}2of002.jsonl"):
        aggregate()
    assert aggregate(allow_changed_config=True).records == 2 * (TASKS + 1)


def test_a_run_beside_the_output_keeps_its_own_files() -> None:
    run(None, "merged.jsonl")
    before = Path("merged_failures.jsonl").read_text()
    run("1/1")
    aggregate("out-shard*.jsonl,merged.jsonl")

    assert Path("merged_failures.jsonl").read_text() == before
