"""GRPO in small, complete: a policy learns to add from nothing but rewards, on a CPU, in seconds.

    python docs/examples/tiny_grpo.py native      # generation and environment in this process
    python docs/examples/tiny_grpo.py servers     # an agent, an environment and a model server, as for a large policy

Both make the same `RolloutManager` calls and train with the same loop; only what stands behind the manager differs.
The last line on stdout is a JSON object with the accuracy on sums that were never trained on, before and after.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from resources_servers.tiny_arithmetic.scoring import score
from tiny_policy import NumberLinePolicy, PolicyGeneration, Sampler, ToyTokenizer
from tiny_policy_server import MAX_MODEL_LEN, chat_app, serving
from torch.nn.utils.rnn import pad_sequence

from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.groups import group_advantages, prompt_groups, with_signal
from nemo_gym.rl.interfaces import DatumSpec, EnvironmentReturn, PromptGroupRecord
from nemo_gym.rl.rollout_manager import RolloutManager, RolloutRetryPolicy, RolloutTimeouts

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS = 4
GROUP_SIZE = 8
PROMPTS_PER_STEP = 12
STEPS = 20
UPDATES_PER_STEP = 8
LEARNING_RATE = 0.1
CLIP = 0.4
HELD_OUT = {(0, 7), (1, 4), (2, 6), (3, 5), (2, 2), (1, 1)}
"""Pairs that are never trained on, in either order."""

ALL = [(a, b) for a in range(10) for b in range(10 - a)]
TRAINED = [pair for pair in ALL if tuple(sorted(pair)) not in HELD_OUT]
TESTED = [pair for pair in ALL if tuple(sorted(pair)) in HELD_OUT]


class ArithmeticEnvironment:
    """An environment of the native path: one step, and the conversation is over."""

    def step(self, message_log_batch: list[list[dict[str, str]]], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        """Score the last message of every conversation."""
        rewards = [
            score(info["question"], log[-1]["content"]) for log, info in zip(message_log_batch, metadata, strict=True)
        ]
        count = len(rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=[None] * count,
            next_stop_strings=None,
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(count, dtype=torch.bool),
        )


def sample_of(pair: tuple[int, int], tokenizer: ToyTokenizer) -> DatumSpec:
    """The prompt for a sum; its `extra_env_info` is the row that the servers' path sends."""
    question = f"{pair[0]}+{pair[1]}="
    messages = [{"role": "user", "content": question}]
    token_ids = torch.tensor(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    row = {
        "question": question,
        "responses_create_params": {"input": messages},
        "agent_ref": {"name": "tiny_arithmetic_agent"},
    }
    return {
        "idx": ALL.index(pair),
        "message_log": [{"role": "user", "content": question, "token_ids": token_ids}],
        "extra_env_info": row,
        "task_name": "arithmetic",
    }


@contextmanager
def native_manager(sampler: Sampler, tokenizer: ToyTokenizer) -> Iterator[RolloutManager]:
    """A manager that generates and scores in this process."""
    yield RolloutManager(
        tokenizer,
        {"arithmetic": ArithmeticEnvironment()},
        num_generations_per_prompt=GROUP_SIZE,
        max_seq_len=MAX_MODEL_LEN,
        max_rollout_turns=1,
        policy_generation=PolicyGeneration(sampler, MAX_NEW_TOKENS),
    )


@contextmanager
def servers_manager(sampler: Sampler, tokenizer: ToyTokenizer) -> Iterator[RolloutManager]:
    """A manager that sends rows to an agent, which asks the policy through its Chat Completions endpoint."""
    os.environ["NEMO_GYM_EXTRA_ROOTS"] = str(HERE)
    config = {"config_paths": ["resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml"]}
    with (
        serving(chat_app(sampler, tokenizer)) as base_url,
        NemoGym({"model_name": "tiny", "base_urls": [base_url], "initial_global_config_dict": config}) as gym,
    ):
        yield RolloutManager(
            tokenizer,
            {"nemo_gym": gym},
            num_generations_per_prompt=GROUP_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            generation_config={
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": None,
                "max_new_tokens": MAX_NEW_TOKENS,
                "stop_strings": None,
                "stop_token_ids": None,
            },
            use_nemo_gym=True,
            timeouts=RolloutTimeouts(rollout_s=60),
            retry_policy=RolloutRetryPolicy.single_attempt(max_gym_row_attempts=2),
        )


class Trainer:
    """The part that learns: a clipped policy gradient over whole groups."""

    def __init__(self, policy: NumberLinePolicy) -> None:
        self.policy = policy
        slower = [{"params": [policy.log_width], "lr": 0.02}, {"params": [policy.follows], "lr": 0.01}]
        self.optimizer = torch.optim.Adam([{"params": [policy.worth]}, *slower], LEARNING_RATE)

    def update(self, groups: Iterable[PromptGroupRecord], progress: float) -> None:
        """Learn from the groups of one step; `progress` goes from 0 to 1 over the training."""
        batch = batch_of(groups)
        if batch is not None:
            self.update_on(batch, progress)

    def update_on(self, batch: "Batch", progress: float) -> None:
        """The same, from a batch of completions."""
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress / 2)
        for _ in range(UPDATES_PER_STEP):
            self.optimizer.zero_grad()
            self._loss(batch).backward()
            self.optimizer.step()

    def _loss(self, batch: "Batch") -> torch.Tensor:
        """The clipped objective over exactly the tokens that the policy sampled."""
        ratio = torch.exp(self.policy.log_probs(batch.ids) - batch.log_probs)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        return losses[batch.sampled].mean()


