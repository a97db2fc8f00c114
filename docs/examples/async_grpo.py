"""Asynchronous GRPO in small: groups are made while the trainer trains, by a copy of the policy that lags behind.

    python docs/examples/async_grpo.py results/async_grpo      # kill it as you like, and start it again: it goes on

Two things run at once. Makers ask the manager for groups, which go to a `RolloutBuffer`; the trainer takes them from
there. After every step the makers are paused, in the middle of whatever they generate, the new weights are copied to
the policy that they ask, and they go on. What is committed is on the disk, and stays there until a step that used it
has been saved, so a trainer that is killed loses nothing.

The last line on stdout is a JSON object: the accuracy on sums that were never trained on, before and after, and what
became of the groups. `ledger.jsonl` in the folder tells of every group.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tiny_grpo import (
    CLIP,
    GROUP_SIZE,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    TESTED,
    TRAINED,
    UPDATES_PER_STEP,
    ArithmeticEnvironment,
    Trainer,
    accuracy_of,
    run,
    sample_of,
)
from tiny_policy import END, NumberLinePolicy, ToyTokenizer
from tiny_policy_server import MAX_MODEL_LEN

from nemo_gym.rl import (
    BufferedGroup,
    RolloutBuffer,
    RolloutManager,
    StalenessPolicy,
    collate,
    has_signal,
    importance_weights,
    mismatch_metrics,
)

STEPS = 30
GROUPS_PER_STEP = 12
MAKERS = 4
CAPACITY = 24
MAX_AGE = 4
"""Groups begun more than so many weights ago are not trained on. With this capacity none gets as old."""


class Engine:
    """A policy that generates token by token, as an engine does, and tells what it has so far."""

    def __init__(self, policy: NumberLinePolicy) -> None:
        self.policy = policy
        self.generator = torch.Generator().manual_seed(os.getpid())

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the continuation of a row after every token; a pause cancels it, and asks for the rest later."""
        prompt, said, log_probs = data["input_ids"][0].tolist(), list[int](), list[float]()
        for _ in range(MAX_NEW_TOKENS - data.get("generated_so_far", 0)):
            await asyncio.sleep(0.001)
            with torch.no_grad():
                choices = self.policy(torch.tensor(prompt + said))[-1]
            said.append(int(torch.multinomial(choices.exp(), 1, generator=self.generator)))
            log_probs.append(float(choices[said[-1]]))
            yield 0, _output(prompt, said, log_probs)
            if said[-1] == END:
                return


def _output(prompt: list[int], said: list[int], log_probs: list[float]) -> dict[str, Any]:
    return {
        "output_ids": torch.tensor([prompt + said]),
        "logprobs": torch.tensor([[0.0] * len(prompt) + log_probs]),
        "unpadded_sequence_lengths": torch.tensor([len(prompt) + len(said)]),
        "truncated": torch.tensor([said[-1] != END]),
    }


class AsyncTrainer(Trainer):
    """Learns from groups of older weights: how much likelier it would say a token today bounds what that counts."""

    def learn(self, groups: Sequence[BufferedGroup], progress: float) -> dict[str, float]:
        """Learn from the groups of one step; how far the policy had moved since they were made."""
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - 0.8 * progress)
        useful = [group for group in groups if has_signal(group.record)]
        if not useful:
            return {}
        batch = collate(useful)
        old, mask = batch["logprobs"][:, 1:], batch["loss_mask"][:, 1:]
        with torch.no_grad():
            metrics = mismatch_metrics(self.policy.log_probs(batch["input_ids"]), old, mask, cap=1 + CLIP)
        for _ in range(UPDATES_PER_STEP):
            self.optimizer.zero_grad()
            ratio = importance_weights(self.policy.log_probs(batch["input_ids"]), old, mask)
            gain = batch["advantages"].unsqueeze(1)
            worth = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            (-(worth * mask).sum() / mask.sum()).backward()
            self.optimizer.step()
        return metrics


