"""What counts as a reward, and the numbers that go with a group.

A reward is one finite number: anything else fails its group instead of being averaged away. Names and formulas of the
numbers are those that training dashboards know.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from nemo_gym.jsonl import to_line
from nemo_gym.notebooks import run_sync
from nemo_gym.rl.calls import call, gather_or_cancel, in_background
from nemo_gym.rl.failures import RolloutDataFailure
from nemo_gym.rl.interfaces import Completion, EnvironmentReturn, as_list, num_tokens, require_torch
from nemo_gym.runs.record import is_finite_number

COMPONENTS_KEY = "reward_components"
_TOKEN_METRICS = {
    "total_tokens_per_sample": "total_tokens",
    "gen_tokens_per_sample": "assistant_tokens",
    "env_tokens_per_sample": "env_tokens",
}
_RATES = {
    "truncation_rate": "truncated",
    "natural_termination_rate": "terminated",
    "max_turns_reached_rate": "max_turns_reached",
}
_TURN_LENGTHS = {
    "histogram/gen_tokens_length": "turn_gen_tokens",
    "histogram/input_tokens_length": "turn_input_tokens",
    "histogram/total_tokens_length": "turn_total_tokens",
}


def finite_reward(value: Any, whose: str) -> float:
    """The reward as a float.

    Raises:
        RolloutDataFailure: it is no finite number.
    """
    if not is_finite_number(value):
        raise RolloutDataFailure(
            f"{whose} has the reward {value!r}, which is no number to train on; "
            "a verifier that cannot judge must answer with an error, not with such a reward"
        )
    return float(value)


class Reward(NamedTuple):
    """A reward, and what it is made of where that is known."""

    total: float
    components: dict[str, float]


def reward_of_one(rewards: Any, whose: str, weights: Mapping[str, float] | None = None) -> Reward:
    """The reward in the answer to a batch of one: a tensor of shape [1], or a list with one number.

    With `weights` there may be several such rewards, by name: their weighted sum counts.

    Raises:
        AssertionError: there are several rewards for one conversation, and no weights.
        RolloutDataFailure: one is no finite number, or has no weight.
    """
    if weights is not None and isinstance(rewards, Mapping):
        components = {str(name): _only_one(values, f"{whose}, reward {name!r},") for name, values in rewards.items()}
        return Reward(weighted(components, weights, whose), components)
    return Reward(_only_one([] if isinstance(rewards, Mapping) else rewards, whose, rewards), {})


def _only_one(values: Any, whose: str, shown: Any = None) -> float:
    listed = as_list(values)
    is_one = len(listed) == 1 and not isinstance(listed[0], list)
    assert is_one, (
        f"{whose} has the rewards {values if shown is None else shown!r}; the native path takes one number per "
        "conversation: add them up in the environment, or name them and give the manager reward_weights"
    )
    return finite_reward(listed[0], whose)


def weighted(components: Mapping[str, float], weights: Mapping[str, float], whose: str) -> float:
    """The sum of rewards by their weights.

    Raises:
        RolloutDataFailure: a reward has no weight.
    """
    unknown = sorted(set(components) - set(weights))
    if unknown:
        raise RolloutDataFailure(f"{whose} has the rewards {unknown}, for which reward_weights has no weight")
    return math.fsum(weights[name] * value for name, value in components.items())


def reward_of_result(result: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> Reward:
    """The reward in an agent's answer and, if it tells, its components, which must add up to it.

    With `weights`, the weighted sum of the components counts in its place.

    Raises:
        RolloutDataFailure: it is no finite number, or its components do not add up to it.
    """
    total = finite_reward(result.get("reward"), "a result")
    told = result.get(COMPONENTS_KEY)
    if not isinstance(told, Mapping) or not told:
        return Reward(total, {})
    components = {
        str(name): finite_reward(value, f"the component {name!r} of a reward") for name, value in told.items()
    }
    together = math.fsum(components.values())
    if not math.isclose(together, total, rel_tol=1e-5, abs_tol=1e-6):
        raise RolloutDataFailure(
            f"a result has the reward {total:g}, but its {COMPONENTS_KEY} {components} add up to {together:g}"
        )
    return Reward(total if weights is None else weighted(components, weights, "a result"), components)


def calculate_rewards(batch: Mapping[str, Any], task_to_env: Mapping[str, Any]) -> EnvironmentReturn:
    """Step the environment of every conversation in a batch, one call per task, and put the answers in row order.

    `batch` has `message_log`, `task_name` and `extra_env_info`, a list each. Environments may be plain objects, have
    coroutines or be handles of actors; they are asked at the same time. Rewards are a tensor of shape [B], or one per
    name where environments answer with rewards by name.

    Raises:
        ValueError: a task has no environment.
        AssertionError: some environments answer with rewards by name, and others do not.
    """
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(batch["task_name"]):
        rows.setdefault(task, []).append(row)
    unknown = sorted(set(rows) - set(task_to_env))
    if unknown:
        raise ValueError(f"there is no environment for task {unknown[0]!r}; known tasks: {', '.join(task_to_env)}")
    answers = run_sync(_steps(batch, rows, task_to_env))
    order = [row for places in rows.values() for row in places]

    def in_order(values: Sequence[Any]) -> list[Any]:
        return [value for _, value in sorted(zip(order, values, strict=True), key=lambda pair: pair[0])]

    def column(name: str) -> list[Any]:
        given = [(getattr(answer, name), len(places)) for answer, places in zip(answers, rows.values(), strict=True)]
        return in_order([value for values, count in given for value in (values or [None] * count)])

    return EnvironmentReturn(
        observations=column("observations"),
        metadata=column("metadata"),
        next_stop_strings=column("next_stop_strings"),
        rewards=_rewards_of([answer.rewards for answer in answers], in_order),
        terminateds=_as_tensor(in_order([value for answer in answers for value in as_list(answer.terminateds)])),
        answers=column("answers"),
    )


async def _steps(
    batch: Mapping[str, Any], rows: Mapping[str, Sequence[int]], task_to_env: Mapping[str, Any]
) -> list[EnvironmentReturn]:
    def said(row: int) -> list[dict[str, Any]]:
        return [{key: message[key] for key in ("role", "content")} for message in batch["message_log"][row]]

    steps = [
        call(task_to_env[task].step, [said(row) for row in places], [batch["extra_env_info"][row] for row in places])
        for task, places in rows.items()
    ]
    return [EnvironmentReturn(*answer) for answer in await gather_or_cancel(steps)]


def _rewards_of(given: Sequence[Any], in_order: Callable[[Sequence[Any]], list[Any]]) -> Any:
    by_name = [isinstance(rewards, Mapping) for rewards in given]
    assert all(by_name) or not any(by_name), "some environments answer with rewards by name and others with numbers"
    if not any(by_name):
        return _as_tensor(in_order([value for rewards in given for value in as_list(rewards)]))
    names = {name for rewards in given for name in rewards}
    assert all(names == set(rewards) for rewards in given), f"not every environment has all of the rewards {names}"
    return {
        name: _as_tensor(in_order([value for rewards in given for value in as_list(rewards[name])]))
        for name in sorted(names)
    }


def _as_tensor(values: list[Any]) -> Any:
    return require_torch("a batch of rewards").tensor(values)


@dataclass
class Histogram:
    """The values of a distribution, where wandb's class of that name is not installed."""

    values: list[float]


