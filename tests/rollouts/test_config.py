import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from nemo_gym.config.options import meanings_of
from nemo_gym.runs.options import (
    DEFAULT_CONCURRENCY,
    Concurrency,
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    SharedRolloutCollectionConfig,
    max_attempts_from_environment,
)
from nemo_gym.runs.options.choosing import CHOOSING_OPTIONS
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig

FILES = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl"}


def _config(**options: Any) -> RolloutCollectionConfig:
    return RolloutCollectionConfig.model_validate(FILES | options)


def test_the_classes_descend_from_one_another_as_documented() -> None:
    assert issubclass(SharedRolloutCollectionConfig, BaseNeMoGymCLIConfig)
    assert issubclass(E2ERolloutCollectionConfig, SharedRolloutCollectionConfig)
    assert issubclass(RolloutCollectionConfig, SharedRolloutCollectionConfig)
    assert issubclass(RolloutAggregationConfig, BaseNeMoGymCLIConfig)


def test_only_input_and_output_are_required() -> None:
    config = _config(unrelated={"a": 1})
    assert config.model_dump() == FILES | {
        "order": "input",
        "durations_from": None,
        "finish_at": None,
        "straggler_grace_s": None,
        "stop_repeats_when": None,
        "num_samples_in_parallel": None,
        "responses_create_params": {},
        "upload_rollouts": True,
        "upload_rollouts_to_wandb": True,
        "disable_aggregation": False,
        "rollout_timeout_s": 21_600.0,
        "run_timeout_s": None,
        "max_silence_s": 1_800.0,
        "max_refused_s": 60.0,
        "max_attempts": None,
        "fail_fast": False,
        "max_failure_fraction": None,
        "json_format": False,
        "agent_name": None,
        "limit": None,
        "num_repeats": 1,
        "num_repeats_add_seed": False,
        "resume_from_cache": False,
        "retry_exhausted": False,
        "allow_changed_config": False,
        "keep_offending_rows": False,
        "prompt_config": None,
        "skills": None,
        "rollout_collection_driver": None,
        **dict.fromkeys(CHOOSING_OPTIONS),
        "shard": None,
        "shard_index": None,
        "num_shards": None,
        "executor": "local",
        "ray_address": "auto",
        "shard_resources": {"CPU": 1.0},
        "ray_runtime_env": {},
        "prices": None,
        "plan": False,
        "estimate_from": None,
        "pilot": None,
        "yes": False,
        "max_total_tokens": None,
        "max_output_tokens_total": None,
        "max_cost_usd": None,
    }


@pytest.mark.parametrize(
    "config_class",
    [SharedRolloutCollectionConfig, E2ERolloutCollectionConfig, RolloutCollectionConfig, RolloutAggregationConfig],
)
def test_every_option_is_explained(config_class: type[BaseNeMoGymCLIConfig]) -> None:
    assert set(config_class.model_fields) <= set(meanings_of(config_class))


def test_who_forgets_the_input_is_pointed_to_the_command_that_needs_none() -> None:
    assert "ng_e2e_collect_rollouts" in meanings_of(RolloutCollectionConfig)["input_jsonl_fpath"]


def test_aggregation_merges_unless_told_otherwise() -> None:
    config = RolloutAggregationConfig(input_glob="a*.jsonl", output_jsonl_fpath="out.jsonl")
    assert config.merge_shards is True


def test_the_split_is_one_of_three() -> None:
    config = E2ERolloutCollectionConfig.model_validate({"output_jsonl_fpath": "o", "split": "validation"})
    assert config.reuse_existing_data_preparation is False
    with pytest.raises(ValidationError, match="split"):
        E2ERolloutCollectionConfig.model_validate({"output_jsonl_fpath": "o", "split": "test"})


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (None, 1),
        (3, 3),
        ("3", 3),
        (3.0, 3),
        (True, 1),
        ({"a": "2"}, {"a": 2}),
        ({"a": 2.0}, {"a": 2}),
        ({}, {}),
    ],
)
def test_num_repeats_is_read_leniently(given: Any, result: Any) -> None:
    assert _config(num_repeats=given).num_repeats == result


