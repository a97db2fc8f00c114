"""The servers' path up to the environment, which here is a stand-in."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym.rl import rollout_manager
from nemo_gym.rl.batches import collate
from nemo_gym.rl.failures import GymTransportError, RolloutDataFailure, RolloutRetryPolicy, RolloutTimeouts
from nemo_gym.rl.interfaces import DatumSpec, GenerationConfig, PromptGroupRecord, RolloutOverrides, as_list
from nemo_gym.rl.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl, RolloutManager

Run = Callable[..., Any]

CONFIG: GenerationConfig = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": None,
    "max_new_tokens": 16,
    "stop_strings": None,
    "stop_token_ids": None,
}


class Gym:
    """Answers `run_rollouts` with what the test says."""

    def __init__(self, answer: Run) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    async def run_rollouts(self, examples: Any, tokenizer: Any, timer_prefix: str, **options: Any) -> Any:
        self.calls.append((examples, timer_prefix, options))
        answer = self.answer(examples)
        return await answer if hasattr(answer, "__await__") else answer


def processed(reward: float = 1.0, generated: int = 2, **full: Any) -> dict[str, Any]:
    log = [
        {"role": "user", "content": "", "token_ids": [1, 2, 3]},
        {
            "role": "assistant",
            "content": "",
            "token_ids": [4] * generated,
            "generation_logprobs": [-0.5] * generated,
            "is_invalid_tool_call": False,
            "has_malformed_thinking": False,
        },
    ]
    return {"message_log": log, "input_message_log": log[:1], "full_result": {"reward": reward, **full}}


def good(rows: list[Any]) -> Any:
    return [processed(float(row["_rowidx"])) for row in rows], {"timing/rollout/await_results": 0.5}


def sample(**params: Any) -> DatumSpec:
    row = {
        "agent_ref": {"name": "agent_a"},
        "responses_create_params": {"input": "hi", **params},
        "question": ["q"],
    }
    return {"idx": 3, "message_log": [{"role": "user", "content": "hi", "token_ids": [1, 2, 3]}], "extra_env_info": row}


def manager(gym: Any, **options: Any) -> RolloutManager:
    settings: dict[str, Any] = {"num_generations_per_prompt": 3, "max_seq_len": 100, "generation_config": CONFIG}
    return RolloutManager(None, {"nemo_gym": gym}, use_nemo_gym=True, **{**settings, **options})  # type: ignore[arg-type]


def run(gym: Any, given: DatumSpec | None = None, **options: Any) -> PromptGroupRecord:
    return asyncio.run(manager(gym, **options).run_rollout(given or sample()))


def test_the_manager_checks_what_it_is_given() -> None:
    with pytest.raises(AssertionError, match="num_generations_per_prompt must be >= 1"):
        RolloutManager(None, {}, 0, 10)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="policy_generation is required"):
        RolloutManager(None, {}, 1, 10)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="generation_config is required"):
        RolloutManager(None, {}, 1, 10, use_nemo_gym=True)  # type: ignore[arg-type]


def test_the_manager_chooses_one_of_two_implementations() -> None:
    native = RolloutManager(None, {}, 1, 10, policy_generation=object())  # type: ignore[arg-type]
    assert isinstance(native._impl, AsyncRolloutImpl)
    assert native._impl.max_rollout_turns == 999_999
    assert isinstance(manager(Gym(good))._impl, AsyncNemoGymRolloutImpl)


@pytest.mark.parametrize(
    ("key", "value"), [("stop_strings", ["x"]), ("stop_token_ids", [1]), ("top_k", 5)], ids=lambda value: str(value)
)
def test_settings_that_an_agent_cannot_honour_are_refused(key: str, value: Any) -> None:
    with pytest.raises(AssertionError, match=f"{key}.*unsupported on the NeMo-Gym path"):
        manager(Gym(good), generation_config={**CONFIG, key: value})


def test_turns_are_the_agents_business() -> None:
    assert run(Gym(good), max_rollout_turns=1).metadata == {"task_name": "nemo_gym"}
    with pytest.raises(AssertionError, match="max_rollout_turns is 5, which is unsupported"):
        manager(Gym(good), max_rollout_turns=5)


def test_rows_carry_the_sampling_settings_and_their_index_and_the_sample_is_left_alone() -> None:
    gym, given = Gym(good), sample(temperature=0.1, max_output_tokens=8)
    run(gym, given)

    rows, prefix, options = gym.calls[0]
    assert [row["_rowidx"] for row in rows] == [0, 1, 2]
    assert rows[0]["responses_create_params"] == {
        "input": "hi",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_output_tokens": 8,
    }
    assert (prefix, options) == ("timing/rollout", {})
    rows[0]["question"].append("changed")
    assert rows[1]["question"] == ["q"]
    assert given == sample(temperature=0.1, max_output_tokens=8)


def test_the_cap_on_tokens_is_the_smaller_one() -> None:
    gym = Gym(good)
    run(gym, sample(max_output_tokens=64))
    run(gym, sample())
    assert [call[0][0]["responses_create_params"]["max_output_tokens"] for call in gym.calls] == [16, 16]


def test_results_become_completions_in_row_order() -> None:
    given = sample()
    record = run(Gym(good), given)

    assert [completion.reward for completion in record.completions] == [0.0, 1.0, 2.0]
    assert record.prompt is given["message_log"]
    completion = record.completions[0]
    assert completion.env_extras == {"reward": 0.0}
    assert [as_list(message["token_ids"]) for message in completion.message_log] == [[1, 2, 3], [4, 4]]
    assert as_list(completion.message_log[1]["generation_logprobs"]) == [-0.5, -0.5]


@pytest.mark.parametrize(("max_seq_len", "truncated"), [(5, True), (6, False), (4, False)])
def test_a_log_of_exactly_the_limit_counts_as_truncated(max_seq_len: int, truncated: bool) -> None:
    record = run(Gym(good), max_seq_len=max_seq_len)
    assert record.completions[0].truncated is truncated
    assert record.rollout_metrics["truncation_rate"] == float(truncated)
    assert record.rollout_metrics["natural_termination_rate"] == 1 - float(truncated)


def test_a_prompt_longer_than_the_limit_is_masked_and_not_scored() -> None:
    record = run(Gym(good), max_seq_len=2)

    for completion in record.completions:
        assert completion.mask_reason == "the prompt has 3 tokens, more than max_seq_len=2"
        assert (completion.truncation_reason, math.isnan(completion.reward)) == ("max_seq_len", True)
    assert record.rollout_metrics["masked_completions"] == 3
    assert "total_reward/mean" not in record.rollout_metrics
    assert collate([record], as_numpy=True)["sample_mask"].tolist() == [0, 0, 0]


def test_metrics_are_those_of_the_prompts_that_fit() -> None:
    def answer(rows: list[Any]) -> Any:
        results = good(rows)[0]
        results[0]["message_log"][0]["token_ids"] = list(range(101))  # this agent put something before the question
        return results, {}

    record = run(Gym(answer))

    assert [completion.mask_reason is None for completion in record.completions] == [False, True, True]
    assert record.rollout_metrics["total_reward/mean"] == 1.5
    assert record.rollout_metrics["masked_completions"] == 1


@pytest.mark.parametrize("placeholder", [[], [{"role": "user", "content": "", "token_ids": []}], [{"role": "user"}]])
def test_the_prompt_of_a_sample_without_tokens_is_the_one_that_the_policy_saw(placeholder: Any) -> None:
    record = run(Gym(good), {**sample(), "message_log": placeholder})

    assert [(it["role"], as_list(it["token_ids"])) for it in record.prompt] == [("user", [1, 2, 3])]
    assert record.prompt[0] is not record.completions[0].message_log[0]


def test_the_prompt_of_a_masked_completion_will_do_too() -> None:
    def answer(rows: list[Any]) -> Any:
        return [{**processed(), "mask_reason": "lost"}, processed(), processed()], {}

    record = run(Gym(answer), {**sample(), "message_log": []}, min_group_size=2)

    assert record.completions[0].mask_reason == "lost"
    assert as_list(record.prompt[0]["token_ids"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"incomplete_details": {"reason": "max_output_tokens"}}, "max_output_tokens"),
        ({"incomplete_details": {"reason": None}}, "incomplete"),
        ({"status": "incomplete", "incomplete_details": None}, "incomplete"),
        ({"status": "completed", "incomplete_details": None}, None),
        (None, None),
    ],
)
def test_an_answer_that_was_cut_off_is_truncated_and_says_why(response: Any, reason: str | None) -> None:
    record = run(Gym(lambda rows: ([processed(1.0, response=response)] * 3, {})))

    assert [(each.truncated, each.truncation_reason) for each in record.completions] == [
        (reason is not None, reason)
    ] * 3
    assert record.rollout_metrics["truncation_rate"] == float(reason is not None)


@pytest.mark.parametrize(
    ("overrides", "temperature"),
    [
        (RolloutOverrides(n=1, greedy=True, max_new_tokens=7), 0.0),
        (RolloutOverrides(n=1, temperature=0.3, max_new_tokens=7), 0.3),
    ],
)
def test_one_call_may_want_something_else(overrides: RolloutOverrides, temperature: float) -> None:
    gym = Gym(lambda rows: ([processed()] * len(rows), {}))
    kept = manager(gym)

    record = asyncio.run(kept.run_rollout(sample(), overrides))
    asyncio.run(kept.run_rollout(sample()))

    (rows, *_), (usual, *_) = gym.calls
    params = rows[0]["responses_create_params"]
    assert (len(rows), params["temperature"], params["max_output_tokens"]) == (1, temperature, 7)
    assert len(record.completions) == 1
    assert len(usual) == 3
    assert usual[0]["responses_create_params"]["temperature"] not in (0.0, 0.3)


@pytest.mark.parametrize("options", [{"n": 0}, {"greedy": True, "temperature": 0.5}])
def test_overrides_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"n is 0|contradict"):
        RolloutOverrides(**options)


def test_components_of_a_reward_are_kept_and_may_be_weighted() -> None:
    def answer(rows: list[Any]) -> Any:
        return [processed(1.5, reward_components={"right": 1.0, "style": 0.5})] * 3, {}

    plain = run(Gym(answer)).completions[0]
    weighted = run(Gym(answer), reward_weights={"right": 2.0, "style": 0.0}).completions[0]

    assert (plain.reward, weighted.reward) == (1.5, 2.0)
    assert plain.reward_components == weighted.reward_components == {"right": 1.0, "style": 0.5}


def test_components_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RolloutDataFailure, match=r"reward 1, but its reward_components .* add up to 0.5"):
        run(Gym(lambda rows: ([processed(1.0, reward_components={"right": 0.5})] * 3, {})))


def test_fields_of_the_row_are_no_metrics() -> None:
    given = sample()
    assert given["extra_env_info"] is not None
    given["extra_env_info"] |= {"id": 17, "level": 3, "reward": 1.0}

    def answer(rows: list[Any]) -> Any:
        return [processed(1.0, _rowidx=index, id=17, level=index, score=2) for index in range(3)], {}

    metrics = run(Gym(answer), given).rollout_metrics

    assert {key for key in metrics if key.startswith("agent_a/") and key.endswith("/mean")} == {
        "agent_a/reward/mean",
        "agent_a/score/mean",
        "agent_a/level/mean",  # the environment has made another of it
    }


def test_metrics_of_a_group() -> None:
    def answer(rows: list[Any]) -> Any:
        extras: list[dict[str, Any]] = [{"score": 2, "is_right": True, "note": "x"}, {"score": 4}, {"note": "y"}]
        return [processed(1.0, index + 1, **extra) for index, extra in enumerate(extras)], {"timing/rollout/x": 1.0}

    metrics = run(Gym(answer)).rollout_metrics

    expected = {
        "total_reward/mean": 1.0,
        "turns_per_sample/mean": 1.0,
        "turns_per_sample/p99": 1.0,
        "total_tokens_per_sample/mean": 5.0,
        "gen_tokens_per_sample/mean": 2.0,
        "max_gen_tokens_per_turn/max": 3,
        "max_gen_tokens_per_turn/p95": 3.0,
        "agent_a/score/mean": 2.0,
        "agent_a/score/max": 4.0,
        "agent_a/is_right/mean": 1 / 3,
        "mean_gen_tokens_per_sample": 2.0,
        "timing/rollout/x": 1.0,
    }
    assert {key: metrics[key] for key in expected} == expected
    assert "agent_a/note/mean" not in metrics
    table = metrics["agent_a/full_result"]
    assert (table.columns, len(table.data)) == (["Full result"], 3)
    assert table.data[0] == ['{"reward":1.0,"score":2,"is_right":true,"note":"x"}']
    assert {f"timing/rollout/{name}" for name in ("total", "run_rollouts", "compute_metrics")} <= set(metrics)


def test_a_row_that_lacks_what_agents_need_is_named() -> None:
    given = sample()
    given["extra_env_info"] = {"responses_create_params": {}}
    with pytest.raises(RolloutDataFailure, match="prompt 3: extra_env_info lacks agent_ref"):
        run(Gym(good), given)


def test_a_manager_without_servers_says_where_they_belong() -> None:
    lost = manager(Gym(good))
    lost._impl.task_to_env = {"math": object()}
    with pytest.raises(ValueError, match="task_to_env has 'math' but no 'nemo_gym'; put a NemoGym there"):
        asyncio.run(lost.run_rollout(sample()))


@pytest.mark.parametrize("results", [[processed()], [processed(), None, processed()]])
def test_a_row_that_never_returns_fails_the_group(results: list[Any]) -> None:
    with pytest.raises(GymTransportError, match=r"rows \[1.*\] never came back"):
        run(Gym(lambda rows: (results, {})))


def test_an_environment_that_hangs_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(rows: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(rollout_manager, "_HANGS_AFTER_S", 0.05)
    with pytest.raises(GymTransportError, match=r"rows \[0, 1, 2\] never came back .*rollout_s=0.05 s\): it hangs"):
        run(Gym(never), timeouts=RolloutTimeouts(rollout_s=0.05))


def test_nan_log_probs_are_never_returned() -> None:
    def answer(rows: list[Any]) -> Any:
        bad = processed()
        bad["message_log"][1]["generation_logprobs"] = [math.nan, 0.0]
        return [processed(), bad, processed()], {}

    with pytest.raises(RolloutDataFailure, match="NaN"):
        run(Gym(answer))


@pytest.mark.parametrize("reward", [None, "1", math.nan])
def test_a_result_without_a_verdict_is_not_worth_zero(reward: Any) -> None:
    with pytest.raises(RolloutDataFailure, match="is no number to train on"):
        run(Gym(lambda rows: ([processed(reward)] * 3, {})))


def test_a_failed_group_is_tried_again_with_all_its_rows() -> None:
    answers: list[Any] = [GymTransportError("lost"), None]

    def answer(rows: list[Any]) -> Any:
        error = answers.pop(0)
        if error is not None:
            raise error
        results, timing = good(rows)
        return results, {**timing, "gym_row_redispatches": 2.0}

    policy, gym = RolloutRetryPolicy(2, 1, 1, backoff_base_s=0.001), Gym(answer)
    tried = manager(gym, retry_policy=policy)
    record = asyncio.run(tried.run_rollout(sample()))

    assert len(record.completions) == 3
    assert [len(call[0]) for call in gym.calls] == [3, 3]
    assert gym.calls[0][2] == {"retry_policy": policy}
    metrics = tried.stats.as_metrics()
    assert metrics["rollout/redispatch_total/GymTransportError"] == 1.0
    assert metrics["rollout/gym_row_redispatch_total"] == 2.0


def test_a_gym_may_be_the_handle_of_an_actor() -> None:
    class Handle:
        class run_rollouts:  # noqa: N801
            remote = staticmethod(lambda rows, tokenizer, prefix: Gym(good).run_rollouts(rows, tokenizer, prefix))

    assert len(run(Handle()).completions) == 3