@dataclass
class Table:
    """Rows under column names, where wandb's class of that name is not installed."""

    data: list[list[Any]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)


def calculate_single_metric(values: Sequence[float], batch_size: int, key: str) -> dict[str, Any]:
    """Six entries about `values`: mean (over `batch_size`, whatever their number), max, min, median, stddev, histogram.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError(f"metric {key!r} has no values")
    equal = min(values) == max(values)
    deviation = math.nan if len(values) == 1 else 0.0 if equal else statistics.stdev(values)
    return {
        f"{key}/mean": sum(values) / batch_size,
        f"{key}/max": max(values),
        f"{key}/min": min(values),
        f"{key}/median": statistics.median(values),
        f"{key}/stddev": deviation,
        f"{key}/histogram": histogram(values),
    }


def pct(values: Sequence[float], p: float) -> float:
    """The p-th percentile, as one of the values; 0 when there are none."""
    if not values:
        return 0.0
    return float(sorted(values)[min(int(len(values) * p / 100), len(values) - 1)])


def histogram(values: Sequence[float]) -> Any:
    """The distribution of the finite values, for a tracker."""
    finite = [value for value in values if math.isfinite(value)]
    wandb = _wandb()
    return Histogram(finite) if wandb is None else wandb.Histogram(finite)


def table(data: list[list[Any]], columns: list[str]) -> Any:
    """A table for a tracker."""
    wandb = _wandb()
    return Table(data, columns) if wandb is None else wandb.Table(data=data, columns=columns)


@cache
def preload_wandb() -> None:
    """Import what metrics want of wandb, in a thread and once: else the event loop stands still for two seconds."""
    if find_spec("wandb") is not None:
        in_background(lambda: (histogram([0.0]), table([["a first table imports pandas"]], ["text"])))


def _wandb() -> Any:
    """Its module, where it is installed."""
    if find_spec("wandb") is None:
        return None
    import wandb

    return wandb


def native_metrics(completions: Sequence[Completion], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a group from the native path; `samples` are its trajectories' own numbers."""
    n = len(samples)
    turns = [sample["turn_count"] for sample in samples]
    longest = [max(sample["turn_gen_tokens"], default=0) for sample in samples]
    workers: dict[int, int] = {}
    for sample in samples:
        for worker, tokens in sample["per_worker_token_counts"].items():
            workers[worker] = workers.get(worker, 0) + tokens
    metrics = {
        **calculate_single_metric([completion.reward for completion in completions], n, "total_reward"),
        "total_turns": sum(turns),
        **calculate_single_metric(turns, n, "turns_per_sample"),
        **_tail(turns, "turns_per_sample"),
    }
    for key, source in _TOKEN_METRICS.items():
        metrics |= calculate_single_metric([sample[source] for sample in samples], n, key)
    metrics |= {rate: sum(bool(sample[source]) for sample in samples) / n for rate, source in _RATES.items()}
    metrics |= {"per_worker_token_counts": workers}
    metrics |= {
        name: [length for sample in samples for length in sample[source]] for name, source in _TURN_LENGTHS.items()
    }
    metrics |= {f"max_gen_tokens_per_turn/{key}": value for key, value in _summary(longest).items()}
    metrics["mean_gen_tokens_per_sample"] = metrics["gen_tokens_per_sample/mean"]
    return metrics


