"""The native path, with a generator and environments that a test can read."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from nemo_gym.rl.failures import (
    GenerationUnavailable,
    RolloutDataFailure,
    RolloutRetryPolicy,
    RolloutTimeout,
    RolloutTimeouts,
)
from nemo_gym.rl.groups import group_advantages
from nemo_gym.rl.interfaces import DatumSpec, EnvironmentReturn, PromptGroupRecord, RolloutOverrides
from nemo_gym.rl.rollout_manager import AsyncRolloutImpl, RolloutManager

torch = pytest.importorskip("torch", reason="the native path works on tensors: install the extra `rl` (make test-rl)")


class Generator:
    """Says what `say` tells for a prompt; one token per character."""

    def __init__(self, say: Callable[[str], Any], **extra: Any) -> None:
        self.say = say
        self.extra = extra
        self.asked: list[dict[str, Any]] = []

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        prompt = data["input_ids"][0].tolist()
        self.asked.append({"prompt": "".join(map(chr, prompt)), "stop_strings": data["stop_strings"]})
        await asyncio.sleep(0)
        said = self.say("".join(map(chr, prompt)))
        if hasattr(said, "__await__"):
            said = await said
        ids = [ord(character) for character in said]
        log_probs = [0.0] * len(prompt) + [-0.1 * (place + 1) for place in range(len(ids))]
        output = {
            "output_ids": torch.tensor([prompt + ids + [0, 0]]),
            "logprobs": torch.tensor([[*log_probs, 0.0, 0.0]]),
            "generation_lengths": torch.tensor([len(ids)]),
            "unpadded_sequence_lengths": torch.tensor([len(prompt) + len(ids)]),
            **self.extra,
        }
        yield 0, {"output_ids": torch.zeros(1, 1), "unpadded_sequence_lengths": torch.tensor([1])}
        yield 0, output


class Environment:
    """Rewards every turn with 0.5 and ends after `turns` of them."""

    def __init__(self, turns: int = 1, observation: str = "ok", **more: Any) -> None:
        self.turns = turns
        self.observation = observation
        self.more = more
        self.seen: list[Any] = []

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.seen.append((message_log_batch[0], dict(metadata[0])))
        turn = metadata[0].get("turn", 0) + 1
        fields: dict[str, Any] = {
            "observations": [{"role": "environment", "content": self.observation}],
            "metadata": [{**metadata[0], "turn": turn}],
            "next_stop_strings": None,
            "rewards": torch.tensor([0.5]),
            "terminateds": torch.tensor([turn >= self.turns]),
            **self.more,
        }
        return EnvironmentReturn(**fields)


def sample(prompt: str = "2+2=", **more: Any) -> DatumSpec:
    ids = torch.tensor([ord(character) for character in prompt])
    log = [{"role": "user", "content": prompt, "token_ids": ids}]
    given: Any = {"idx": 7, "message_log": log, "extra_env_info": {"answer": [4]}, "task_name": "math", **more}
    return given  # type: ignore[no-any-return]


def manager(tokenizer: Any, generator: Any, environment: Any, **options: Any) -> RolloutManager:
    settings: dict[str, Any] = {"num_generations_per_prompt": 3, "max_seq_len": 100, **options}
    return RolloutManager(tokenizer, {"math": environment}, policy_generation=generator, **settings)


def run(*arguments: Any, given: DatumSpec | None = None, **options: Any) -> PromptGroupRecord:
    return asyncio.run(manager(*arguments, **options).run_rollout(given or sample()))


def texts(record: PromptGroupRecord, index: int = 0) -> list[tuple[str, str, str]]:
    return [
        (message["role"], message["content"], "".join(map(chr, message["token_ids"].tolist())))
        for message in record.completions[index].message_log
    ]


def test_one_turn_per_completion(tokenizer: Any) -> None:
    given = sample()
    record = run(tokenizer, Generator(lambda prompt: "4"), Environment(), given=given)

    assert (record.prompt_idx, record.metadata) == (7, {"task_name": "math"})
    assert record.prompt is given["message_log"]
    assert record.extra_env_info is given["extra_env_info"]
    assert len(record.completions) == 3
    for index, completion in enumerate(record.completions):
        assert texts(record, index) == [("user", "2+2=", "2+2="), ("assistant", "4", "4"), ("environment", "ok", "ok")]
        assert (completion.reward, completion.truncated) == (0.5, False)
        assert completion.env_extras == {"answer": [4]}, "the state of a terminal step is not kept"
    ids = record.completions[0].message_log[1]["token_ids"]
    assert ids.dtype == torch.int64
    assert torch.allclose(record.completions[0].message_log[1]["generation_logprobs"], torch.tensor([-0.1]))


def test_turns_go_on_until_the_environment_ends_them(tokenizer: Any) -> None:
    environment = Environment(turns=3, observation="go on", next_stop_strings=[["stop"]])
    generator = Generator(lambda prompt: f"<{len(prompt)}>")
    record = run(tokenizer, generator, environment, given=sample(stop_strings=["halt"]))

    assert [text for _, text, _ in texts(record)] == ["2+2=", "<4>", "go on", "<12>", "go on", "<21>", "go on"]
    assert record.completions[0].reward == 1.5
    assert record.completions[0].env_extras == {"answer": [4], "turn": 2}
    first_log, first_info = environment.seen[0]
    assert first_log == [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "<4>"}]
    assert first_info == {"answer": [4]}
    assert {(len(asked["prompt"]), *asked["stop_strings"][0]) for asked in generator.asked} == {
        (4, "halt"),
        (12, "stop"),
        (21, "stop"),
    }


def test_completions_share_nothing_with_each_other_or_with_the_sample(tokenizer: Any) -> None:
    given = sample()
    record = run(tokenizer, Generator(lambda prompt: "4"), Environment(turns=2), given=given)
    record.completions[0].message_log[0]["token_ids"][0] = 0
    assert record.completions[0].env_extras is not None
    record.completions[0].env_extras["answer"].append(5)

    assert texts(record, 1)[0][2] == "2+2="
    assert given["message_log"][0]["token_ids"][0] == ord("2")
    assert given["extra_env_info"] == {"answer": [4]}
    assert record.completions[1].env_extras == {"answer": [4], "turn": 1}


def test_turns_may_be_limited(tokenizer: Any) -> None:
    record = run(tokenizer, Generator(lambda prompt: "4"), Environment(turns=9), max_rollout_turns=2)
    assert len(record.completions[0].message_log) == 5
    metrics = record.rollout_metrics
    assert (metrics["max_turns_reached_rate"], metrics["natural_termination_rate"]) == (1.0, 0.0)


def test_ending_on_the_last_permitted_turn_counts_as_both(tokenizer: Any) -> None:
    record = run(tokenizer, Generator(lambda prompt: "4"), Environment(turns=2), max_rollout_turns=2)
    metrics = record.rollout_metrics
    assert (metrics["max_turns_reached_rate"], metrics["natural_termination_rate"]) == (1.0, 1.0)


@pytest.mark.parametrize(("max_seq_len", "kept", "truncated"), [(8, "ok", False), (7, "ok", True), (6, "o", True)])
def test_reaching_the_limit_exactly_truncates_and_cuts_tokens_but_not_text(
    tokenizer: Any, max_seq_len: int, kept: str, truncated: bool
) -> None:
    record = run(tokenizer, Generator(lambda prompt: "4"), Environment(), max_seq_len=max_seq_len)
    assert texts(record)[2] == ("environment", "ok", kept)
    assert record.completions[0].truncated is truncated
    assert record.rollout_metrics["env_tokens_per_sample/mean"] == len(kept)


def test_a_generation_that_was_cut_off_truncates_after_the_environment_had_its_say(tokenizer: Any) -> None:
    generator = Generator(lambda prompt: "4", truncated=torch.tensor([True]))
    record = run(tokenizer, generator, Environment(turns=5))
    assert len(record.completions[0].message_log) == 3
    assert (record.completions[0].truncated, record.completions[0].reward) == (True, 0.5)
    assert record.rollout_metrics["truncation_rate"] == 1.0


def test_a_prompt_of_exactly_the_limit_is_a_truncated_completion_without_a_generated_token(tokenizer: Any) -> None:
    generator = Generator(lambda prompt: pytest.fail("there is no room to generate"))
    record = run(tokenizer, generator, Environment(turns=5), max_seq_len=4)

    assert len(record.completions) == 3
    for index, completion in enumerate(record.completions):
        assert completion.truncated
        assert texts(record, index) == [("user", "2+2=", "2+2="), ("assistant", "", ""), ("environment", "ok", "")]
        assert completion.message_log[1]["token_ids"].dtype == torch.int64
        assert completion.message_log[1]["generation_logprobs"].dtype == torch.float32


def test_a_prompt_longer_than_the_limit_is_masked_and_not_scored(tokenizer: Any) -> None:
    generator = Generator(lambda prompt: pytest.fail("there is no room to generate"))
    environment = Environment()
    record = run(tokenizer, generator, environment, max_seq_len=3)

    assert len(record.completions) == 3
    for index, completion in enumerate(record.completions):
        assert completion.mask_reason == "the prompt has 4 tokens, more than max_seq_len=3"
        assert (completion.truncation_reason, math.isnan(completion.reward)) == ("max_seq_len", True)
        assert texts(record, index) == [("user", "2+2=", "2+2=")]
    assert record.rollout_metrics["masked_completions"] == 3
    assert group_advantages(record) == [0.0] * 3
    assert not environment.seen


def test_metrics_of_a_group(tokenizer: Any) -> None:
    lengths = iter([1, 2, 3])
    generator = Generator(lambda prompt: "4" * next(lengths), gen_leader_worker_idx=[[5]])
    metrics = run(tokenizer, generator, Environment()).rollout_metrics

    expected = {
        "total_reward/mean": 0.5,
        "total_reward/stddev": 0.0,
        "total_turns": 3,
        "turns_per_sample/mean": 1.0,
        "turns_per_sample/p95": 1.0,
        "gen_tokens_per_sample/mean": 2.0,
        "gen_tokens_per_sample/max": 3,
        "env_tokens_per_sample/median": 2,
        "total_tokens_per_sample/mean": 4.0,
        "truncation_rate": 0.0,
        "natural_termination_rate": 1.0,
        "per_worker_token_counts": {5: 6},
        "histogram/gen_tokens_length": [1, 2, 3],
        "histogram/input_tokens_length": [4, 4, 4],
        "histogram/total_tokens_length": [5, 6, 7],
        "max_gen_tokens_per_turn/max": 3,
        "mean_gen_tokens_per_sample": 2.0,
    }
    assert {key: metrics[key] for key in expected} == expected
    timers = {key for key in metrics if key.startswith("timing/")}
    assert timers == {f"timing/rollout/{name}" for name in ("total", "run_rollouts", "aggregate_metrics")}
    assert metrics["timing/rollout/total"] >= metrics["timing/rollout/run_rollouts"]


@pytest.mark.parametrize("value", [torch.tensor([3]), [3], [[3]]])
def test_a_worker_may_be_told_in_several_ways(tokenizer: Any, value: Any) -> None:
    metrics = run(tokenizer, Generator(lambda prompt: "4", gen_leader_worker_idx=value), Environment()).rollout_metrics
    assert metrics["per_worker_token_counts"] == {3: 3}


def test_a_worker_told_in_no_known_way_is_ignored(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    metrics = run(tokenizer, Generator(lambda p: "4", gen_leader_worker_idx="x"), Environment()).rollout_metrics
    assert metrics["per_worker_token_counts"] == {}
    assert "gen_leader_worker_idx" in caplog.text


class Fails:
    """Raises for one of the completions, which the others outlast."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0
        self.cancelled = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ""


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionResetError("gone"), GenerationUnavailable),
        (type("RayTaskError", (Exception,), {"__module__": "ray.exceptions"})("in the worker"), GenerationUnavailable),
        (ValueError("bad prompt"), RolloutDataFailure),
    ],
)
def test_a_generation_that_raises_fails_the_group_and_cancels_the_siblings(
    tokenizer: Any, error: Exception, failure: type[Exception]
) -> None:
    fails = Fails(error)
    with pytest.raises(failure, match="prompt 7, trajectory 1: generation failed") as caught:
        run(tokenizer, Generator(lambda prompt: fails()), Environment())
    assert caught.value.__cause__ is error
    assert fails.cancelled == 2


