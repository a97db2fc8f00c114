"""What trainers get, to the type: shapes and kinds of everything that the two paths and their helpers return."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import (
    FailureClass,
    GenerationUnavailable,
    GymTransportError,
    NoHealthyShards,
    RolloutDataFailure,
    RolloutInfraFailure,
    RolloutOutcome,
    RolloutRedispatchExhausted,
    RolloutRetryPolicy,
    RolloutStall,
    RolloutStats,
    RolloutTimeout,
    RolloutTimeouts,
    classify_rollout_failure,
)
from nemo_gym.rl.interfaces import Completion, DatumSpec, EnvironmentReturn, GenerationConfig, PromptGroupRecord, Timer
from nemo_gym.rl.rewards import calculate_rewards
from nemo_gym.rl.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl, RolloutManager, TokenizerType

torch = pytest.importorskip("torch", reason="tensors are compared: install the extra `rl` (make test-rl)")

SIX = ("mean", "max", "min", "median", "stddev", "histogram")
CONFIG: GenerationConfig = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "max_new_tokens": 9,
    "stop_strings": None,
    "stop_token_ids": None,
}


def six(*keys: str) -> set[str]:
    return {f"{key}/{number}" for key in keys for number in SIX}


class Policy:
    """Says `ok` to everything."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        prompt = data["input_ids"]
        said = torch.tensor([[ord("o"), ord("k")]], dtype=torch.int32)  # as some engines have them
        yield (
            0,
            {
                "output_ids": torch.cat([prompt, said], dim=1),
                "logprobs": torch.cat([torch.zeros(prompt.shape), torch.tensor([[-0.5, -0.5]])], dim=1).double(),
                "unpadded_sequence_lengths": data["input_lengths"] + 2,
                "truncated": torch.tensor([False]),
            },
        )