def gym_metrics(completions: Sequence[Completion], agent_name: str) -> dict[str, Any]:
    """The metrics of a group from the servers' path."""
    n = len(completions)
    logs = [completion.message_log for completion in completions]
    turns = [sum(message["role"] == "user" for message in log) for log in logs]
    longest = [
        max((len(message["token_ids"]) for message in log if message["role"] == "assistant"), default=0) for log in logs
    ]
    truncated = sum(completion.truncated for completion in completions)
    metrics = {
        **calculate_single_metric([completion.reward for completion in completions], n, "total_reward"),
        **calculate_single_metric(turns, n, "turns_per_sample"),
        **_tail(turns, "turns_per_sample"),
        **calculate_single_metric([num_tokens(log) for log in logs], n, "total_tokens_per_sample"),
        **calculate_single_metric([num_tokens(log, "assistant") for log in logs], n, "gen_tokens_per_sample"),
        **calculate_single_metric(longest, n, "max_gen_tokens_per_turn"),
        "max_gen_tokens_per_turn/p95": pct(longest, 95),
        "natural_termination_rate": (n - truncated) / n,
        "truncation_rate": truncated / n,
        **_agent_metrics([completion.env_extras or {} for completion in completions], agent_name),
    }
    metrics["mean_gen_tokens_per_sample"] = metrics["gen_tokens_per_sample/mean"]
    return metrics


def _agent_metrics(results: Sequence[Mapping[str, Any]], agent_name: str) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for key in results[0]:
        values = [float(result[key]) for result in results if isinstance(result.get(key), bool | int | float)]
        if values:
            metrics |= calculate_single_metric(values, len(results), f"{agent_name}/{key}")
    rows = [[to_line(result).decode().rstrip("\n")] for result in results]
    metrics[f"{agent_name}/full_result"] = table(rows, ["Full result"])
    return metrics


def _tail(values: Sequence[float], key: str) -> dict[str, float]:
    return {f"{key}/p95": pct(values, 95), f"{key}/p99": pct(values, 99)}


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"max": max(values), "mean": statistics.fmean(values), "p95": pct(values, 95)}
