"""The Python side of rollout collection: what programs import, override and replace."""

import asyncio
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import orjson
import pytest
from pydantic import BaseModel

from nemo_gym import rollout_collection
from nemo_gym.cli.command import command_named
from nemo_gym.config_types import ConfigError, ConfigPathNotFoundError
from nemo_gym.jsonl import parse_line
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.rollout_collection import (
    RolloutCollectionConfig,
    RolloutCollectionHelper,
    _failures_path_for,
    _get_max_rollout_attempts,
    _rollout_request_debug_summary,
)
from nemo_gym.server_utils import ServerClient

Row = dict[str, Any]
SECRETS = {"responses_create_params": {"input": "private words"}, "answer": "private answer"}
RESULT = {"reward": 1.0, "response": {"usage": {"abc usage": 1}}}


class Stubbed(RolloutCollectionHelper):
    """Answers rows itself, last first, and keeps what it was given."""

    async def _one(self, row: Row) -> tuple[Row, Row]:
        return row, json.loads(json.dumps(RESULT))

    def run_examples(self, examples: Iterable[Row], *args: Any, **kwargs: Any) -> Any:
        return [self._one(row) for row in reversed(list(examples))]

    async def _call_aggregate_metrics(self, results: list[Row], rows: list[Row], output_fpath: str | Path) -> None:
        _MEASURED.append((results, rows))


_MEASURED: list[tuple[list[Row], list[Row]]] = []


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", raising=False)
    _MEASURED.clear()


def write_input(*rows: Row) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(**options: Any) -> RolloutCollectionConfig:
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "my_agent", **options}
    return RolloutCollectionConfig.model_validate(given)


def preprocess(**options: Any) -> list[Row]:
    return RolloutCollectionHelper._preprocess_rows_from_config(None, config(**options))  # type: ignore[arg-type]


def lines_in(name: str) -> list[Row]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_every_name_that_programs_import_is_there() -> None:
    names = """
        SharedRolloutCollectionConfig E2ERolloutCollectionConfig RolloutCollectionConfig RolloutAggregationConfig
        RolloutCollectionHelper RolloutAggregationHelper NG_FAILURE_CLASS_KEY NG_NO_PERSIST_KEY NG_TERMINAL_KEY
        _DEFAULT_MAX_ROLLOUT_ATTEMPTS _get_max_rollout_attempts _failures_path_for _rollout_request_debug_summary
        _expand_input_glob collect_rollouts aggregate_rollouts raise_for_status
        is_global_aiohttp_client_request_debug_enabled
    """

    assert [name for name in names.split() if not hasattr(rollout_collection, name)] == []
    assert not hasattr(rollout_collection, "no_such_name")
    assert issubclass(RolloutCollectionHelper, BaseModel)
    assert issubclass(rollout_collection.RolloutAggregationHelper, BaseModel)


def test_the_commands_are_what_the_scripts_run() -> None:
    collect, aggregate = rollout_collection.collect_rollouts, rollout_collection.aggregate_rollouts
    assert (collect.name, collect.main) == ("ng_collect_rollouts", command_named("collect_rollouts").main)
    assert (aggregate.name, aggregate.main) == ("ng_aggregate_rollouts", command_named("aggregate_rollouts").main)


def test_the_debug_summary_is_the_identity_and_nothing_else() -> None:
    row = {"agent_ref": {"name": "my_agent"}, "_ng_task_index": 7, "_ng_rollout_index": 0, **SECRETS}

    assert _rollout_request_debug_summary(row) == {
        "_ng_task_index": 7,
        "_ng_rollout_index": 0,
        "agent_name": "my_agent",
    }


def test_the_mark_of_a_failed_request_has_the_status_of_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock(return_value=MagicMock(status=503))
    monkeypatch.setattr(RolloutCollectionHelper, "setup_server_client", lambda self, head_server_config=None: client)
    monkeypatch.setattr(rollout_collection, "raise_for_status", AsyncMock(side_effect=RuntimeError("without status")))
    monkeypatch.setattr(rollout_collection, "is_global_aiohttp_client_request_debug_enabled", lambda: True)

    async def first() -> None:
        await next(iter(RolloutCollectionHelper().run_examples([{"agent_ref": {"name": "my_agent"}}])))

    with pytest.raises(RuntimeError, match="without status"):
        asyncio.run(first())

    assert capsys.readouterr().out == '[rollout_collection] /run failed status=503 row={"agent_name": "my_agent"}\n'


