"""PUBLIC: `RolloutManager`, one prompt in, a group of completions out.

    manager = RolloutManager(tokenizer, {"math": environment}, num_generations_per_prompt=8, max_seq_len=4096,
                             policy_generation=policy)
    group = await manager.run_rollout(sample)

Two implementations stand behind it: the native path generates and steps the environment in this process, the
servers' path (`use_nemo_gym=True`) sends rows to agents. A group is complete or an error; there is nothing between.
"""

import asyncio
import logging
from typing import Any, TypeAlias

from nemo_gym.rl.failures import classify_rollout_failure
from nemo_gym.rl.gym_path import AsyncNemoGymRolloutImpl
from nemo_gym.rl.interfaces import DatumSpec, GenerationConfig, GenerationInterface, PromptGroupRecord, Tokenizer
from nemo_gym.rl.native import UNLIMITED_TURNS, AsyncRolloutImpl
from nemo_gym.rl.retry import Budget, RolloutRetryPolicy, RolloutStats, RolloutTimeouts

__all__ = [
    "AsyncNemoGymRolloutImpl",
    "AsyncRolloutImpl",
    "RolloutManager",
    "RolloutRetryPolicy",
    "RolloutStats",
    "RolloutTimeouts",
    "TokenizerType",
]

logger = logging.getLogger(__name__)

TokenizerType: TypeAlias = Tokenizer
"""Any tokenizer with the methods used here; those of transformers are."""


class RolloutManager:
    """Runs groups; as many at once as the caller awaits."""

    def __init__(
        self,
        tokenizer: TokenizerType,
        task_to_env: dict[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        max_rollout_turns: int | None = None,
        policy_generation: GenerationInterface | None = None,
        generation_config: GenerationConfig | None = None,
        use_nemo_gym: bool = False,
        *,
        timeouts: RolloutTimeouts | None = None,
        retry_policy: RolloutRetryPolicy | None = None,
    ) -> None:
        """`retry_policy` says how often a failed group is tried again: not at all when it is None."""
        assert num_generations_per_prompt >= 1, (
            f"num_generations_per_prompt must be >= 1, but is {num_generations_per_prompt}"
        )
        assert use_nemo_gym or policy_generation is not None, (
            "policy_generation is required on the native path; pass a generator, or use_nemo_gym=True"
        )
        assert not use_nemo_gym or generation_config is not None, (
            "generation_config is required on the NeMo-Gym path: it holds temperature, top_p and max_new_tokens"
        )
        self.stats = RolloutStats()
        self._retry_policy = retry_policy or RolloutRetryPolicy.single_attempt()
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "task_to_env": task_to_env,
            "num_generations_per_prompt": num_generations_per_prompt,
            "max_seq_len": max_seq_len,
            "max_rollout_turns": max_rollout_turns,
            "policy_generation": policy_generation,
            "generation_config": generation_config,
            "timeouts": timeouts,
            "retry_policy": retry_policy,
        }
        if not use_nemo_gym and max_rollout_turns is None:
            options["max_rollout_turns"] = UNLIMITED_TURNS
        self._impl = AsyncNemoGymRolloutImpl(**options) if use_nemo_gym else AsyncRolloutImpl(**options)

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt, tried again within the budgets of the retry policy.

        Raises:
            RolloutFailure: the last attempt's failure, or whatever an environment of the native path raised.
        """
        budget = Budget(self._retry_policy)
        while True:
            try:
                record = await self._impl.run_rollout(input_sample)
            except Exception as error:  # noqa: BLE001 - raised again unless a budget allows another attempt
                await self._pause_or_give_up(error, budget, input_sample)
            else:
                self.stats.completed += 1
                self.stats.gym_row_redispatches += int(record.rollout_metrics.get("gym_row_redispatches", 0))
                return record

    async def _pause_or_give_up(self, error: Exception, budget: Budget, sample: DatumSpec) -> None:
        """Wait before the next attempt, or raise the error when the budget of its class is used up."""
        kind = classify_rollout_failure(error)
        pause_s = budget.pause_after(kind)
        if pause_s is None:
            self.stats.given_up[kind][type(error).__name__] += 1
            raise error
        self.stats.retries[kind][type(error).__name__] += 1
        logger.warning("prompt %s is tried again in %g s: %s failure: %s", sample["idx"], pause_s, kind.value, error)
        await asyncio.sleep(pause_s)