class Environment:
    """Ends at once, with a reward that is an integer."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        return EnvironmentReturn(
            [{"role": "environment", "content": "!"} for _ in metadata],
            [{"seen": True} for _ in metadata],
            None,
            torch.tensor([1 for _ in metadata]),
            torch.tensor([True for _ in metadata]),
        )


def native_sample() -> DatumSpec:
    log = [{"role": "user", "content": "x", "token_ids": torch.tensor([ord("x")])}]
    return {"idx": 5, "message_log": log, "extra_env_info": {"a": 1}, "task_name": "t"}


def native(tokenizer: TokenizerType) -> AsyncRolloutImpl:
    return AsyncRolloutImpl(tokenizer, {"t": Environment()}, 2, 50, Policy())


def gym_impl(gym: NemoGym, tokenizer: TokenizerType, **options: Any) -> AsyncNemoGymRolloutImpl:
    return AsyncNemoGymRolloutImpl(tokenizer, {"nemo_gym": gym}, 2, 50, CONFIG, **options)


def check_completion(completion: Completion, generated: list[int]) -> None:
    assert type(completion) is Completion
    assert type(completion.message_log) is list
    assert type(completion.truncated) is bool
    assert type(completion.reward) is float
    for message in completion.message_log:
        assert type(message) is dict
        assert (type(message["role"]), type(message["content"])) == (str, str)
        assert (message["token_ids"].dtype, message["token_ids"].ndim) == (torch.int64, 1)
        if message["role"] == "assistant":
            assert message["generation_logprobs"].dtype == torch.float32
            assert message["generation_logprobs"].shape == message["token_ids"].shape
            assert message["token_ids"].tolist() == generated
        else:
            assert "generation_logprobs" not in message


def test_a_group_of_the_native_path(tokenizer: Any) -> None:
    sample = native_sample()
    record = asyncio.run(native(tokenizer).run_rollout(sample))

    assert type(record) is PromptGroupRecord
    assert (record.prompt_idx, record.metadata) == (5, {"task_name": "t"})
    assert record.prompt is sample["message_log"]
    assert record.extra_env_info is sample["extra_env_info"]
    assert len(record.completions) == 2
    for completion in record.completions:
        check_completion(completion, [ord("o"), ord("k")])
        assert completion.env_extras == {"a": 1}
    lengths = {f"histogram/{name}_tokens_length" for name in ("gen", "input", "total")}
    rates = {"truncation_rate", "natural_termination_rate", "max_turns_reached_rate"}
    assert set(record.rollout_metrics) == {
        *six("total_reward", "turns_per_sample", "total_tokens_per_sample", "gen_tokens_per_sample"),
        *six("env_tokens_per_sample"),
        *("turns_per_sample/p95", "turns_per_sample/p99", "total_turns", "per_worker_token_counts"),
        *(f"max_gen_tokens_per_turn/{number}" for number in ("max", "mean", "p95")),
        *rates,
        *lengths,
        "mean_gen_tokens_per_sample",
        *(f"timing/rollout/{name}" for name in ("total", "run_rollouts", "aggregate_metrics")),
    }
    assert all(type(record.rollout_metrics[name]) is float for name in rates)
    assert all(type(record.rollout_metrics[name]) is list for name in lengths)
    assert record.rollout_metrics["per_worker_token_counts"] == {}


def test_the_steps_of_the_native_path(tokenizer: Any) -> None:
    impl, sample = native(tokenizer), native_sample()
    completion, numbers = asyncio.run(impl._run_single_rollout(sample, 0))
    check_completion(completion, [ord("o"), ord("k")])
    assert type(numbers) is dict

    message, input_lengths, facts = asyncio.run(impl._generate_response(sample["message_log"], None))
    assert (message["role"], message["content"]) == ("assistant", "ok")
    assert (input_lengths.dtype, input_lengths.tolist()) == (torch.int32, [1])
    assert facts["truncated"] is False

    metrics = impl._aggregate_rollout_metrics([completion], [numbers])
    assert metrics["total_reward/mean"] == 1.0
    assert math.isnan(metrics["total_reward/stddev"]), "of one value there is none"


def test_a_group_of_the_servers_path(attached: Any, rows: Any, result_of: Any, tokenizer: Any) -> None:
    impl = gym_impl(attached(result_of), tokenizer)
    sample: DatumSpec = {"idx": 8, "message_log": [], "extra_env_info": rows(1)[0]}
    record = asyncio.run(impl.run_rollout(sample))

    assert type(record) is PromptGroupRecord
    assert (record.prompt_idx, record.metadata) == (8, {"task_name": "nemo_gym"})
    assert [message["token_ids"].tolist() for message in record.prompt] == [[104, 105]]
    assert record.prompt[0]["token_ids"].dtype == torch.int64
    for completion in record.completions:
        check_completion(completion, [121, 101, 115])
        assert [message["role"] for message in completion.message_log] == ["user", "assistant"]
        said = completion.message_log[1]
        assert (said["is_invalid_tool_call"], said["has_malformed_thinking"]) == (False, False)
        assert completion.env_extras is not None
        (item,) = completion.env_extras["response"]["output"]
        assert (item["prompt_str"], item["generation_str"]) == ("hi", "yes")
        assert not {"prompt_token_ids", "generation_token_ids", "generation_log_probs"} & set(item)
    agent = "some_agent"
    assert set(record.rollout_metrics) == {
        *six("total_reward", "turns_per_sample", "total_tokens_per_sample", "gen_tokens_per_sample"),
        *six("max_gen_tokens_per_turn", f"{agent}/reward"),
        *("turns_per_sample/p95", "turns_per_sample/p99", "max_gen_tokens_per_turn/p95", f"{agent}/full_result"),
        *("natural_termination_rate", "truncation_rate", "mean_gen_tokens_per_sample"),
        *(f"timing/rollout/{name}" for name in ("total", "run_rollouts", "compute_metrics")),
        *(f"timing/rollout/{name}" for name in ("await_results", "postprocess_results", "postprocess_results_pct")),
        *("gym_row_redispatches", "lp_nan_retries"),
    }


def test_the_steps_of_the_servers_path(attached: Any, rows: Any, result_of: Any, tokenizer: Any) -> None:
    impl = gym_impl(attached(result_of), tokenizer)
    sample: DatumSpec = {"idx": 8, "message_log": [], "extra_env_info": rows(1)[0]}
    inputs = impl._build_inputs(sample)
    assert [row["_rowidx"] for row in inputs] == [0, 1]
    assert inputs[0]["responses_create_params"]["max_output_tokens"] == 9

    timer = Timer()
    answer = asyncio.run(impl._run_rollouts(inputs, timer, "timing/rollout"))
    completions, metrics = answer
    assert type(answer) is tuple
    assert [type(completion) for completion in completions] == [Completion, Completion]
    assert type(metrics) is dict
    measured = ("gym_row_redispatches", "timing/rollout/await_results", "timing/rollout/postprocess_results")
    assert all(type(metrics[name]) is float for name in measured)
    assert timer.get_timing_metrics().keys() == {"timing/rollout/run_rollouts", "timing/rollout/compute_metrics"}
    computed = impl._compute_rollout_metrics(completions, "some_agent")
    assert computed["some_agent/reward/mean"] == metrics["some_agent/reward/mean"] == 1.0
    assert computed["total_reward/mean"] == metrics["total_reward/mean"] == 1.0


def test_post_processing_returns_tensors_and_the_first_message_itself(attached: Any, rows: Any, result_of: Any) -> None:
    class Tokens:
        def batch_decode(self, sequences: Any) -> list[str]:
            return ["text" for _ in sequences]

    class Bare:
        cfg: ClassVar[dict[str, Any]] = {}

    processed = NemoGym._postprocess_nemo_gym_to_nemo_rl_result(Bare(), result_of(rows(1)[0]), Tokens())  # type: ignore[arg-type]

    assert set(processed) == {"message_log", "input_message_log", "full_result"}
    assert len(processed["input_message_log"]) == 1
    assert processed["input_message_log"][0] is processed["message_log"][0]
    assert processed["message_log"][0]["token_ids"].dtype == torch.int64
    assert processed["message_log"][1]["generation_logprobs"].dtype == torch.float32


@pytest.mark.parametrize("is_masking", [True, False])
def test_a_mark_of_the_environment_stays_unless_it_is_not_wanted(
    attached: Any, rows: Any, result_of: Any, tokenizer: Any, is_masking: bool
) -> None:
    def answer(row: dict[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = result_of(row, instance_config={"mask_sample": True, "other": 1})
        return marked

    gym = attached(answer)
    options: dict[str, Any] = {"generation_config": CONFIG, "use_nemo_gym": True}
    manager = RolloutManager(tokenizer, {"nemo_gym": gym}, 1, 50, mask_env_flagged_samples=is_masking, **options)
    record = asyncio.run(manager.run_rollout({"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}))

    extras = record.completions[0].env_extras
    assert extras is not None
    assert extras["instance_config"] == ({"mask_sample": True, "other": 1} if is_masking else {"other": 1})


class Counting:
    """Rewards with its own number, and notes how often it was asked."""

    def __init__(self, reward: Any, answers: list[str | None] | None = None) -> None:
        self.reward, self.answers, self.asked = reward, answers, []  # type: ignore[var-annotated]

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        self.asked.append((message_log_batch, metadata))
        count = len(metadata)
        rewards = (
            {name: [value] * count for name, value in self.reward.items()}
            if isinstance(self.reward, dict)
            else torch.tensor([float(self.reward)] * count)
        )
        observations = [{"role": "environment", "content": str(info)} for info in metadata]
        return EnvironmentReturn(observations, metadata, None, rewards, torch.tensor([True] * count), self.answers)


def batch_of(*tasks: str) -> dict[str, Any]:
    logs = [[{"role": "user", "content": task, "token_ids": [1]}] for task in tasks]
    return {"message_log": logs, "task_name": list(tasks), "extra_env_info": [{"row": n} for n in range(len(tasks))]}


def test_rewards_of_a_batch_come_in_row_order_with_one_call_per_task() -> None:
    first, second = Counting(1), Counting(2, ["x", "y"])
    answer = calculate_rewards(batch_of("a", "b", "a", "b"), {"a": first, "b": second, "c": None})

    assert type(answer) is EnvironmentReturn
    assert (answer.rewards.tolist(), answer.rewards.shape) == ([1.0, 2.0, 1.0, 2.0], (4,))
    assert answer.terminateds.tolist() == [True] * 4
    assert answer.metadata == [{"row": 0}, {"row": 1}, {"row": 2}, {"row": 3}]
    assert [it["content"] for it in answer.observations] == [str({"row": n}) for n in range(4)]
    assert answer.next_stop_strings == [None] * 4
    assert answer.answers == [None, "x", None, "y"]
    ((logs, infos),) = first.asked
    assert logs == [[{"role": "user", "content": "a"}]] * 2, "no tokens go to environments"
    assert infos == [{"row": 0}, {"row": 2}]


def test_rewards_by_name_stay_apart_and_are_not_mixed_with_numbers() -> None:
    named = {"right": 1.0, "style": 0.5}
    answer = calculate_rewards(batch_of("a", "b"), {"a": Counting(named), "b": Counting(named)})
    assert {name: value.tolist() for name, value in answer.rewards.items()} == {
        "right": [1.0, 1.0],
        "style": [0.5, 0.5],
    }

    with pytest.raises(AssertionError, match="some environments answer with rewards by name"):
        calculate_rewards(batch_of("a", "b"), {"a": Counting(named), "b": Counting(1)})
    with pytest.raises(ValueError, match="no environment for task 'z'; known tasks: a"):
        calculate_rewards(batch_of("z"), {"a": Counting(1)})


def test_rewards_can_be_had_inside_a_running_loop_and_from_coroutines() -> None:
    class Async(Counting):
        async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().step(message_log_batch, metadata)

    async def inside() -> Any:
        return calculate_rewards(batch_of("a"), {"a": Async(3)}).rewards.tolist()

    assert asyncio.run(inside()) == [3.0]


def test_failures_form_the_tree_that_trainers_know() -> None:
    infra = (RolloutTimeout, GenerationUnavailable, NoHealthyShards, GymTransportError)
    assert all(issubclass(kind, RolloutInfraFailure) for kind in infra)
    assert not any(issubclass(RolloutInfraFailure, kind) for kind in (RolloutDataFailure, RuntimeError))
    assert all(issubclass(kind, RuntimeError) for kind in (RolloutRedispatchExhausted, RolloutStall))
    assert (FailureClass.INFRA, FailureClass.DATA) == ("infra", "data")
    assert (RolloutOutcome.COMMITTED, RolloutOutcome.SKIPPED) == ("committed", "skipped")
    assert classify_rollout_failure(NoHealthyShards("none")) is FailureClass.INFRA


def test_settings_have_the_defaults_that_trainers_know() -> None:
    policy = RolloutRetryPolicy.single_attempt(max_skipped_prompts=3)
    assert (policy.max_infra_attempts, policy.max_data_attempts, policy.max_gym_row_attempts) == (1, 1, 1)
    assert (policy.backoff_base_s, policy.max_backoff_s) == (1.0, 30.0)
    assert (policy.max_skipped_prompts, policy.max_consecutive_dropped_prompts) == (3, 0)
    assert RolloutTimeouts() == RolloutTimeouts(rollout_s=None, generation_s=None, env_s=None)
    with pytest.raises(AttributeError):
        policy.max_infra_attempts = 2  # type: ignore[misc]


def test_counters_are_floats_under_the_names_of_dashboards() -> None:
    metrics = RolloutStats().as_metrics()
    names = "committed skipped redispatch data_retry data_failures gym_row_redispatch infra_drops"
    assert {f"rollout/{name}_total" for name in names.split()} <= set(metrics)
    assert "rollout/max_consecutive_infra_drops" in metrics
    assert all(type(value) is float for value in metrics.values())


def test_a_manager_stamps_whole_numbers(tokenizer: Any) -> None:
    manager = RolloutManager(tokenizer, {"t": Environment()}, 2, 50, policy_generation=Policy())
    assert manager.weight_version == 0
    manager.set_weight_version(torch.tensor(3))
    assert (manager.weight_version, type(manager.weight_version)) == (3, int)
    assert type(manager.stats) is RolloutStats
    assert type(manager._impl) is AsyncRolloutImpl