@pytest.mark.parametrize("debugging", [True, False])
def test_a_failed_request_raises_the_original_exception_and_is_marked_when_debugging(
    debugging: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class RefusedError(Exception):
        status = 500

    refusal = RefusedError("no")
    client = MagicMock(spec=ServerClient)
    client.post = AsyncMock()
    monkeypatch.setattr(RolloutCollectionHelper, "setup_server_client", lambda self, head_server_config=None: client)
    monkeypatch.setattr(rollout_collection, "raise_for_status", AsyncMock(side_effect=refusal))
    monkeypatch.setattr(rollout_collection, "is_global_aiohttp_client_request_debug_enabled", lambda: debugging)
    row = {"agent_ref": {"name": "my_agent"}, "_ng_task_index": 7, "_ng_rollout_index": 0, **SECRETS}

    async def first() -> None:
        await next(iter(RolloutCollectionHelper().run_examples([row])))

    with pytest.raises(RefusedError) as raised:
        asyncio.run(first())

    assert raised.value is refusal
    assert raised.value.row is row  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    assert ("[rollout_collection] /run failed status=500" in printed) is debugging
    assert all((text in printed) is debugging for text in ('"_ng_task_index": 7', '"agent_name": "my_agent"'))
    assert "private" not in printed
    client.post.assert_awaited_once_with(server_name="my_agent", url_path="/run", json=row)


def test_a_prompt_config_makes_the_messages_and_leaves_the_rest_alone() -> None:
    Path("p.yaml").write_text("system: Be brief.\nuser: 'Q: {question}'\n")
    write_input({"question": "1+1?", "expected": 2, "responses_create_params": {"tools": [{"type": "t"}]}})

    (row,) = preprocess(prompt_config="p.yaml")

    assert row["responses_create_params"] == {
        "tools": [{"type": "t"}],
        "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: 1+1?"}],
    }
    assert (row["question"], row["expected"]) == ("1+1?", 2)


def test_a_prompt_config_and_an_input_of_the_row_exclude_each_other() -> None:
    Path("p.yaml").write_text("user: '{question}'\n")
    write_input({"question": "1+1?", "responses_create_params": {"input": "mine"}})

    with pytest.raises(ValueError, match="mutually exclusive"):
        preprocess(prompt_config="p.yaml")


def test_rows_are_limited_repeated_seeded_and_overridden() -> None:
    write_input(*({"responses_create_params": {"input": [], "seed_me": n, "temperature": 0.1}} for n in range(10)))

    rows = preprocess(limit=3, num_repeats=2, num_repeats_add_seed=True, responses_create_params={"temperature": 0.6})

    assert rows == [
        {
            "responses_create_params": {
                "input": [],
                "seed_me": task,
                "temperature": 0.6,
                "metadata": {"extra_body": json.dumps({"seed": rollout})},
            },
            "agent_ref": {"name": "my_agent"},
            "_ng_task_index": task,
            "_ng_rollout_index": rollout,
        }
        for task in range(3)
        for rollout in range(2)
    ]


def test_seeded_rows_satisfy_the_strict_model_of_requests() -> None:
    write_input({"responses_create_params": {"input": "a"}}, {"responses_create_params": {"input": "b"}})

    rows = preprocess(num_repeats=3, num_repeats_add_seed=True)

    params = [NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"]) for row in rows]
    assert [json.loads(given.metadata["extra_body"]) for given in params if given.metadata] == [
        {"seed": seed} for seed in (0, 1, 2, 0, 1, 2)
    ]


def test_supplied_task_indices_are_kept_and_the_next_free_one_is_given() -> None:
    row = {"responses_create_params": {"input": "same"}}
    write_input({**row, "_ng_task_index": 42}, {**row, "_ng_task_index": 99}, row)

    assert [row["_ng_task_index"] for row in preprocess()] == [42, 99, 0]


def test_results_come_back_in_task_order_and_equal_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_input(*({"responses_create_params": {"input": str(n)}} for n in range(3)))

    results = asyncio.run(Stubbed().run_from_config(config(num_repeats=2)))

    expected = [
        {**RESULT, "_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": "my_agent"}}
        for task in range(3)
        for rollout in range(2)
    ]
    assert results == expected
    assert lines_in("out.jsonl") == expected[::-1]  # as they finished
    assert len(lines_in("out_materialized_inputs.jsonl")) == 6
    assert _MEASURED[0][0] == expected
    assert [row["_ng_task_index"] for row in _MEASURED[0][1]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("resume", [False, True])
def test_a_missing_folder_of_the_output_is_made(resume: bool) -> None:
    write_input({"responses_create_params": {"input": "a"}})

    asyncio.run(Stubbed().run_from_config(config(output_jsonl_fpath="a/b/out.jsonl", resume_from_cache=resume)))

    assert sorted(path.name for path in Path("a/b").iterdir()) == [
        "out.jsonl",
        "out_failures.jsonl",
        "out_manifest.json",
        "out_materialized_inputs.jsonl",
    ]


def test_aggregation_can_be_switched_off() -> None:
    write_input({"responses_create_params": {"input": "a"}})

    results = asyncio.run(Stubbed().run_from_config(config(disable_aggregation=True)))

    assert len(results) == len(lines_in("out.jsonl")) == 1
    assert _MEASURED == []


def test_an_earlier_run_is_loaded_as_four_lists() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = [{"_ng_task_index": t, "_ng_rollout_index": r, "agent_ref": {"name": "z"}} for t, r in keys]
    Path("out_materialized_inputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = [{"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 0.5}, {**rows[0], "reward": 1.0}]
    Path("out.jsonl").write_bytes(b"".join(orjson.dumps(result) + b"\n" for result in done))

    to_run, done_rows, done_results, lines = RolloutCollectionHelper()._load_from_cache(config())

    assert to_run == [rows[1], rows[3]]
    assert done_rows == [rows[2], rows[0]]
    assert done_results == done
    assert lines == [[orjson.dumps(result)] for result in done]