def test_an_environment_that_raises_fails_the_group_with_its_own_error(tokenizer: Any) -> None:
    class Broken(Environment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            raise ZeroDivisionError("in the verifier")

    with pytest.raises(ZeroDivisionError, match="in the verifier") as caught:
        run(tokenizer, Generator(lambda prompt: "4"), Broken())
    assert "environment of task 'math' for prompt 7, trajectory" in caught.value.__notes__[0]


@pytest.mark.parametrize("rewards", [{"style": torch.tensor([1.0])}, torch.tensor([[1.0, 0.5]]), [0.5, 0.5]])
def test_several_rewards_for_one_conversation_are_refused(tokenizer: Any, rewards: Any) -> None:
    with pytest.raises(AssertionError, match=r"prompt 7, trajectory .: .* one number per conversation"):
        run(tokenizer, Generator(lambda _: "4"), Environment(rewards=rewards))


def test_named_rewards_count_by_their_weights_and_are_kept(tokenizer: Any) -> None:
    rewards = {"right": torch.tensor([1.0]), "style": [0.5]}
    record = run(
        tokenizer,
        Generator(lambda _: "4"),
        Environment(turns=2, rewards=rewards),
        reward_weights={"right": 1.0, "style": -0.5},
    )

    completion = record.completions[0]
    assert completion.reward == pytest.approx(1.5)
    assert completion.turn_rewards == pytest.approx([0.75, 0.75])
    assert completion.reward_components == pytest.approx({"right": 2.0, "style": 1.0})
    with pytest.raises(RolloutDataFailure, match=r"the rewards \['style'\], for which reward_weights has no weight"):
        run(tokenizer, Generator(lambda _: "4"), Environment(rewards=rewards), reward_weights={"right": 1.0})


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_fails_the_group(tokenizer: Any, reward: float) -> None:
    with pytest.raises(RolloutDataFailure, match="no number to train on"):
        run(tokenizer, Generator(lambda _: "4"), Environment(rewards=torch.tensor([reward])))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"unpadded_sequence_lengths": torch.tensor([99])}, "unpadded_sequence_lengths of 99 for output_ids of shape"),
        ({"unpadded_sequence_lengths": torch.tensor([3])}, "unpadded_sequence_lengths of 3 .* a prompt of 4 tokens"),
        ({"output_ids": torch.zeros(1, 7, dtype=torch.int64)}, "do not begin with the 4 tokens of the prompt"),
        ({"generation_lengths": torch.tensor([2])}, "generation_lengths of 2 where prompt and generation leave 1"),
        ({"logprobs": torch.zeros(1, 3)}, r"logprobs of shape \[1, 3\] for output_ids of shape \[1, 7\]"),
        ({"logprobs": torch.full((1, 7), -math.inf)}, "infinite log-probs"),
        ({"logprobs": torch.full((1, 7), 0.5)}, "log-probs up to 0.5"),
        ({"logprobs": torch.full((1, 7), math.nan)}, "NaN log-probs for 1 tokens"),
    ],
)
def test_what_a_generator_cannot_have_generated_is_named(tokenizer: Any, output: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutDataFailure, match=f"prompt 7, trajectory 0, turn 1: the policy returned .*{words}"):
        run(tokenizer, Generator(lambda prompt: "4", **output), Environment(), num_generations_per_prompt=1)