@pytest.mark.parametrize("given", [0, -1, False])
def test_num_repeats_is_at_least_one(given: Any) -> None:
    with pytest.raises(ValidationError, match="num_repeats must be >= 1"):
        _config(num_repeats=given)


@pytest.mark.parametrize(
    ("given", "shown"), [({"a": 0, "b": -1, "c": 2}, "{'a': 0, 'b': -1}"), ({"_default": 0}, "{'_default': 0}")]
)
def test_num_repeats_of_each_agent_is_at_least_one(given: Any, shown: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _config(num_repeats=given)
    assert f"num_repeats dict values must be >= 1, got {shown}" in str(caught.value)


@pytest.mark.parametrize("given", [2.5, "x", [1], {"a": None}])
def test_num_repeats_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="num_repeats"):
        _config(num_repeats=given)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit", -1),
        ("num_samples_in_parallel", -1),
        ("num_samples_in_parallel", {"a": -1}),
        ("rollout_timeout_s", 0),
        ("run_timeout_s", -5),
        ("max_attempts", 0),
        ("max_failure_fraction", 1.5),
        ("input_jsonl_fpath", ""),
        ("output_jsonl_fpath", ""),
    ],
)
def test_impossible_values_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=option):
        _config(**{option: value})


def test_an_omegaconf_mapping_is_as_good_as_a_dict() -> None:
    merged = OmegaConf.create(
        FILES
        | {
            "temperature": 0.3,
            "num_repeats": {"a": 2},
            "responses_create_params": {"temperature": "${temperature}", "metadata": {"k": "v"}},
            "some_server": {"responses_api_agents": {"x": {"port": "???"}}},
            "agent_name": "???",
        }
    )
    config = RolloutCollectionConfig.model_validate(merged)
    assert config.num_repeats == {"a": 2}
    assert config.agent_name is None
    assert config.responses_create_params == {"temperature": 0.3, "metadata": {"k": "v"}}
    assert type(config.responses_create_params["metadata"]) is dict


def test_any_mapping_is_as_good_as_a_dict() -> None:
    assert RolloutCollectionConfig.model_validate(MappingProxyType(FILES)) == _config()


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValidationError):
        RolloutCollectionConfig.model_validate(["in.jsonl", "out.jsonl"])


def test_a_block_that_refers_to_itself_is_left_for_later() -> None:
    params = {"temperature": 0.7, "top_p": "${temperature}"}
    config = RolloutCollectionConfig.model_validate(OmegaConf.create(FILES | {"responses_create_params": params}))
    assert config.responses_create_params == params


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_the_former_name_of_the_upload_flag_works_and_warns(wrap: Any) -> None:
    with pytest.warns(DeprecationWarning, match="upload_rollouts"):
        config = RolloutCollectionConfig.model_validate(wrap(FILES | {"upload_rollouts_to_wandb": False}))
    assert config.upload_rollouts is False
    assert config.upload_rollouts_to_wandb is False


def test_no_limit_is_none_or_zero() -> None:
    assert _config(limit=0).limit is _config().limit is None
    assert _config(limit=3).limit == 3


def test_the_new_name_of_the_upload_flag_wins() -> None:
    with pytest.warns(DeprecationWarning, match="upload_rollouts"):
        assert _config(upload_rollouts_to_wandb=False, upload_rollouts=True).upload_rollouts is True


def test_the_new_name_of_the_upload_flag_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _config(upload_rollouts=False).upload_rollouts_to_wandb is False


def test_json_is_an_option_though_no_attribute() -> None:
    assert _config(json=True).json_format is True
    assert _config(json_format=True).json_format is True


