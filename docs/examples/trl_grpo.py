"""TRL's GRPOTrainer on rollouts of a `RolloutManager`: TRL trains, the manager generates and asks the environment.

    pip install 'trl>=1.16'
    python docs/examples/trl_grpo.py

`rollout_func` is all that connects them. TRL gives it the prompts, each as often as it wants completions of it, and
gets token ids, log-probs and a mask of what the policy said. The rewards are the environment's, which ride along as a
column.
The last line on stdout is a JSON object with the mean reward in the first and in the last steps.
"""

import asyncio
import json
import os
import sys
import tempfile
from itertools import groupby
from typing import Any

import torch
from datasets import Dataset
from tiny_transformer import LuckyDigits, TransformerGeneration, tiny_model, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from nemo_gym.rl import RolloutManager, RolloutOverrides, token_sequence
from nemo_gym.rl.interfaces import DatumSpec

STEPS = 20
REWARD_COLUMN = "environment_reward"


class ManagerRollouts:
    """A `rollout_func` for TRL: any manager, native or on servers, and a sample for every prompt."""

    def __init__(self, manager: RolloutManager, tokenizer: Any) -> None:
        self.manager, self.tokenizer = manager, tokenizer

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """One completion for every prompt in the list, in its order."""
        completions = asyncio.run(self._completions(prompts, trainer.state.global_step))
        sequences = [token_sequence(completion) for completion in completions]
        return {
            "prompt_ids": [sequence.prompt_ids for sequence in sequences],
            "completion_ids": [sequence.response_ids for sequence in sequences],
            "logprobs": [sequence.response_logprobs for sequence in sequences],
            "env_mask": [sequence.response_mask for sequence in sequences],
            REWARD_COLUMN: [completion.reward for completion in completions],
        }

    async def _completions(self, prompts: list[Any], step: int) -> list[Any]:
        self.manager.set_weight_version(step)
        repeated = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        groups = await asyncio.gather(
            *(
                self.manager.run_rollout(self._sample(index, prompt), RolloutOverrides(n=times))
                for index, (prompt, times) in enumerate(repeated)
            )
        )
        return [completion for group in groups for completion in group.completions]

    def _sample(self, index: int, prompt: list[dict[str, str]]) -> DatumSpec:
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        message = {"role": "user", "content": prompt[-1]["content"], "token_ids": torch.tensor(ids)}
        return {"idx": index, "message_log": [message], "extra_env_info": {}, "task_name": "lucky"}


def environment_reward(environment_reward: list[float], **_: Any) -> list[float]:
    """TRL asks functions for rewards; these are known already."""
    return environment_reward


def main() -> dict[str, float]:
    """Train, and compare the first rewards with the last."""
    torch.set_num_threads(1)
    tokenizer, model = tiny_tokenizer(), tiny_model()
    manager = RolloutManager(
        tokenizer,
        {"lucky": LuckyDigits()},
        num_generations_per_prompt=8,
        max_seq_len=64,
        policy_generation=TransformerGeneration(model),
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            max_steps=STEPS,
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=16,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=environment_reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "digit"}]] * 64}),
            processing_class=tokenizer,
            rollout_func=ManagerRollouts(manager, tokenizer),
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(" ".join(f"{reward:.2f}" for reward in rewards), file=sys.stderr)  # noqa: T201
    return {"first": sum(rewards[:3]) / 3, "last": sum(rewards[-3:]) / 3}


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    print(json.dumps(main()))  # noqa: T201