def test_one_call_may_want_something_else(tokenizer: Any) -> None:
    asked: list[Any] = []

    class Noting(Generator):
        async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
            asked.append((greedy, data.get("temperature"), data.get("max_new_tokens")))
            async for answer in super().generate_async(data, greedy):
                yield answer

    kept = manager(tokenizer, Noting(lambda prompt: "4"), Environment())
    overrides = RolloutOverrides(n=1, greedy=True, max_new_tokens=9, split="validation")
    record = asyncio.run(kept.run_rollout(sample(), overrides))
    usual = asyncio.run(kept.run_rollout(sample()))

    assert asked == [(True, None, 9)] + [(False, None, None)] * 3
    assert (len(record.completions), record.metadata) == (1, {"task_name": "math", "split": "validation"})
    assert (len(usual.completions), usual.metadata) == (3, {"task_name": "math"})


def test_where_nobody_says_a_word_the_rollout_ends(tokenizer: Any) -> None:
    record = run(tokenizer, Generator(lambda prompt: ""), Environment(turns=10**9, observation=""))

    assert [(each.truncated, each.truncation_reason) for each in record.completions] == [(True, "no_progress")] * 3
    assert record.rollout_metrics["turns_per_sample/max"] == 3


def test_why_a_rollout_was_cut_off_is_kept(tokenizer: Any) -> None:
    by_generator = run(tokenizer, Generator(lambda prompt: "4", truncated=torch.tensor([True])), Environment())
    by_length = run(tokenizer, Generator(lambda prompt: "4"), Environment(), max_seq_len=6)
    whole = run(tokenizer, Generator(lambda prompt: "4"), Environment())

    assert [record.completions[0].truncation_reason for record in (by_generator, by_length, whole)] == [
        "generator",
        "max_seq_len",
        None,
    ]