class Run:
    """A training in a folder: its checkpoint, its buffer and its ledger."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.ledger = folder / "checkpoint.pt", folder / "ledger.jsonl"
        self.policy, self.lagging = NumberLinePolicy(), NumberLinePolicy()
        self.trainer, self.step = AsyncTrainer(self.policy), 0
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.policy.load_state_dict(saved["policy"])
            self.trainer.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]
        self.lagging.load_state_dict(self.policy.state_dict())
        self.buffer = RolloutBuffer(capacity=CAPACITY, max_age=MAX_AGE, path=folder / "buffer.ngb")
        self.restored = len(self.buffer)
        self.tokenizer = ToyTokenizer()
        self.manager = RolloutManager(
            self.tokenizer,
            {"arithmetic": ArithmeticEnvironment()},
            num_generations_per_prompt=GROUP_SIZE,
            max_seq_len=MAX_MODEL_LEN,
            max_rollout_turns=1,
            policy_generation=Engine(self.lagging),
            tq_buffer=self.buffer,
        )
        self._announce()

    def save(self) -> None:
        """Keep what the step has learned; only then its groups are done."""
        aside = self.checkpoint.with_suffix(".aside")
        state = {"policy": self.policy.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}
        torch.save({**state, "step": self.step}, aside)
        aside.replace(self.checkpoint)

    async def renew_weights(self) -> None:
        """Give the makers the new weights, while nothing is generated."""
        async with self.manager.paused():
            self.lagging.load_state_dict(self.policy.state_dict())
            self._announce()

    def _announce(self) -> None:
        self.manager.set_weight_version(self.step)
        self.buffer.set_weight_version(self.step)

    def note(self, **facts: Any) -> None:
        """A line for the ledger."""
        with self.ledger.open("a") as file:
            file.write(json.dumps(facts) + "\n")


async def make_groups(run: Run, numbers: "count[int]", choose: random.Random) -> None:
    """Make groups, one after the other, for as long as there is room in the buffer for them."""
    while True:
        sample = sample_of(choose.choice(TRAINED), run.tokenizer)
        sample["idx"] = next(numbers)
        await run.manager.generate_and_push(sample)
        run.note(committed=sample["idx"])


async def train(run: Run) -> None:
    """The steps that are left."""
    staleness = StalenessPolicy(MAX_AGE)
    while run.step < STEPS:
        groups = await run.buffer.take(GROUPS_PER_STEP)
        ages = [group.age(run.step) for group in groups]
        moved = run.trainer.learn(groups, run.step / STEPS)
        run.step += 1
        run.save()
        run.note(step=run.step, trained=[group.record.prompt_idx for group in groups], ages=ages)
        run.buffer.done(groups)
        await run.renew_weights()
        oldest, worth = (
            staleness.ages(groups, run.step)["staleness/max"],
            moved.get("mismatch/effective_sample_size", 1),
        )
        accuracy = accuracy_of([group.record for group in groups])
        words = f"step {run.step}: accuracy {accuracy:.2f}, oldest {oldest:.0f} weights ago, worth {worth:.0%}"
        print(words, file=sys.stderr)  # noqa: T201


async def main(folder: Path) -> dict[str, Any]:
    """Train from where the folder stands, and say how well sums that were never trained on are answered."""
    torch.set_num_threads(1)
    this = Run(folder)
    before = accuracy_of(await run(this.manager, TESTED, this.tokenizer))
    numbers, choose = count(os.getpid() * 1_000_000), random.Random(this.step)
    makers = [asyncio.create_task(make_groups(this, numbers, choose)) for _ in range(MAKERS)]
    await asyncio.wait([asyncio.create_task(train(this)), *makers], return_when=asyncio.FIRST_COMPLETED)
    for maker in makers:
        maker.cancel()
    ended = await asyncio.gather(*makers, return_exceptions=True)
    failed = next((error for error in ended if not isinstance(error, asyncio.CancelledError)), None)
    if failed is not None:
        raise failed
    await this.renew_weights()
    after = accuracy_of(await run(this.manager, TESTED, this.tokenizer))
    gate, stats = this.manager.gate, this.buffer.stats
    facts = {"pauses": gate.pauses, "interrupted": gate.interrupted, "restored": this.restored}
    return {"before": before, "after": after, **facts, "left": len(this.buffer), "too_old": stats.too_old}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/async_grpo")))))  # noqa: T201
