"""Cutting a run into shards: which tasks a shard has, what it is called, and how it is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.rows import preprocess
from nemo_gym.runs.run import open_run


def config(**options: Any) -> RolloutCollectionConfig:
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "a", **options}
    return RolloutCollectionConfig.model_validate(given)


def write_rows(*rows: dict[str, Any]) -> None:
    lines = [json.dumps({"responses_create_params": {"input": "hi"}, **row}) + "\n" for row in rows]
    Path("in.jsonl").write_text("".join(lines))


def keys(rows: list[dict[str, Any]]) -> list[tuple[Any, int]]:
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows]


@pytest.mark.parametrize(
    "options",
    [{"shard": "3/16"}, {"shard_index": 2, "num_shards": 16}, {"shard": " 3 / 16", "shard_index": 2, "num_shards": 16}],
)
def test_a_shard_is_asked_for_by_its_place_or_by_its_index(options: dict[str, Any]) -> None:
    assert config(**options).chosen_shard == Shard(2, 16)
    assert config(**options).paths.rollouts == Path("out-shard003of016.jsonl")
    assert config(**options).disable_aggregation


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard": "0/4"}, "counted from 1"),
        ({"shard": "5/4"}, "shard=5/4"),
        ({"shard": "two of four"}, "such as"),
        ({"shard": "1/4", "shard_index": 1}, "contradicts"),
        ({"shard": "1/4", "num_shards": 5}, "contradicts"),
        ({"shard_index": 1}, "needs .num_shards"),
        ({"num_shards": 4}, r"shard=1/4"),
        ({"shard_index": 4, "num_shards": 4}, "there are 4 shards"),
    ],
)
def test_what_names_no_shard_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(**options)


def test_every_task_is_in_one_shard_with_all_its_repeats_and_keeps_its_index() -> None:
    write_rows(*({"n": n % 5} for n in range(7)), {"_ng_task_index": 90}, {"_ng_task_index": "odd"}, {"n": "beyond"})
    whole = keys(preprocess(config(num_repeats=2, limit=9)))
    shards = [keys(preprocess(config(num_repeats=2, limit=9, shard=f"{n}/3"))) for n in (1, 2, 3)]

    assert sorted(map(str, whole)) == sorted(str(key) for shard in shards for key in shard)
    for index, shard in enumerate(shards):
        assert all(task == "odd" or task % 3 == index for task, _ in shard)
    assert sum(any(task == "odd" for task, _ in shard) for shard in shards) == 1


def test_the_manifest_says_which_shard_it_is_and_whether_another_one_is_resumed() -> None:
    write_rows({"n": 1}, {"n": 2})
    with open_run(config(shard="2/2")) as run:
        run.store.paths.rollouts.touch()
    manifest = read_manifest(Path("out-shard002of002_manifest.json"))
    assert manifest is not None
    assert manifest.shard == Shard(1, 2)
    assert manifest.expected_rollouts == 1
    with open_run(config(shard_index=1, num_shards=2, resume_from_cache=True)) as run:
        assert run.is_resumed
    for path in Path().glob("out-shard002of002*"):
        path.rename(path.name.replace("002of002", "001of003"))
    with (
        pytest.raises(Exception, match="shard: was 2/2, now 1/3"),
        open_run(config(shard="1/3", resume_from_cache=True)),
    ):
        pass


def test_shards_of_the_one_command_run_prepare_apart_and_reuse_together() -> None:
    given = {"split": "train", "output_jsonl_fpath": "r/out.jsonl", "shard": "1/2"}
    alone = E2ERolloutCollectionConfig.model_validate(given)
    reusing = E2ERolloutCollectionConfig.model_validate({**given, "reuse_existing_data_preparation": True})

    assert alone.prepared_dirpath == Path("r/out-shard001of002/preprocessed_datasets")
    assert reusing.prepared_dirpath == Path("r/out/preprocessed_datasets")
    assert reusing.for_rows_in(Path("x")).paths.rollouts == Path("r/out-shard001of002.jsonl")


@pytest.mark.parametrize("name", ["out-shard003of016.jsonl", "a-shard1-shard003of016.txt"])
def test_a_file_says_by_its_name_which_shard_it_is(name: str) -> None:
    assert Shard.of_file(Path("folder") / name) == Shard(2, 16)


@pytest.mark.parametrize("name", ["out.jsonl", "out-shard000of016.jsonl", "out-shard017of016.jsonl", "shard3of16"])
def test_other_files_are_no_shards(name: str) -> None:
    assert Shard.of_file(Path(name)) is None