@pytest.mark.parametrize(
    ("given", "concurrency"),
    [
        (None, Concurrency(total=DEFAULT_CONCURRENCY)),
        (0, Concurrency(total=None)),
        (7, Concurrency(total=7)),
        ({"a": 3, "b": 0}, Concurrency(total=None, per_agent={"a": 3, "b": None}, each_other=DEFAULT_CONCURRENCY)),
        ({"a": 3, "_default": 5}, Concurrency(total=None, per_agent={"a": 3}, each_other=5)),
        ({"_default": 0}, Concurrency(total=None)),
    ],
)
def test_how_many_rollouts_may_be_in_flight(given: Any, concurrency: Concurrency) -> None:
    assert _config(num_samples_in_parallel=given).concurrency == concurrency


def test_a_cap_per_agent_falls_back_to_the_default_entry() -> None:
    concurrency = _config(num_samples_in_parallel={"a": 3, "_default": 5}).concurrency
    assert (concurrency.cap_of("a"), concurrency.cap_of("b")) == (3, 5)


@pytest.mark.parametrize(("text", "cap"), [(None, 3), ("", 3), ("5", 5), (" 4 ", 4), ("abc", 3), ("0", 3), ("-2", 3)])
def test_the_attempt_cap_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str | None, cap: int
) -> None:
    monkeypatch.delenv("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", raising=False)
    if text is not None:
        monkeypatch.setenv("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", text)
    assert max_attempts_from_environment() == cap
    assert _config().attempt_cap == cap
    assert _config(max_attempts=9).attempt_cap == 9
    is_refused = text in ("abc", "0", "-2")
    assert ("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS" in caplog.text and repr(text) in caplog.text) is is_refused


@pytest.mark.parametrize(
    ("output", "stem"),
    [
        ("out.jsonl", "out"),
        ("a/b/out.jsonl", "a/b/out"),
        ("out", "out"),
        ("out.txt", "out"),
        ("out.v1.jsonl", "out.v1"),
    ],
)
def test_every_path_derives_from_the_output(output: str, stem: str) -> None:
    config = _config(output_jsonl_fpath=output)
    assert config.materialized_jsonl_fpath == Path(f"{stem}_materialized_inputs.jsonl")
    assert config.paths.materialized_inputs == config.materialized_jsonl_fpath
    assert config.paths.rollouts == Path(output)
    assert config.paths.failures == Path(f"{stem}_failures.jsonl")
    assert config.paths.aggregate_metrics == Path(f"{stem}_aggregate_metrics.json")
    assert config.paths.manifest == Path(f"{stem}_manifest.json")
    assert config.paths.lock == Path(f"{stem}.lock")
    assert config.paths.previous == Path(f"{stem}.previous")
    assert config.paths.rollouts_corrupt == Path(f"{stem}.jsonl.corrupt")


def test_a_glob_over_jsonl_files_finds_no_helper_file() -> None:
    paths = _config().paths
    helpers = [paths.aggregate_metrics, paths.manifest, paths.lock, paths.previous]
    helpers += [paths.rollouts_corrupt, paths.failures_corrupt, paths.materialized_inputs_corrupt]
    assert [path for path in helpers if path.match("*.jsonl")] == []


def test_scoring_again_knows_the_former_name_of_an_option() -> None:
    paths = {"rollouts_jsonl_fpath": "a.jsonl", "output_jsonl_fpath": "b.jsonl"}
    for wrap in (dict, OmegaConf.create):
        with pytest.warns(DeprecationWarning, match="upload_rollouts"):
            config = RolloutReverificationConfig.model_validate(wrap(paths | {"upload_rollouts_to_wandb": False}))
        assert config.upload_rollouts is False
    both = paths | {"upload_rollouts_to_wandb": False, "upload_rollouts": True}
    assert RolloutReverificationConfig.model_validate(both).upload_rollouts is True


def test_a_driver_does_not_go_with_ray() -> None:
    with pytest.raises(ValidationError, match="does not go with executor=ray"):
        RolloutCollectionConfig.model_validate(
            {**FILES, "rollout_collection_driver": "a:b", "executor": "ray", "num_shards": 2}
        )
