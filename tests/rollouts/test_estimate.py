"""Estimates: ranges that hold the truth as often as they say, also where a few tasks are long."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_gym.collect.estimate import OwedTask, earlier_run, forecast, owed_tasks, own_part, skewed_mean
from nemo_gym.collect.planning import spread_over
from nemo_gym.errors import ConfigError
from nemo_gym.runs.spending import BUDGETS, Meter, Samples, prices_of
from tests.collection.fakes import rows_of, write_rows

Floats = NDArray[np.float64]
TASKS, PILOT, PILOTS = 500, 20, 1_000
PRICES = {"m": {"input": 2.0, "output": 10.0}}


def record(output: int, *, task: int = 0, model: str = "m", took_s: float = 1.0) -> dict[str, object]:
    usage = {"input_tokens": 100, "output_tokens": output, "total_tokens": 100 + output}
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": 0,
        "reward": 1.0,
        "response": {"model": model, "usage": usage},
        "_ng_timing": {"duration_s": took_s},
    }


def owed(tasks: range, rollouts: int = 1) -> dict[object, OwedTask]:
    return {task: OwedTask("a", rollouts) for task in tasks}


def test_every_budget_counts_what_it_limits() -> None:
    meter = Meter(prices_of(PRICES))
    meter.add(record(50))

    assert meter.amounts(BUDGETS) == {
        "max_total_tokens": 150,
        "max_output_tokens_total": 50,
        "max_cost_usd": pytest.approx(0.0007),
    }
    with pytest.raises(KeyError):
        meter.amount("max_something_else")


@pytest.mark.parametrize(
    ("lengths", "at_least"),
    [
        (lambda draw: draw.lognormal(0, 0.5, TASKS), 0.93),
        (lambda draw: draw.lognormal(0, 1.0, TASKS), 0.92),
        (lambda draw: draw.lognormal(0, 1.3, TASKS), 0.90),
        (lambda draw: draw.exponential(1.0, TASKS), 0.93),
        (lambda draw: draw.uniform(0, 1, TASKS), 0.93),
        (lambda draw: np.where(draw.random(TASKS) < 0.2, 10.0, 1.0), 0.93),
    ],
    ids=["mild", "skewed", "very skewed", "exponential", "even", "two kinds"],
)
def test_the_range_of_a_pilot_holds_the_truth(
    lengths: Callable[[np.random.Generator], Floats], at_least: float
) -> None:
    draw, held = np.random.default_rng(21), 0
    for _ in range(PILOTS):
        of_tasks = lengths(draw)
        chosen = draw.permutation(TASKS)
        low, _, high = skewed_mean(of_tasks[chosen[:PILOT]], TASKS - PILOT)
        held += bool(low <= of_tasks[chosen[PILOT:]].mean() <= high)

    assert held / PILOTS >= at_least


def test_the_cost_of_the_whole_run_lies_in_the_range_of_a_pilot_in_9_of_10_cases() -> None:
    draw, held = np.random.default_rng(5), 0
    pilots = 300
    for _ in range(pilots):
        output = np.round(300 * draw.lognormal(0, 1, TASKS)).astype(int)
        meter = Meter(prices_of(PRICES), Samples())
        chosen = set(draw.permutation(TASKS)[:PILOT].tolist())
        for task in chosen:
            meter.add(record(int(output[task])), task, "a")
        assert meter.samples is not None
        rest = {task: OwedTask("a", 1) for task in range(TASKS) if task not in chosen}
        made = forecast(own_part(meter.samples), rest, {"cost_usd": meter.cost_usd}, 8, has_prices=True)
        assert made is not None
        truth = (TASKS * 100 * 2.0 + float(output.sum()) * 10.0) / 1e6
        held += made.amounts["cost_usd"].low <= truth <= made.amounts["cost_usd"].high

    assert held / pilots >= 0.9


def test_tasks_seen_before_are_taken_to_use_what_they_used() -> None:
    meter = Meter(None, Samples())
    for task in range(50):
        for output in (1_000 * (task + 1), 1_000 * (task + 1) + 10):
            meter.add(record(output, took_s=task), task, "a")
    assert meter.samples is not None

    made = forecast(own_part(meter.samples), owed(range(50), 2), {"output_tokens": 5.0}, 10, has_prices=False)

    assert made is not None
    low, value, high = made.amounts["output_tokens"]
    assert value == pytest.approx(2 * sum(1_000 * (task + 1) + 5 for task in range(50)) + 5)
    assert high - low < 0.001 * value  # rollouts of one task hardly differ
    assert made.seconds is not None
    assert made.seconds.value == pytest.approx(2 * sum(range(50)) / 10)
    assert "cost_usd" not in made.amounts


def test_failed_attempts_are_part_of_what_a_task_takes() -> None:
    meter = Meter(None, Samples())
    for task in range(5):
        meter.add(record(100), task, "a")
        failed = {"_ng_partial_response": record(300)["response"]}
        meter.add(failed, task, "a", success=False)
    assert meter.samples is not None

    made = forecast(own_part(meter.samples), owed(range(5, 15)), {}, None, has_prices=False)

    assert made is not None
    assert made.still["output_tokens"].value == pytest.approx(10 * 400)


def test_tasks_of_an_agent_are_like_others_of_that_agent() -> None:
    meter = Meter(None, Samples())
    for task in range(10):
        meter.add(record(100), task, "short")
        meter.add(record(10_000), 100 + task, "long")
    assert meter.samples is not None
    tasks = {task: OwedTask("short" if task < 1_000 else "rare", 1) for task in range(990, 1_010)}

    made = forecast(own_part(meter.samples), tasks, {}, None, has_prices=False)

    assert made is not None
    assert made.still["output_tokens"].value == pytest.approx(10 * 100 + 10 * 5_050)


def test_too_little_makes_no_estimate() -> None:
    meter = Meter(None, Samples())
    meter.add(record(100), 0, "a")
    assert meter.samples is not None

    assert forecast(own_part(meter.samples), owed(range(9)), {}, None, has_prices=False) is None


def test_equal_values_have_no_width_and_others_are_never_below_zero() -> None:
    assert skewed_mean([3.0, 3.0], 10) == (3.0, 3.0, 3.0)
    low, mean, high = skewed_mean([0.0, 0.0, 0.0, 100.0], 1_000)
    assert (low, mean) == (0.0, 25.0)
    assert high > 100
    assert math.isfinite(high)


def test_tasks_of_an_earlier_run_are_found_by_content_else_by_number(tmp_path: Path) -> None:
    rows = [{**row, "_ng_task_index": task, "_ng_rollout_index": 0} for task, row in enumerate(rows_of(4))]
    earlier = write_rows(tmp_path / "earlier.jsonl", [record(10 ** (task + 1), task=task) for task in range(4)])
    write_rows(tmp_path / "earlier_materialized_inputs.jsonl", rows)
    turned = [{**row, "_ng_task_index": 3 - task} for task, row in enumerate(rows)]
    tasks = owed_tasks(turned[:1], with_content=True)

    source = earlier_run(earlier, tasks, None)
    made = forecast(source, tasks, {}, None, has_prices=False)

    assert "1 of 1 tasks matched by what was asked" in source.text
    assert made is not None
    assert made.still["output_tokens"].value == 10

    others = owed_tasks([{"_ng_task_index": 2, "_ng_rollout_index": 0, "other": True}], with_content=True)
    source = earlier_run(earlier, others, None)
    made = forecast(source, others, {}, None, has_prices=False)

    assert "by their number in the input" in source.text
    assert made is not None
    assert made.still["output_tokens"].value == 1_000


def test_an_earlier_run_with_another_model_is_priced_as_the_one_asked_for_or_not_at_all(tmp_path: Path) -> None:
    earlier = write_rows(tmp_path / "earlier.jsonl", [record(1_000, task=task, model="cheap") for task in range(4)])

    def cost_of(*configured: str) -> float | None:
        tasks = owed(range(4))
        made = forecast(earlier_run(earlier, tasks, prices_of(PRICES, configured)), tasks, {}, None, has_prices=True)
        assert made is not None
        return made.amounts["cost_usd"].value if "cost_usd" in made.amounts else None

    assert cost_of("m") == pytest.approx(4 * (100 * 2.0 + 1_000 * 10.0) / 1e6)
    assert cost_of() is None


def test_a_file_that_holds_no_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"estimate_from=.*gone\.jsonl is not there"):
        earlier_run(tmp_path / "gone.jsonl", {}, None)
    data = write_rows(tmp_path / "data.jsonl", rows_of(3))
    with pytest.raises(ConfigError, match="is a data set"):
        earlier_run(data, {}, None)


def test_pilot_tasks_are_spread_over_the_input_and_always_the_same() -> None:
    chosen = spread_over(range(500), 20)

    assert chosen == spread_over(range(500), 20) == sorted(set(chosen))
    assert [task // 25 for task in chosen] == list(range(20))
    assert spread_over(range(5), 20) == list(range(5))
