"""Metrics, timers, advantages: what is computed about groups."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.rl import groups as advantages
from nemo_gym.rl.interfaces import Completion, PromptGroupRecord, Timer
from nemo_gym.rl.rewards import calculate_single_metric, pct


def group(*rewards: float) -> PromptGroupRecord:
    completions = [Completion([], None, False, reward) for reward in rewards]
    return PromptGroupRecord(0, [], None, {}, completions, {})


def test_a_metric_is_six_numbers_and_its_mean_is_over_the_batch() -> None:
    metric = calculate_single_metric([1.0, 2.0, 6.0], 4, "x")

    assert metric.pop("x/histogram") is not None
    assert metric.pop("x/stddev") == pytest.approx(math.sqrt(7))
    assert metric == {"x/mean": 2.25, "x/max": 6.0, "x/min": 1.0, "x/median": 2.0}


def test_the_deviation_of_one_value_is_undefined_and_of_equal_values_zero() -> None:
    assert math.isnan(calculate_single_metric([3.0], 1, "x")["x/stddev"])
    assert calculate_single_metric([0.1, 0.1, 0.1], 3, "x")["x/stddev"] == 0.0


def test_a_metric_without_values_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="'x'"):
        calculate_single_metric([], 1, "x")


PROGRAM = """
import asyncio, sys, threading, time
from nemo_gym.rl.rollout_manager import RolloutManager

class Gym:
    async def run_rollouts(self, examples, tokenizer, timer_prefix, **options):
        while not hasattr(sys.modules.get("wandb"), "made_in"):
            await asyncio.sleep(0.01)
        log = [{"role": role, "content": "", "token_ids": [1]} for role in ("user", "assistant")]
        result = {"message_log": log, "input_message_log": log[:1], "full_result": {"reward": 1.0}}
        return [result for _ in examples], {}

config = dict.fromkeys(("top_k", "stop_strings", "stop_token_ids"))
config |= {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4}
manager = RolloutManager(None, {"nemo_gym": Gym()}, 1, 9, generation_config=config, use_nemo_gym=True)
row = {"agent_ref": {"name": "a"}, "responses_create_params": {"input": "hi"}}
asyncio.run(manager.run_rollout({"idx": 0, "message_log": [], "extra_env_info": row}))
import wandb
assert threading.main_thread().name not in (wandb.imported_in, wandb.made_in), (wandb.imported_in, wandb.made_in)
"""
WANDB = """
import threading

imported_in = threading.current_thread().name

class Histogram:
    def __init__(self, *given, **more):
        pass

class Table(Histogram):
    def __init__(self, *given, **more):
        globals().setdefault("made_in", threading.current_thread().name)
"""


def test_what_metrics_want_of_wandb_is_imported_beside_the_event_loop(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_percentile_is_one_of_the_values() -> None:
    assert pct([], 95) == 0.0
    assert pct([3, 1, 2], 50) == 2.0
    assert pct(list(range(100)), 95) == 95.0
    assert pct([1, 2], 100) == 2.0


def test_a_timer_sums_its_measurements_and_refuses_nonsense() -> None:
    timer = Timer()
    for _ in range(3):
        with timer.time("step"):
            pass
    assert len(timer.get_elapsed("step")) == 3
    assert timer.reduce("step", "sum") == pytest.approx(sum(timer.get_elapsed("step")))
    assert timer.get_timing_metrics("count") == {"step": 3.0}
    assert timer.get_latest_elapsed("step") == timer.get_elapsed("step")[-1]
    timer.start("other")
    with pytest.raises(ValueError, match="'other' is running already"):
        timer.start("other")
    with pytest.raises(ValueError, match="'step' is not running"):
        timer.stop("step")
    with pytest.raises(ValueError, match="'mode' is no reduction"):
        timer.reduce("step", "mode")
    timer.reset()
    assert timer.get_timing_metrics() == {}
    timer.start("other")


def test_a_failing_block_is_measured_too() -> None:
    timer = Timer()
    with pytest.raises(KeyError), timer.time("step"):
        raise KeyError
    assert len(timer.get_elapsed("step")) == 1
    assert timer.reduce("step", "std") == 0.0


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages.group_advantages([0.0, 1.0, 0.0, 1.0], normalize=False) == [-0.5, 0.5, -0.5, 0.5]
    normalized = advantages.group_advantages(group(0.0, 1.0, 0.0, 1.0))
    assert normalized == pytest.approx([-0.8660, 0.8660, -0.8660, 0.8660], abs=1e-4)


def test_leaving_oneself_out_compares_with_the_others_only() -> None:
    found = advantages.group_advantages([0.0, 1.0, 1.0, 4.0], normalize=False, leave_one_out=True)
    assert found == pytest.approx([0 - 2, 1 - 5 / 3, 1 - 5 / 3, 4 - 2 / 3])


def test_equal_rewards_teach_nothing_and_such_groups_are_dropped() -> None:
    assert advantages.group_advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert advantages.group_advantages([1.0], leave_one_out=True) == [0.0]
    mixed, flat = group(0.0, 1.0), group(1.0, 1.0)
    assert list(advantages.with_signal([flat, mixed, group(), flat])) == [mixed]


def test_a_reward_that_is_no_number_is_refused_rather_than_averaged() -> None:
    with pytest.raises(ValueError, match="nan"):
        advantages.group_advantages([1.0, math.nan])