class Batch(NamedTuple):
    """The completions of some groups, one row each, padded on the right."""

    ids: torch.Tensor
    log_probs: torch.Tensor
    """As they were when the tokens were sampled; for all tokens but the first."""
    sampled: torch.Tensor
    """Which tokens, of all but the first, the policy sampled."""
    advantages: torch.Tensor


def batch_of(groups: Iterable[PromptGroupRecord]) -> Batch | None:
    """All completions of the groups; None when there are none."""
    ids, log_probs, sampled, advantages = [], [], [], []
    for group in groups:
        for completion, advantage in zip(group.completions, group_advantages(group), strict=True):
            log = completion.message_log
            ids.append(torch.cat([message["token_ids"] for message in log]))
            unknown = [torch.zeros(len(message["token_ids"])) for message in log]
            known = [message.get("generation_logprobs", other) for message, other in zip(log, unknown, strict=True)]
            log_probs.append(torch.cat(known)[1:])
            by_policy = [
                other.bool() | (message["role"] == "assistant") for message, other in zip(log, unknown, strict=True)
            ]
            sampled.append(torch.cat(by_policy)[1:])
            advantages.append([advantage])
    if not ids:
        return None
    columns = [pad_sequence(column, batch_first=True) for column in (ids, log_probs, sampled)]
    return Batch(*columns, torch.tensor(advantages))


async def run(
    manager: RolloutManager, pairs: list[tuple[int, int]], tokenizer: ToyTokenizer
) -> list[PromptGroupRecord]:
    """The groups of some sums, a few of them in flight at a time."""
    groups: AsyncIterator[PromptGroupRecord] = prompt_groups(
        manager, [sample_of(pair, tokenizer) for pair in pairs], max_in_flight=8, in_order=True
    )
    return [group async for group in groups]


def accuracy_of(groups: list[PromptGroupRecord]) -> float:
    """The share of completions that are exactly right."""
    rewards = [completion.reward for group in groups for completion in group.completions]
    return sum(reward == 1.0 for reward in rewards) / len(rewards)


async def train(manager: RolloutManager, policy: NumberLinePolicy, tokenizer: ToyTokenizer) -> dict[str, float]:
    """Train, and say how well sums that were never trained on are answered before and after."""
    choose, trainer = random.Random(0), Trainer(policy)
    before = accuracy_of(await run(manager, TESTED, tokenizer))
    for step in range(STEPS):
        groups = await run(manager, choose.sample(TRAINED, PROMPTS_PER_STEP), tokenizer)
        trainer.update(with_signal(groups), step / STEPS)
        print(f"step {step + 1}: accuracy {accuracy_of(groups):.2f}", file=sys.stderr)  # noqa: T201
    after = accuracy_of(await run(manager, TESTED, tokenizer))
    return {"before": before, "after": after, "chance": 1 / 10}


def main(path: str) -> None:
    """Train by one of the two paths."""
    torch.set_num_threads(1)
    policy, tokenizer = NumberLinePolicy(), ToyTokenizer()
    managers = {"native": native_manager, "servers": servers_manager}
    with managers[path](Sampler(policy), tokenizer) as manager:
        print(json.dumps(asyncio.run(train(manager, policy, tokenizer))))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "native")
