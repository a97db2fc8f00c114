"""What aggregating 100,000 rollouts costs, next to describing each task's rollouts with pandas.

pandas would need minutes for all tasks, so it describes a sample of them and its time is scaled by the number of tasks
(its cost per group does not depend on how many there are). Building its frame is not counted, nor does it produce
`rollout_infos`; ours is the whole call. The sample's numbers are compared, so both sides do the same work. Processor
time counts, in three rounds, so that neighbours on the machine do not. Records come in key order, as the collector
sends them; in random order memory is slower and the ratio about a third lower.
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from nemo_gym.reward_profile import AggregateMetrics, compute_aggregate_metrics, compute_pass_majority_metrics
from tests.perf.side_by_side.estimates import Target, hold

Result = TypeVar("Result")

LEAST_RATIO = 20.0
SAMPLED_GROUPS = 200
FIELDS = ("reward", "parsed", "input_tokens", "output_tokens", "total_tokens")


def verify_responses(tasks: int, rollouts: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    responses = []
    for task in range(tasks):
        for rollout in range(rollouts):
            read, written = rng.randrange(100, 4000), rng.randrange(10, 900)
            usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
            responses.append(
                {
                    "_ng_task_index": task,
                    "_ng_rollout_index": rollout,
                    "agent_ref": {"name": "agent"},
                    "reward": float(rng.random() < 0.4),
                    "parsed": rng.random() < 0.9,
                    "extracted_answer": str(rng.randrange(5)),
                    "response": {"usage": usage},
                }
            )
    return responses


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def pass_at_k(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return compute_pass_majority_metrics(tasks, answer_key="extracted_answer")[0]


def frame_of(responses: list[dict[str, Any]]) -> Any:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {**{key: value for key, value in response.items() if key != "response"}, **response["response"]["usage"]}
        for response in responses
        if response["_ng_task_index"] < SAMPLED_GROUPS
    )
    frame["parsed"] = frame["parsed"].astype(int)
    return frame


def described_by_pandas(frame: Any) -> dict[int, Any]:
    return {task: group[list(FIELDS)].describe() for task, group in frame.groupby("_ng_task_index")}


def assert_same_numbers(metrics: AggregateMetrics, described: dict[int, Any]) -> None:
    names = {"mean": "mean", "max": "max", "min": "min", "median": "50%", "std": "std"}
    for task, table in described.items():
        group = metrics.group_level_metrics[task]
        single = group["num_rollouts"] == 1
        for ours, theirs in names.items():
            for field in FIELDS:
                expected = 0.0 if ours == "std" and single else float(table[field][theirs])
                assert group[f"{ours}/{field}"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("tasks", "rollouts"), [(3125, 32), (100_000, 1)])
def test_aggregation_is_at_least_20_times_faster_than_describing_each_group_with_pandas(
    tasks: int, rollouts: int
) -> None:
    responses = verify_responses(tasks, rollouts)
    frame = frame_of(responses)
    assert_same_numbers(compute_aggregate_metrics(responses), described_by_pandas(frame))

    def pandas_over_ours() -> list[float]:
        of_sample, described = timed(lambda: described_by_pandas(frame))
        pandas_seconds = of_sample * tasks / len(described)
        seconds, _ = timed(lambda: compute_aggregate_metrics(responses))
        with_pass_at_k, _ = timed(lambda: compute_aggregate_metrics(responses, pass_at_k))
        sys.stdout.write(
            f"\n{tasks} tasks x {rollouts}: {seconds:.2f} s (with pass@k and majority@k {with_pass_at_k:.2f} s); "
            f"pandas describe per task {pandas_seconds:.0f} s, scaled from {len(described)} tasks"
        )
        return [pandas_seconds / seconds]

    hold(pandas_over_ours, Target("pandas over ours", least=LEAST_RATIO))
