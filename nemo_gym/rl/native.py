"""The native path: this process generates, steps the environment, and repeats, one attempt at a prompt at a time.

A generation that is stopped by a pause keeps its tokens, and goes on from them when the gate is open again.
"""

import asyncio
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.http.generation_gate import Abort, GenerationGate, GenerationInterrupted
from nemo_gym.rl.calls import call, gather_or_cancel, within
from nemo_gym.rl.failures import (
    FailureClass,
    GenerationUnavailable,
    RolloutDataFailure,
    RolloutFailure,
    RolloutTimeout,
    RolloutTimeouts,
    classify_rollout_failure,
    is_ray_error,
)
from nemo_gym.rl.interfaces import (
    Completion,
    DatumSpec,
    EnvironmentReturn,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Message,
    MessageLog,
    PromptGroupRecord,
    RolloutOverrides,
    Timer,
    Tokenizer,
    as_list,
    logprob_tensor,
    num_tokens,
    part_of,
    require_torch,
    token_tensor,
)
from nemo_gym.rl.message_log import (
    UnsoundOutputError,
    generated_part,
    is_sound,
    joined,
    leader_worker,
    require_sound_log_probs,
    versions_told,
)
from nemo_gym.rl.rewards import Reward, native_metrics, preload_wandb, reward_of_one
from nemo_gym.rl.samples import masked_completion, why_over_long

UNLIMITED_TURNS = 999_999
_TURNS_WITHOUT_PROGRESS = 3
"""Turns in a row in which neither the policy nor the environment said a word, after which none will."""
_MOST_EMPTY_HANDED = 8
"""Generations in a row that may be ended from outside without a pause and without a word."""


@dataclass
class Trajectory:
    """Grows by one assistant message and one observation per turn."""

    message_log: MessageLog
    env_info: Any
    stop_strings: list[str] | None
    max_seq_len: int
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    reward_components: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    truncation_reason: str | None = None
    turn_count: int = 0
    silent_turns: int = 0
    env_tokens: int = 0
    turn_gen_tokens: list[int] = field(default_factory=list)
    turn_input_tokens: list[int] = field(default_factory=list)
    per_worker_token_counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, sample: DatumSpec, max_seq_len: int) -> "Trajectory":
        """A trajectory of its own: nothing in it is shared with the sample."""
        return cls(
            message_log=[_copied(message) for message in sample["message_log"]],
            env_info=deepcopy(sample["extra_env_info"]),
            stop_strings=sample.get("stop_strings"),
            max_seq_len=max_seq_len,
        )

    @property
    def has_ended(self) -> bool:
        """Whether no further turn may follow."""
        return self.terminated or self.truncated

    def add_generation(self, message: Message, input_length: int, facts: Mapping[str, Any]) -> None:
        """Append what the policy said, with what the generator told about it."""
        generated = len(message["token_ids"])
        self.message_log.append(message)
        if facts.get("truncated"):
            self.truncate(facts.get("reason") or "generator")
        self.turn_gen_tokens.append(generated)
        self.turn_input_tokens.append(input_length)
        worker = facts.get("gen_leader_worker_idx")
        if worker is not None:
            self.per_worker_token_counts[worker] = self.per_worker_token_counts.get(worker, 0) + generated

    def truncate(self, reason: str) -> None:
        """No further turn may follow; the first reason counts."""
        self.truncated = True
        self.truncation_reason = self.truncation_reason or reason

    def add_step(self, step: EnvironmentReturn, reward: Reward, observation_ids: Any) -> None:
        """Append what the environment answered; reaching the length limit, even exactly, truncates.

        A step that ends the trajectory changes neither its state nor its stop strings.
        """
        observation = step.observations[0]
        self.reward += reward.total
        self.turn_rewards.append(reward.total)
        for name, value in reward.components.items():
            self.reward_components[name] = self.reward_components.get(name, 0.0) + value
        self.terminated = bool(as_list(step.terminateds)[0])
        used = self.turn_input_tokens[-1] + self.turn_gen_tokens[-1]
        if used + len(observation_ids) >= self.max_seq_len:
            observation_ids = part_of(observation_ids, slice(max(0, self.max_seq_len - used)))
            self.truncate("max_seq_len")
        self.message_log.append(
            {"role": observation["role"], "content": observation["content"], "token_ids": token_tensor(observation_ids)}
        )
        self.env_tokens += len(observation_ids)
        self.silent_turns = 0 if self.turn_gen_tokens[-1] or len(observation_ids) else self.silent_turns + 1
        if self.silent_turns >= _TURNS_WITHOUT_PROGRESS:
            self.truncate("no_progress")
        if self.has_ended:
            return
        if step.next_stop_strings is not None and step.next_stop_strings[0] is not None:
            self.stop_strings = step.next_stop_strings[0]
        if step.metadata[0] is not None:
            self.env_info = step.metadata[0]

    def completion(self) -> Completion:
        """The trajectory as a trainer gets it."""
        return Completion(
            self.message_log,
            self.env_info,
            self.truncated,
            self.reward,
            self.truncation_reason,
            self.turn_rewards,
            self.reward_components,
        )

    def numbers(self, *, max_turns_reached: bool) -> dict[str, Any]:
        """What enters the metrics of its group."""
        assistant_tokens = sum(self.turn_gen_tokens)
        return {
            "turn_count": self.turn_count,
            "total_tokens": assistant_tokens + self.env_tokens,
            "assistant_tokens": assistant_tokens,
            "env_tokens": self.env_tokens,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "max_turns_reached": max_turns_reached,
            "total_reward": self.reward,
            "turn_gen_tokens": self.turn_gen_tokens,
            "turn_input_tokens": self.turn_input_tokens,
            "turn_total_tokens": [sum(pair) for pair in zip(self.turn_gen_tokens, self.turn_input_tokens, strict=True)],
            "per_worker_token_counts": self.per_worker_token_counts,
        }