def test_messages_keep_nothing_of_the_prompts_alive(tokenizer: Any) -> None:
    record = run(tokenizer, Generator(lambda prompt: "44"), Environment(turns=5), max_seq_len=25)

    for completion in record.completions:
        for message in completion.message_log[1:]:
            for name in ("token_ids", "generation_logprobs"):
                tensor = message.get(name, torch.zeros(0))
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), (name, message)


def test_a_generator_that_yields_nothing_is_an_error(tokenizer: Any) -> None:
    class Silent:
        async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
            outputs: list[Any] = []
            for output in outputs:
                yield output

    with pytest.raises(RolloutDataFailure, match="yielded no output"):
        run(tokenizer, Silent(), Environment())


def test_a_task_without_an_environment_is_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no environment for task 'chess'; known tasks: 'math'"):
        run(tokenizer, Generator(lambda prompt: "4"), Environment(), given=sample(task_name="chess"))


def test_a_generation_and_a_step_may_take_only_so_long(tokenizer: Any) -> None:
    async def never() -> str:
        await asyncio.sleep(3600)
        return ""

    class Hangs(Environment):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            threading.Event().wait()
            raise AssertionError

    with pytest.raises(RolloutTimeout, match=r"a generation did not end within generation_s=0.05 s"):
        run(tokenizer, Generator(lambda p: never()), Environment(), timeouts=RolloutTimeouts(generation_s=0.05))
    with pytest.raises(RolloutTimeout, match=r"an environment step did not end within env_s=0.05 s"):
        run(tokenizer, Generator(lambda p: "4"), Hangs(), timeouts=RolloutTimeouts(env_s=0.05))