@pytest.mark.parametrize(("text", "cap"), [(None, 3), ("", 3), ("5", 5), (" 4 ", 4), ("abc", 3), ("0", 3), ("-2", 3)])
def test_the_attempt_cap_of_the_environment(text: str | None, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        monkeypatch.setenv("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", text)

    assert _get_max_rollout_attempts() == cap
    assert rollout_collection._DEFAULT_MAX_ROLLOUT_ATTEMPTS == 3


@pytest.mark.parametrize("output", ["out.jsonl", "out", "out.txt"])
def test_the_sidecar_of_any_output(output: str) -> None:
    assert _failures_path_for(Path("a") / output) == Path("a/out_failures.jsonl")


def test_repeats_may_differ_by_agent() -> None:
    write_input(*({"agent_ref": {"name": name}, "responses_create_params": {"input": name}} for name in "abc"))

    with pytest.warns(UserWarning, match="ghost"):
        rows = preprocess(num_repeats={"a": 2, "_default": 1, "ghost": 9})

    assert [(row["agent_ref"]["name"], row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 1, 0),
        ("c", 2, 0),
    ]


def test_agents_without_a_number_of_repeats_are_named_together_and_once() -> None:
    names = ["c", "b", "c", "a"]
    write_input(
        *({"agent_ref": {"name": name}, "responses_create_params": {"input": str(n)}} for n, name in enumerate(names))
    )

    with pytest.raises(ValueError, match=r"\['b', 'c'\].*_default.*\['a'\]") as raised:
        preprocess(num_repeats={"a": 1})

    assert str(raised.value).count("'c'") == 1


def test_a_malformed_line_is_an_error_that_names_file_and_line() -> None:
    assert parse_line('{"a": 1}', "in.jsonl", 7) == {"a": 1}
    with pytest.raises(ConfigError, match=r"in\.jsonl, line 7: "):
        parse_line('{"a": ', "in.jsonl", 7)


def test_a_missing_input_is_an_error_that_names_file_and_option() -> None:
    with pytest.raises(ConfigPathNotFoundError, match=r"\+input_jsonl_fpath=in\.jsonl") as raised:
        preprocess()

    assert isinstance(raised.value, FileNotFoundError)


def test_unset_repeats_mean_one_and_the_upload_flag_keeps_its_former_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config(num_repeats=None).num_repeats == 1
        assert config(upload_rollouts=False).upload_rollouts_to_wandb is False
    with pytest.warns(DeprecationWarning, match="upload_rollouts"):
        assert config(upload_rollouts_to_wandb=False).upload_rollouts is False


def test_a_failure_of_somebody_elses_dispatcher_is_not_swallowed() -> None:
    class Broken(Stubbed):
        async def _one(self, row: Row) -> tuple[Row, Row]:
            raise RuntimeError("the cluster is gone")

    write_input({"responses_create_params": {"input": "a"}})

    with pytest.raises(RuntimeError, match="the cluster is gone"):
        asyncio.run(Broken().run_from_config(config()))
