"""The tail of a run: what takes longest goes first, and what is too slow is let go, recorded and made again."""

import asyncio
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.policies import FinishAt, Policy, RowOrder
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.runs.record import Row
from nemo_gym.runs.resume import Plan
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, lines_in, right_away, rows_of, write_rows
from tests.rollouts.dispatch_fakes import NO_PAUSE, Agent, now_s, refuse, run, settings
from tests.rollouts.dispatch_fakes import collect as collected

NEVER_S = 3_600.0


def slow_at(*tasks: int) -> Any:
    async def answer(row: Row, attempt: int) -> Any:
        if row["_ng_task_index"] in tasks:
            await asyncio.sleep(NEVER_S)
        return await right_away(row, attempt)

    return answer


def test_what_is_too_slow_is_let_go_named_and_made_again_on_resume(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = slow_at(3, 7)
    write_rows(Path("in.jsonl"), rows_of(20))

    done = collect("+finish_at=0.9", "+straggler_grace_s=0.2", "+fail_fast=true", "+json=true")

    said = json.loads(done.stdout)
    assert (done.exit_code, said["finished"], said["stragglers"], said["stopped"]) == (1, 18, 2, None)
    failures = lines_in(Path("out_failures.jsonl"))
    assert {(line["_ng_task_index"], line["_ng_failure_class"]) for line in failures} == {
        (3, "straggler"),
        (7, "straggler"),
    }
    assert all(line["_ng_counts_as_attempt"] is False for line in failures)
    assert "reward" not in failures[0]
    coverage = said["coverage"]["alpha"]
    assert coverage["stragglers"] == {"rollouts": 2, "tasks": 2}
    assert (coverage["failed"]["rollouts"], coverage["missing"]["rollouts"]) == (2, 0)
    assert (coverage["mean_excluding_failures"], coverage["mean_stragglers_as_zero"]) == (1.0, 0.9)

    fake_run.answer = right_away
    again = collect("+resume_from_cache=true", "+json=true", "+max_attempts=1")

    said = json.loads(again.stdout)
    assert (again.exit_code, said["finished"], said["stragglers"]) == (0, 20, 0)
    assert "stragglers" not in said["coverage"]["alpha"]
    assert len(keys_in(Path("out.jsonl"))) == 20


def test_the_summary_warns_and_shows_the_score_both_ways(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = slow_at(0)
    write_rows(Path("in.jsonl"), rows_of(10))

    done = collect("+finish_at=0.9", "+straggler_grace_s=0")

    assert "Stragglers: 1 rollouts were too slow for +finish_at and are not scored" in done.stdout
    assert "biases the score (alpha 1, with stragglers as 0 0.9)" in done.stdout
    assert "reward, stragglers as 0" in done.stdout


@pytest.mark.usefixtures("head_config", "quick_retries")
def test_the_same_from_python(fake_run: FakeRun) -> None:
    fake_run.answer = slow_at(1)
    write_rows(Path("in.jsonl"), rows_of(5))
    config = RolloutCollectionConfig(
        input_jsonl_fpath="in.jsonl",
        output_jsonl_fpath="out.jsonl",
        agent_name="alpha",
        finish_at=0.8,
        straggler_grace_s=0.1,
        order="longest_first",
    )

    results = asyncio.run(RolloutCollectionHelper().run_from_config(config))

    assert [result.get("_ng_failure_class") for result in results] == [None, "straggler", None, None, None]


def test_what_has_not_started_is_no_straggler_and_quick_ones_have_the_grace() -> None:
    async def answer(row: Row) -> Row:
        await asyncio.sleep(50.0 if row["_ng_task_index"] < 2 else 1.0)
        return {"reward": 1.0}

    rows = [{"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}} for task in range(20)]
    policy = FinishAt(0.5, 30.0, 20, 0)

    attempts = run(collected(Dispatch(rows, answer, settings(3), policies=[policy])))

    late = [attempt for attempt in attempts if attempt.failure is not None]
    assert [attempt.row["_ng_task_index"] for attempt in late] == [0, 1]
    assert len(attempts) == 20


def test_retries_are_not_waited_for_once_the_grace_is_over() -> None:
    rows = [{"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}}]
    options = settings(3, pauses=NO_PAUSE)
    policy = FinishAt(0.5, 2.5, 2, 1)

    attempts = run(collected(Dispatch(rows, Agent(refuse), options, attempts_left=lambda row: 99, policies=[policy])))

    assert attempts[-1].failure is not None
    assert attempts[-1].failure.failure_class == "straggler"
    assert attempts[-1].is_final
    assert 3 <= len(attempts) <= 6


def plan_of(rows: list[Row]) -> Plan:
    return Plan(Path("nowhere"), 3, {}, {}, rows=rows)


def repeated(tasks: int, repeats: int) -> list[Row]:
    return [
        {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": "a"}}
        for task in range(tasks)
        for repeat in range(repeats)
    ]


def sent(order: RowOrder, seconds: dict[int, float], at_once: int = 1, *others: Policy) -> list[tuple[int, int]]:
    starts: list[tuple[int, int]] = []

    async def answer(row: Row) -> Row:
        starts.append((row["_ng_task_index"], row["_ng_rollout_index"]))
        await asyncio.sleep(seconds.get(row["_ng_task_index"], 1.0))
        return {"reward": 1.0}

    run(collected(Dispatch(order, answer, settings(at_once), policies=[order, *others])))
    return starts


def test_what_took_longest_earlier_goes_first_and_what_is_not_known_before_it() -> None:
    order = RowOrder(
        plan_of(repeated(4, 1)), longest_first=True, in_waves=False, durations={0: 5.0, 1: 50.0, 2: 7.0, 9: 1.0}
    )

    assert [task for task, _ in sent(order, {})] == [3, 1, 2, 0]


def test_without_an_earlier_run_other_repeats_say_what_is_long() -> None:
    order = RowOrder(plan_of(repeated(3, 3)), longest_first=True, in_waves=False)

    starts = sent(order, {0: 1.0, 1: 9.0, 2: 5.0})

    assert starts == [(0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2), (0, 1), (0, 2)]


def test_a_task_that_has_run_longer_than_any_known_one_counts_as_the_longest() -> None:
    order = RowOrder(plan_of(repeated(2, 3)), longest_first=True, in_waves=False)

    starts = sent(order, {0: 100.0, 1: 4.0}, 2)

    assert starts[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)] or starts[:3] == [(0, 0), (1, 0), (0, 1)]
    assert len(set(starts)) == 6


def test_the_tail_is_shorter_when_the_longest_go_first() -> None:
    seconds: dict[Hashable, float] = {task: 30.0 if task >= 57 else 1.0 for task in range(60)}

    def takes(longest_first: bool) -> float:
        async def main() -> float:
            order = RowOrder(plan_of(repeated(60, 1)), longest_first=longest_first, in_waves=False, durations=seconds)
            rows = order if longest_first else repeated(60, 1)

            async def answer(row: Row) -> Row:
                await asyncio.sleep(seconds[row["_ng_task_index"]])
                return {"reward": 1.0}

            began_s = now_s()
            await collected(Dispatch(rows, answer, settings(6), policies=[order]))
            return now_s() - began_s

        return run(main())

    assert takes(True) < 0.85 * takes(False)


def test_rows_in_a_file_are_found_again_and_an_earlier_run_tells_their_durations(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        await asyncio.sleep(0.15 * row["n"])
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(4))
    collect("+num_samples_in_parallel=4")
    Path("out.jsonl").rename("earlier.jsonl")
    fake_run.rows.clear()
    fake_run.answer = right_away

    done = collect("+order=longest_first", "+durations_from=earlier.jsonl", "+num_samples_in_parallel=1")

    assert done.exit_code == 0
    assert [row["n"] for row in fake_run.rows] == [3, 2, 1, 0]
    assert sorted(keys_in(Path("out.jsonl"))) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["+straggler_grace_s=5"], "straggler_grace_s=5 has no effect without finish_at; add +finish_at=0.99"),
        (["+durations_from=x.jsonl"], "durations_from has no effect without order=longest_first"),
        (["+finish_at=1.5"], "finish_at"),
        (["+order=shortest_first"], "order"),
        (["+order=longest_first", "+durations_from=nowhere.jsonl"], "there is no such file"),
        (["+order=longest_first", "+durations_from=in.jsonl"], "none of its records says how long it took"),
        (["+stop_repeats_when=pass_rat > 1", "+num_repeats=2"], "did you mean 'pass_rate'?"),
        (["+stop_repeats_when=n > 1"], "stop_repeats_when has no effect with num_repeats=1"),
        (["+num_samples_in_parallel=auto:9-3"], "has its bounds upside down; write auto:3-9"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    fake_run: FakeRun, collect: Collect, options: list[str], says: str
) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect(*options)

    assert done.exit_code == 2
    assert says in done.stderr
    assert fake_run.rows == []
    assert not Path("out.jsonl").exists()
