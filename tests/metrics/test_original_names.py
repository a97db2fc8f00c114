"""What programs elsewhere call on the public profiler: histograms and data frames."""

from typing import Any

import pandas as pd
import pytest

from nemo_gym.reward_profile import RewardProfiler


def is_histogram(value: object) -> bool:
    from wandb import Histogram  # takes half a second

    return isinstance(value, Histogram)


def key(task: int, rollout: int) -> dict[str, int]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout}


ROWS = [{**key(task, rollout), "agent_ref": {"name": f"agent {task}"}} for task in (0, 1) for rollout in (0, 1)]
RESULTS = [
    {**key(task, rollout), "reward": rollout, "_own": 2.5, "_ng_attempt_index": 1, "response": {"usage": {"tokens": 3}}}
    for task in (0, 1)
    for rollout in (0, 1)
]


def test_profiles_have_a_histogram_of_every_number_after_its_statistics() -> None:
    groups, agents = RewardProfiler().profile_from_data(ROWS, RESULTS)

    for profile in (*groups, *agents):
        drawn = {name: value for name, value in profile.items() if name.startswith("histogram/")}
        assert list(drawn) == ["histogram/reward", "histogram/_own", "histogram/tokens"]
        assert all(is_histogram(value) and sum(value.histogram) == 2 for value in drawn.values())
        names = list(profile)
        assert names.index("histogram/reward") > names.index("std/tokens")
    assert [agent["agent_ref"] for agent in agents] == [{"name": "agent 0"}, {"name": "agent 1"}]
    assert not [
        name for entry in RewardProfiler().prepare_for_serialization(groups) for name in entry if "histo" in name
    ]


def test_numbers_whose_name_begins_with_an_underscore_count_except_our_own() -> None:
    groups, agents = RewardProfiler().profile_from_data(ROWS, RESULTS)

    assert groups[0]["mean/_own"] == agents[0]["mean/_own"] == 2.5
    assert not [name for name in (*groups[0], *agents[0]) if "/_ng_" in name]


def test_a_rollout_is_told_by_its_key_and_its_numbers() -> None:
    told = RewardProfiler().rollout_info_from_result(RESULTS[1])

    assert told == {"rollout_id": "0:1", **key(0, 1), "reward": 1, "tokens": 3, "_own": 2.5, "_ng_attempt_index": 1}
    with pytest.raises(KeyError, match="_ng_task_index"):
        RewardProfiler().rollout_info_from_result({"reward": 1})


def test_a_histogram_of_nothing_is_none() -> None:
    assert RewardProfiler().histogram(pd.Series([float("nan")])) is None
    assert sum(RewardProfiler().histogram(pd.Series([1.0, 2.0, float("nan")])).histogram) == 2


def test_data_frames_get_the_statistics_of_profiles() -> None:
    frame = pd.DataFrame({"task": [0, 0, 1], "reward": [0.0, 1.0, 1.0], "sometimes": [1.0, None, None]})

    metrics: list[dict[str, Any]] = RewardProfiler().calculate_metrics_single_df(frame.groupby("task"))

    assert [each["task"] for each in metrics] == [0, 1]
    assert metrics[0]["std/reward"] == pytest.approx(0.7071, abs=1e-4)
    assert "std/sometimes" not in metrics[0]
    assert metrics[0]["median/sometimes"] == 1.0
    assert metrics[1]["std/reward"] == 0.0
    assert "mean/sometimes" not in metrics[1]
    assert is_histogram(metrics[1]["histogram/reward"])
    assert list(RewardProfiler().describe_dataframe(frame[["reward"]]).index) == [
        *("mean", "max", "min", "median", "std", "histogram")
    ]