def test_a_group_is_tried_again_within_separate_budgets(tokenizer: Any) -> None:
    errors: list[Exception | None] = [ConnectionError("1"), ValueError("2"), ConnectionError("3"), None]

    def say(prompt: str) -> str:
        error = errors.pop(0)
        if error is not None:
            raise error
        return "4"

    policy = RolloutRetryPolicy(3, 2, 1, backoff_base_s=0.001)
    tried = manager(tokenizer, Generator(say), Environment(), num_generations_per_prompt=1, retry_policy=policy)
    record = asyncio.run(tried.run_rollout(sample()))

    assert len(record.completions) == 1
    metrics = tried.stats.as_metrics()
    assert metrics["rollout/completed_total"] == 1.0
    assert metrics["rollout/redispatch_total/GenerationUnavailable"] == 2.0
    assert metrics["rollout/data_retry_total/RolloutDataFailure"] == 1.0


def test_a_budget_that_is_used_up_gives_the_last_failure(tokenizer: Any) -> None:
    def say(prompt: str) -> str:
        raise ValueError("always")

    tried = manager(
        tokenizer, Generator(say), Environment(), retry_policy=RolloutRetryPolicy.single_attempt(max_data_attempts=2)
    )
    with pytest.raises(RolloutDataFailure, match="always"):
        asyncio.run(tried.run_rollout(sample()))
    assert tried.stats.as_metrics()["rollout/data_failures_total"] == 1.0
    assert tried.stats.as_metrics()["rollout/data_retry_total"] == 1.0


def test_environments_may_be_coroutines_or_handles(tokenizer: Any) -> None:
    class Asynchronous:
        async def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            return Environment().step(message_log_batch, metadata)

    class Handle:
        class step:  # noqa: N801
            remote = staticmethod(lambda logs, infos: Asynchronous().step(logs, infos))

    for environment in (Asynchronous(), Handle()):
        assert run(tokenizer, Generator(lambda prompt: "4"), environment).completions[0].reward == 0.5


def test_single_steps_can_be_called_one_by_one(tokenizer: Any) -> None:
    impl = AsyncRolloutImpl(
        tokenizer, {"math": Environment()}, 2, 100, Generator(lambda prompt: "42"), unknown="ignored"
    )

    async def main() -> None:
        message, lengths, facts = await impl._generate_response(sample()["message_log"], None)
        assert (message["content"], lengths.tolist(), facts["truncated"]) == ("42", [4], False)
        completion, numbers = await impl._run_single_rollout(sample(), 0)
        assert numbers["turn_count"] == 1
        metrics = impl._aggregate_rollout_metrics([completion], [numbers])
        assert metrics["gen_tokens_per_sample/mean"] == 2.0

    asyncio.run(main())
