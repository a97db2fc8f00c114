"""The servers' path: the attempts at a prompt are rows for an agent, sent through one `run_rollouts`."""

from copy import deepcopy
from typing import Any

from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.rl.calls import call, deadline
from nemo_gym.rl.failures import GymTransportError, RolloutDataFailure
from nemo_gym.rl.interfaces import (
    Completion,
    DatumSpec,
    GenerationConfig,
    MessageLog,
    PromptGroupRecord,
    Timer,
    Tokenizer,
)
from nemo_gym.rl.metrics import gym_metrics
from nemo_gym.rl.retry import RolloutRetryPolicy, RolloutTimeouts
from nemo_gym.rl.rewards import finite_reward
from nemo_gym.rl.row_dispatch import ROW_INDEX_KEY
from nemo_gym.rl.tensors import has_nan, num_tokens, with_tensors

TASK_NAME = "nemo_gym"
TIMER_PREFIX = "timing/rollout"
_UNSUPPORTED = ("stop_strings", "stop_token_ids", "top_k")


class AsyncNemoGymRolloutImpl:
    """Turns a prompt into rows, and what comes back into completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        task_to_env: dict[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        generation_config: GenerationConfig,
        max_rollout_turns: int | None = None,
        timeouts: RolloutTimeouts | None = None,
        retry_policy: RolloutRetryPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        """`task_to_env["nemo_gym"]` is a `NemoGym`, or the handle of one; `kwargs` is what the other path needs."""
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.num_generations_per_prompt = num_generations_per_prompt
        self.max_seq_len = max_seq_len
        self.generation_config = generation_config
        self.max_rollout_turns = max_rollout_turns
        self.timeouts = timeouts
        self.retry_policy = retry_policy
        self._validate_init_params()

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt.

        Raises:
            GymTransportError: rows never came back.
            RolloutDataFailure: a result cannot be trained on.
        """
        timer = Timer()
        with timer.time(f"{TIMER_PREFIX}/total"):
            inputs = self._build_inputs(input_sample)
            with timer.time(f"{TIMER_PREFIX}/run_rollouts"):
                completions, gym_timing = await self._run_rollouts(inputs, timer, TIMER_PREFIX)
            with timer.time(f"{TIMER_PREFIX}/compute_metrics"):
                metrics = self._compute_rollout_metrics(completions, inputs[0][AGENT_REF_KEY_NAME]["name"])
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=input_sample["message_log"],
            extra_env_info=input_sample["extra_env_info"],
            metadata={"task_name": TASK_NAME},
            completions=completions,
            rollout_metrics={**metrics, **gym_timing, **timer.get_timing_metrics(reduction_op="sum")},
        )

    def _validate_init_params(self) -> None:
        for key in _UNSUPPORTED:
            value = self.generation_config[key]  # type: ignore[literal-required]
            assert not value, (
                f"generation_config[{key!r}] is {value!r}, which is unsupported on the NeMo-Gym path: "
                "the agent decides when to stop; set it to None"
            )
        assert self.max_rollout_turns in (None, 1), (
            f"max_rollout_turns is {self.max_rollout_turns!r}, which is unsupported on the NeMo-Gym path: "
            "the agent takes the turns; set it to None and limit the agent instead"
        )

    def _build_inputs(self, input_sample: DatumSpec) -> list[dict[str, Any]]:
        """One row per attempt, each with its index; the sample itself is left alone."""
        template = deepcopy(input_sample["extra_env_info"]) or {}
        missing = [key for key in (RESPONSES_CREATE_PARAMS_KEY_NAME, AGENT_REF_KEY_NAME) if key not in template]
        if missing:
            raise RolloutDataFailure(
                f"prompt {input_sample['idx']}: extra_env_info lacks {' and '.join(missing)}; "
                "it must be a row as an agent's /run takes it"
            )
        params = template[RESPONSES_CREATE_PARAMS_KEY_NAME]
        params["temperature"] = self.generation_config["temperature"]
        params["top_p"] = self.generation_config["top_p"]
        own_cap = params.get("max_output_tokens")
        cap = self.generation_config["max_new_tokens"]
        params["max_output_tokens"] = cap if own_cap is None else min(cap, own_cap)
        return [{**deepcopy(template), ROW_INDEX_KEY: index} for index in range(self.num_generations_per_prompt)]

    async def _run_rollouts(
        self, inputs: list[dict[str, Any]], timer: Timer, timer_prefix: str
    ) -> tuple[list[Completion], dict[str, Any]]:
        """Completions in row order, and what the environment measured."""
        options = {"timeouts": self.timeouts, "retry_policy": self.retry_policy}
        given = {name: value for name, value in options.items() if value is not None}
        seconds = self.timeouts.rollout_s if self.timeouts else None
        every_row = [row[ROW_INDEX_KEY] for row in inputs]
        async with deadline(seconds, lambda: _never_came_back(every_row, f"within rollout_s={seconds:g} s")):
            results, timing = await call(
                self._environment().run_rollouts, inputs, self.tokenizer, timer_prefix, **given
            )
        missing = [index for index in every_row if index >= len(results) or results[index] is None]
        if missing:
            raise _never_came_back(missing, "although the environment has finished")
        return [self._result_to_completion(result) for result in results], timing

    def _environment(self) -> Any:
        if TASK_NAME not in self.task_to_env:
            known = ", ".join(map(repr, self.task_to_env)) or "nothing"
            raise ValueError(f"task_to_env has {known} but no {TASK_NAME!r}; put a NemoGym there")
        return self.task_to_env[TASK_NAME]

    def _result_to_completion(self, result: dict[str, Any]) -> Completion:
        message_log: MessageLog = with_tensors(result["message_log"])
        if has_nan(message_log):
            raise RolloutDataFailure("a completion has NaN log-probs; look for overflow in the policy's logits")
        full_result = result["full_result"]
        return Completion(
            message_log=message_log,
            env_extras=full_result,
            truncated=num_tokens(message_log) == self.max_seq_len,
            reward=finite_reward(full_result.get("reward"), "a result"),
        )

    def _compute_rollout_metrics(self, completions: list[Completion], agent_name: str) -> dict[str, Any]:
        return gym_metrics(completions, agent_name)


def _never_came_back(rows: list[int], when: str) -> GymTransportError:
    return GymTransportError(f"rows {rows} never came back from the environment {when}")
