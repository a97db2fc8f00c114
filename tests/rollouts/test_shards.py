from pathlib import Path

import pytest

from nemo_gym.combine.shards import ShardFiles, _expand_input_glob, find_shards
from nemo_gym.errors import ConfigError
from nemo_gym.runs.options import RolloutAggregationConfig


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(input_glob: str, output: str = "merged.jsonl") -> ShardFiles:
    return find_shards(RolloutAggregationConfig(input_glob=input_glob, output_jsonl_fpath=output))


def names(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


@pytest.mark.parametrize(
    ("input_glob", "expected"),
    [
        ("r-c*.jsonl", ["r-c0", "r-c0_failures", "r-c0_materialized_inputs", "r-c1"]),
        ("r-c1.jsonl,r-c*.jsonl", ["r-c1", "r-c0", "r-c0_failures", "r-c0_materialized_inputs"]),
        (",r-c1.jsonl,,", ["r-c1"]),
        (" r-c1.jsonl , r-c0.jsonl ", ["r-c1", "r-c0"]),
        ("nothing*", []),
    ],
)
def test_patterns_expand_in_their_order_sorted_within_each_and_without_repetition(
    tmp_path: Path, input_glob: str, expected: list[str]
) -> None:
    touch(tmp_path, "r-c1.jsonl", "r-c0_materialized_inputs.jsonl", "r-c0_failures.jsonl", "r-c0.jsonl")

    assert _expand_input_glob(input_glob) == [f"{stem}.jsonl" for stem in expected]


def test_a_name_with_brackets_in_it_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "run[1].jsonl")

    assert names(found("run[1].jsonl").shards) == ["run[1].jsonl"]


def test_what_lies_beside_shards_is_no_shard(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "r.jsonl",
        "r_failures.jsonl",
        "r_materialized_inputs.jsonl",
        "r_manifest.json",
        "r_aggregate_metrics.json",
        "r_reward_profiling.jsonl",
        "r_selected.jsonl",
        "r_agent_metrics.json",
        "r_reward_profile.html",
        "r.lock",
        "r.jsonl.corrupt",
        "r.jsonl.tmp",
        "r.previous/r.jsonl",
    )

    files = found("r*")

    assert names(files.shards) == ["r.jsonl"]
    assert len(files.excluded) == 12
    assert dict(files.excluded)[Path("r.previous")] == "it is not a file"


def test_an_earlier_output_is_not_merged_into_itself(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "merged.jsonl", "merged_failures.jsonl")

    files = found("*.jsonl")

    assert names(files.shards) == ["a.jsonl"]
    assert dict(files.excluded)[Path("merged.jsonl")] == "it is the output"


def test_an_output_that_is_named_itself_is_an_input(tmp_path: Path) -> None:
    touch(tmp_path, "run.jsonl")

    assert names(found("run.jsonl", "run.jsonl").shards) == ["run.jsonl"]


def test_one_file_under_two_names_counts_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")

    assert names(found("*.jsonl, ./a.jsonl").shards) == ["a.jsonl"]


def test_no_match_is_an_error_that_names_the_pattern_and_what_was_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "r_failures.jsonl")

    with pytest.raises(FileNotFoundError, match=r"No shards matched input_glob='x\*'") as error:
        found("x*")
    assert isinstance(error.value, ConfigError)
    with pytest.raises(FileNotFoundError, match=r"No shards matched.*r_failures\.jsonl \(files that end in"):
        found("r*")


def test_a_run_that_has_inputs_but_no_rollouts_is_noticed(tmp_path: Path) -> None:
    touch(tmp_path, "r0.jsonl", "r0_materialized_inputs.jsonl", "r1_materialized_inputs.jsonl")

    assert [paths.rollouts.name for paths in found("r*.jsonl").without_rollouts] == ["r1.jsonl"]