def _copied(message: Message) -> Message:
    """A message of its own; tensors and texts are copied without the detours of `deepcopy`."""
    return {
        key: value.clone() if hasattr(value, "clone") else value if isinstance(value, str) else deepcopy(value)
        for key, value in message.items()
    }


class AsyncRolloutImpl:
    """Runs the attempts at a prompt concurrently on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        task_to_env: dict[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        policy_generation: GenerationInterface,
        max_rollout_turns: int = UNLIMITED_TURNS,
        timeouts: RolloutTimeouts | None = None,
        reward_weights: Mapping[str, float] | None = None,
        gate: GenerationGate | None = None,
        generation_config: GenerationConfig | None = None,
        mask_interrupted: bool = False,
        **kwargs: Any,
    ) -> None:
        """`kwargs` is what the other path needs; it is not looked at."""
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.num_generations_per_prompt = num_generations_per_prompt
        self.max_seq_len = max_seq_len
        self.policy_generation = policy_generation
        self.max_rollout_turns = max_rollout_turns
        self.timeouts = timeouts or RolloutTimeouts()
        self.reward_weights = reward_weights
        self.gate = gate or GenerationGate(0)
        self.mask_interrupted = mask_interrupted
        self.overrides = RolloutOverrides()
        self._most_new_tokens = None if generation_config is None else generation_config.get("max_new_tokens")

    def with_overrides(self, overrides: RolloutOverrides) -> "AsyncRolloutImpl":
        """The same, but for what one call wants otherwise."""
        other = copy(self)
        other.overrides = overrides
        other.num_generations_per_prompt = overrides.n or self.num_generations_per_prompt
        return other

    async def pause(self, abort: Abort | None, grace_s: float) -> None:
        """Stop what is being generated; the generator's own `abort` is used where none is given."""
        own = getattr(self.policy_generation, "abort", None)
        await self.gate.pause(abort or (None if own is None else lambda: call(own)), grace_s)

    async def resume(self) -> None:
        """Let generation go on after it was held up."""
        self.gate.resume()

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt.

        Raises:
            RolloutFailure: the policy could not answer, or something took too long.
            Exception: whatever the environment raised. Then, too, no attempt is left running.
        """
        timer = Timer()
        with timer.time("timing/rollout/total"):
            over_long = why_over_long(input_sample["message_log"], self.max_seq_len)
            if over_long is None:
                completions, metrics = await self._run_rollouts(input_sample, timer)
            else:
                count = self.num_generations_per_prompt
                prompt = input_sample["message_log"]
                completions = [masked_completion(over_long, prompt, "max_seq_len") for _ in range(count)]
                metrics = {"masked_completions": count}
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=input_sample["message_log"],
            extra_env_info=input_sample["extra_env_info"],
            metadata={"task_name": input_sample["task_name"], **_split_of(self.overrides)},
            completions=completions,
            rollout_metrics={**metrics, **timer.get_timing_metrics(reduction_op="sum")},
        )

    async def _run_rollouts(self, input_sample: DatumSpec, timer: Timer) -> tuple[list[Completion], dict[str, Any]]:
        """Return the attempts at a prompt, made at the same time, and their metrics."""
        preload_wandb()
        with timer.time("timing/rollout/run_rollouts"):
            indices = range(self.num_generations_per_prompt)
            finished = await gather_or_cancel([self._run_single_rollout(input_sample, index) for index in indices])
        completions = [completion for completion, _ in finished]
        with timer.time("timing/rollout/aggregate_metrics"):
            return completions, self._aggregate_rollout_metrics(completions, [numbers for _, numbers in finished])

    async def _run_single_rollout(self, input_sample: DatumSpec, traj_idx: int) -> tuple[Completion, dict[str, Any]]:
        """One attempt, turn by turn, and the numbers for its group's metrics."""
        trajectory = Trajectory.begin(input_sample, self.max_seq_len)
        place = f"prompt {input_sample['idx']}, trajectory {traj_idx}"
        max_turns_reached = True
        for _ in range(self.max_rollout_turns):
            if trajectory.has_ended:
                max_turns_reached = False
                break
            trajectory.turn_count += 1
            await self._take_turn(trajectory, place)
            await self._step_environment(trajectory, input_sample["task_name"], place)
        return trajectory.completion(), trajectory.numbers(max_turns_reached=max_turns_reached)

    async def _take_turn(self, trajectory: Trajectory, place: str) -> None:
        """Let the policy continue, or record that there is no room left for it to do so."""
        length = num_tokens(trajectory.message_log)
        if length >= self.max_seq_len:
            trajectory.add_generation(_nothing_said(), length, {"truncated": True, "reason": "max_seq_len"})
            return
        try:
            message, facts = await self._whole_turn(trajectory, place)
        except UnsoundOutputError as error:
            raise RolloutDataFailure(f"{place}, turn {trajectory.turn_count}: the policy returned {error}") from error
        except RolloutFailure:
            raise
        except Exception as error:
            raise _generation_failure(error, place) from error
        trajectory.add_generation(message, length, facts)

    async def _whole_turn(self, trajectory: Trajectory, place: str) -> tuple[Message, dict[str, Any]]:
        """What the policy says until it ends by itself, however often it is stopped on the way."""
        parts: list[Message] = []
        log, seconds = trajectory.message_log, self.timeouts.generation_s
        empty_handed = 0
        while True:
            if self.gate.is_shut:
                await self.gate.opened()
            answer = self._generate_response(log + parts if parts else log, trajectory.stop_strings, parts)
            message, _, facts = await within(
                seconds, answer, lambda: _took_too_long("a generation", "generation_s", seconds, place)
            )
            if not facts["aborted"]:
                break
            if len(message["token_ids"]):
                parts.append(message)
                empty_handed = 0
            elif not self.gate.is_shut:
                empty_handed += 1
                await _pause_or_give_up(empty_handed)
            is_full = num_tokens(log + parts) >= self.max_seq_len
            if parts and (is_full or self._tokens_left(parts) == 0):
                message, facts = parts.pop(), {"truncated": True, "reason": "max_seq_len" if is_full else "generator"}
                break
        return (joined([*parts, message], self.tokenizer, self.mask_interrupted) if parts else message), facts

    def _tokens_left(self, parts: list[Message]) -> int | None:
        """How many tokens the policy may still generate in this turn, where that is known here."""
        most = self.overrides.max_new_tokens or self._most_new_tokens
        return None if most is None else max(0, most - num_tokens(parts))

    async def _generate_response(
        self, message_log: MessageLog, stop_strings: list[str] | None, parts: list[Message] | None = None
    ) -> tuple[Message, Any, dict[str, Any]]:
        """The policy's next message, the lengths of its input [1], and what the generator told about it.

        `parts`, the end of the log, is what it has said of this message before it was stopped.
        """
        torch = require_torch("the native rollout path")
        input_ids = torch.cat([token_tensor(message["token_ids"]) for message in message_log]).unsqueeze(0)
        input_lengths = torch.tensor([input_ids.shape[1]], dtype=torch.int32)
        asked: GenerationDatumSpec = {
            "input_ids": input_ids,
            "input_lengths": input_lengths,
            "stop_strings": [stop_strings],
        }
        if self.overrides.temperature is not None:
            asked["temperature"] = self.overrides.temperature
        if self.overrides.max_new_tokens is not None:
            asked["max_new_tokens"] = self.overrides.max_new_tokens
        if parts:
            asked["generated_so_far"] = num_tokens(parts)
            left = self._tokens_left(parts)
            if left is not None:
                asked["max_new_tokens"] = left
        version = self.gate.version
        output, is_aborted = await self._output(asked, input_ids)
        if output is None:
            return _nothing_said(), input_lengths, {"truncated": False, "aborted": True}
        generated = generated_part(output, input_ids)
        token_ids = token_tensor(part_of(output["output_ids"][0], generated))
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": text, "token_ids": token_ids}
        message["weight_versions"] = versions_told(output) or [version, self.gate.version]
        if "logprobs" in output:
            message["generation_logprobs"] = logprob_tensor(part_of(output["logprobs"][0], generated))
            require_sound_log_probs(message["generation_logprobs"])
        facts: dict[str, Any] = {
            "truncated": "truncated" in output and bool(as_list(output["truncated"])[0]),
            "gen_leader_worker_idx": leader_worker(output.get("gen_leader_worker_idx")),
            "aborted": is_aborted,
        }
        return message, input_lengths, facts

    async def _output(self, asked: GenerationDatumSpec, input_ids: Any) -> tuple[GenerationOutputSpec | None, bool]:
        """The generator's last output, and whether it was stopped before its end; None when it then had nothing."""
        output: GenerationOutputSpec | None = None
        how = {} if self.overrides.greedy is None else {"greedy": self.overrides.greedy}

        async def generate() -> None:
            nonlocal output
            async for _, latest in self.policy_generation.generate_async(asked, **how):
                output = latest

        try:
            await self.gate.run(generate)
        except GenerationInterrupted:
            return (output if is_sound(output, input_ids) else None), True
        if output is None:
            raise RolloutDataFailure("the generator yielded no output; it must yield one per row")
        return output, "aborted" in output and bool(as_list(output["aborted"])[0])

    async def _step_environment(self, trajectory: Trajectory, task_name: str, place: str) -> None:
        """Hand the conversation, without its tokens, to the environment and append its answer."""
        if task_name not in self.task_to_env:
            known = ", ".join(map(repr, self.task_to_env)) or "none"
            raise ValueError(f"{place}: there is no environment for task {task_name!r}; known tasks: {known}")
        conversation = [{key: message[key] for key in ("role", "content")} for message in trajectory.message_log]
        seconds = self.timeouts.env_s
        try:
            answer = call(self.task_to_env[task_name].step, [conversation], [trajectory.env_info])
            step = await within(seconds, answer, lambda: _took_too_long("an environment step", "env_s", seconds, place))
        except RolloutFailure:
            raise
        except Exception as error:
            error.add_note(f"raised by the environment of task {task_name!r} for {place}")
            raise
        step = EnvironmentReturn(*step)
        encoded = self.tokenizer(step.observations[0]["content"], add_special_tokens=False, return_tensors="pt")
        reward = reward_of_one(step.rewards, f"{place}: the last step", self.reward_weights)
        trajectory.add_step(step, reward, encoded["input_ids"][0])

    def _aggregate_rollout_metrics(
        self, completions: list[Completion], all_sample_metrics: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return native_metrics(completions, all_sample_metrics)


async def _pause_or_give_up(empty_handed: int) -> None:
    """Wait before a generation that was ended although nobody paused, and had said nothing, is asked for again."""
    if empty_handed > _MOST_EMPTY_HANDED:
        raise GenerationUnavailable(
            f"the generator ended {empty_handed} generations in a row as aborted, with nothing said, although the "
            "manager is not paused; pause() the manager before the engine is stopped"
        )
    await asyncio.sleep(min(1.0, 0.05 * 2**empty_handed))


def _split_of(overrides: RolloutOverrides) -> dict[str, str]:
    return {} if overrides.split is None else {"split": overrides.split}


def _nothing_said() -> Message:
    return {
        "role": "assistant",
        "content": "",
        "token_ids": token_tensor([]),
        "generation_logprobs": logprob_tensor([]),
    }


def _took_too_long(what: str, setting: str, seconds: float | None, place: str) -> RolloutTimeout:
    return RolloutTimeout(
        f"{place}: {what} did not end within {setting}={seconds:g} s; RolloutTimeouts({setting}=...) allows more"
    )


def _generation_failure(error: Exception, place: str) -> RolloutFailure:
    is_infra = is_ray_error(error) or classify_rollout_failure(error) is FailureClass.INFRA
    failure = GenerationUnavailable if is_infra else RolloutDataFailure
    return failure(f"{place}: generation failed: {type(error).__name__}: {error}")
