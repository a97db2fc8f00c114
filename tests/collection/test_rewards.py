"""A reward that is no finite number is a failed rollout, never a score."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.jsonl import parse
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from tests.collection.conftest import Collect
from tests.collection.fakes import Answer, FakeRun, Row, keys_in, lines_in, right_away, rows_of, write_rows

NOT_FINITE = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e309",
    "-1e400",
    "null",
    '"NaN"',
    '"1.0"',
    "[1.0]",
    '{"value": 1}',
    "9" * 400,
]


def rewarding(*rewards: str, upto: int = 10) -> Answer:
    """An agent that gives each row the reward of that number, as it stands, in the first so many attempts."""

    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] >= len(rewards) or attempt > upto:
            return await right_away(row, attempt)
        return web.Response(text=f'{{"reward": {rewards[row["n"]]}, "response": {{}}}}')

    return answer


def test_a_reward_that_is_no_finite_number_is_a_failure_of_its_own_class(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = rewarding(*NOT_FINITE)
    write_rows(Path("in.jsonl"), rows_of(len(NOT_FINITE) + 1))

    done = collect("+max_attempts=2")

    assert done.exit_code == 1
    failures = lines_in(Path("out_failures.jsonl"))
    assert [line["_ng_failure_class"] for line in failures] == ["invalid_reward"] * 2 * len(NOT_FINITE)
    assert not any("reward" in line for line in failures)
    assert all("no finite number" in line["_ng_failure_message"] for line in failures)
    assert keys_in(Path("out.jsonl")) == [(len(NOT_FINITE), 0)]
    assert "invalid_reward" in done.stdout
    assert "Traceback" not in done.stderr


def test_it_is_tried_again_and_counted_like_any_other_failure(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = rewarding(*NOT_FINITE, upto=2)
    write_rows(Path("in.jsonl"), rows_of(len(NOT_FINITE)))

    assert collect("+max_attempts=3").exit_code == 0

    assert [line["reward"] for line in lines_in(Path("out.jsonl"))] == [1.0] * len(NOT_FINITE)
    assert len(lines_in(Path("out_failures.jsonl"))) == 2 * len(NOT_FINITE)


@pytest.mark.usefixtures("head_config", "quick_retries")
def test_a_run_held_in_memory_does_the_same(fake_run: FakeRun) -> None:
    fake_run.answer = rewarding(*NOT_FINITE)
    write_rows(Path("in.jsonl"), rows_of(len(NOT_FINITE) + 1))
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "alpha"}

    results = asyncio.run(
        RolloutCollectionHelper().run_from_config(RolloutCollectionConfig.model_validate({**given, "max_attempts": 1}))
    )

    assert [result.get("_ng_failure_class") for result in results] == ["invalid_reward"] * len(NOT_FINITE) + [None]
    assert keys_in(Path("out.jsonl")) == [(len(NOT_FINITE), 0)]


def test_true_false_and_no_reward_at_all_are_results(fake_run: FakeRun, collect: Collect) -> None:
    results: list[Row] = [{"reward": True}, {"reward": False}, {"reward": 7}, {"score": 1.0}]

    async def answer(row: Row, attempt: int) -> Row:
        return results[row["n"]]

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(4))

    assert collect().exit_code == 0
    assert len(lines_in(Path("out.jsonl"))) == 4


def test_a_file_that_holds_such_rewards_from_before_is_resumed_and_that_is_said(
    fake_run: FakeRun, collect: Collect
) -> None:
    write_rows(Path("in.jsonl"), rows_of(4))
    assert collect("+limit=3").exit_code == 0
    lines = Path("out.jsonl").read_text().splitlines()
    Path("out.jsonl").write_text("".join(line.replace('"reward":1.0', '"reward":null') + "\n" for line in lines[:2]))
    with Path("out.jsonl").open("a") as file:
        file.write(lines[2] + "\n")

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0
    assert "out.jsonl holds 2 rollouts whose reward is no finite number" in done.stderr
    assert len(lines_in(Path("out.jsonl"))) == 4


def test_a_result_nested_deeply_is_stored_and_costs_no_metrics(fake_run: FakeRun, collect: Collect) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        levels = [3, 200, 300, 900, 1_000][row["n"]]
        return web.Response(text='{"reward": 1.0, "detail": ' + "[" * levels + "1" + "]" * levels + "}")

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(5))

    done = collect("+num_samples_in_parallel=1")

    assert done.exit_code == 0, done.stderr
    assert [parse(line)["_ng_task_index"] for line in Path("out.jsonl").read_bytes().splitlines()] == [0, 1, 2, 3, 4]
    (asked,) = fake_run.metric_requests
    assert [record["reward"] for record in asked["verify_responses"]] == [1.0] * 5
