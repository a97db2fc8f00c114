"""The native path: this process generates, steps the environment, and repeats."""

from typing import Any

from nemo_gym.rl.calls import call, deadline, gather_or_cancel
from nemo_gym.rl.failures import (
    FailureClass,
    GenerationUnavailable,
    RolloutDataFailure,
    RolloutFailure,
    RolloutTimeout,
    classify_rollout_failure,
    is_ray_error,
)
from nemo_gym.rl.interfaces import (
    Completion,
    DatumSpec,
    EnvironmentReturn,
    GenerationInterface,
    GenerationOutputSpec,
    Message,
    MessageLog,
    PromptGroupRecord,
    Timer,
    Tokenizer,
)
from nemo_gym.rl.metrics import native_metrics
from nemo_gym.rl.retry import RolloutTimeouts
from nemo_gym.rl.rewards import reward_of_one
from nemo_gym.rl.tensors import as_list, has_nan, logprob_tensor, num_tokens, require_torch, token_tensor
from nemo_gym.rl.trajectory import Trajectory, leader_worker

UNLIMITED_TURNS = 999_999


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

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt.

        Raises:
            RolloutFailure: the policy could not answer, or something took too long.
            Exception: whatever the environment raised. Then, too, no attempt is left running.
        """
        timer = Timer()
        with timer.time("timing/rollout/total"):
            with timer.time("timing/rollout/run_rollouts"):
                indices = range(self.num_generations_per_prompt)
                finished = await gather_or_cancel([self._run_single_rollout(input_sample, index) for index in indices])
            completions = [completion for completion, _ in finished]
            with timer.time("timing/rollout/aggregate_metrics"):
                metrics = self._aggregate_rollout_metrics(completions, [numbers for _, numbers in finished])
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=input_sample["message_log"],
            extra_env_info=input_sample["extra_env_info"],
            metadata={"task_name": input_sample["task_name"]},
            completions=completions,
            rollout_metrics={**metrics, **timer.get_timing_metrics(reduction_op="sum")},
        )

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
            trajectory.add_generation(_nothing_said(), length, {"truncated": True})
            return
        seconds = self.timeouts.generation_s
        try:
            async with deadline(seconds, lambda: _took_too_long("a generation", "generation_s", seconds, place)):
                message, lengths, facts = await self._generate_response(trajectory.message_log, trajectory.stop_strings)
        except RolloutFailure:
            raise
        except Exception as error:
            raise _generation_failure(error, place) from error
        if has_nan([message]):
            raise RolloutDataFailure(
                f"{place}: the policy returned NaN log-probs for {len(message['token_ids'])} tokens of turn "
                f"{trajectory.turn_count}; look for overflow in its logits"
            )
        trajectory.add_generation(message, int(as_list(lengths)[0]), facts)

    async def _generate_response(
        self, message_log: MessageLog, stop_strings: list[str] | None
    ) -> tuple[Message, Any, dict[str, Any]]:
        """The policy's next message, the lengths of its input [1], and what the generator told about it."""
        torch = require_torch("the native rollout path")
        input_ids = torch.cat([token_tensor(message["token_ids"]) for message in message_log]).unsqueeze(0)
        input_lengths = torch.tensor([input_ids.shape[1]], dtype=torch.int32)
        output: GenerationOutputSpec | None = None
        async for _, latest in self.policy_generation.generate_async(
            {"input_ids": input_ids, "input_lengths": input_lengths, "stop_strings": [stop_strings]}
        ):
            output = latest
        if output is None:
            raise RolloutDataFailure("the generator yielded no output; it must yield one per row")
        generated = slice(input_ids.shape[1], int(as_list(output["unpadded_sequence_lengths"])[0]))
        token_ids = token_tensor(output["output_ids"][0, generated])
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": text, "token_ids": token_ids}
        if "logprobs" in output:
            message["generation_logprobs"] = logprob_tensor(output["logprobs"][0, generated])
        facts: dict[str, Any] = {
            "truncated": "truncated" in output and bool(as_list(output["truncated"])[0]),
            "gen_leader_worker_idx": leader_worker(output.get("gen_leader_worker_idx")),
        }
        return message, input_lengths, facts

    async def _step_environment(self, trajectory: Trajectory, task_name: str, place: str) -> None:
        """Hand the conversation, without its tokens, to the environment and append its answer."""
        if task_name not in self.task_to_env:
            known = ", ".join(map(repr, self.task_to_env)) or "none"
            raise ValueError(f"{place}: there is no environment for task {task_name!r}; known tasks: {known}")
        conversation = [{key: message[key] for key in ("role", "content")} for message in trajectory.message_log]
        seconds = self.timeouts.env_s
        try:
            async with deadline(seconds, lambda: _took_too_long("an environment step", "env_s", seconds, place)):
                step = await call(self.task_to_env[task_name].step, [conversation], [trajectory.env_info])
        except RolloutFailure:
            raise
        except Exception as error:
            error.add_note(f"raised by the environment of task {task_name!r} for {place}")
            raise
        step = EnvironmentReturn(*step)
        encoded = self.tokenizer(step.observations[0]["content"], add_special_tokens=False, return_tensors="pt")
        trajectory.add_step(step, reward_of_one(step.rewards, f"{place}: the last step"), encoded["input_ids"][0])

    def _aggregate_rollout_metrics(
        self, completions: list[Completion], all_sample_metrics: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return native_metrics(completions, all_sample_metrics)


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
