"""An agent loop as verl runs them, around a `RolloutManager`: verl owns the engine and the batches.

    python docs/examples/verl_agent_loop.py

verl makes one agent loop per sample and awaits its `run`. The loop is given a server manager, whose `generate`
continues token ids, and answers with token ids, a mask of what the policy said, log-probs and the reward.
`ManagerAgentLoop` is all of that; nothing in it is about this example. Below it stands what verl would do, in small:
many loops at once, and a step of GRPO on what they return. `verl_loop.py` is the same loop as verl itself loads it.

The last line on stdout is a JSON object with the accuracy on sums that were never trained on, before and after.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import torch
from tiny_grpo import GROUP_SIZE, PROMPTS_PER_STEP, STEPS, TESTED, TRAINED, ArithmeticEnvironment, Batch, Trainer
from tiny_policy import NumberLinePolicy, Sampler, ToyTokenizer
from tiny_policy_server import MAX_MODEL_LEN
from torch.nn.utils.rnn import pad_sequence

from nemo_gym.rl import RolloutManager, RolloutOverrides, group_advantages, token_sequence
from nemo_gym.rl.interfaces import DatumSpec

MAX_NEW_TOKENS = 4


@dataclass
class AgentLoopOutput:
    """What an agent loop answers, with the names that verl uses."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManagerGeneration:
    """verl's server manager as a `GenerationInterface`: token ids there and back, one request id per conversation."""

    def __init__(self, server_manager: Any, sampling_params: dict[str, Any]) -> None:
        self._server_manager, self._sampling_params = server_manager, sampling_params
        self._request_id = uuid4().hex
        self.seconds = 0.0

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the continuation of the one row there is."""
        prompt = data["input_ids"][0].tolist()
        began_s = time.monotonic()
        said = await self._server_manager.generate(
            request_id=self._request_id, prompt_ids=prompt, sampling_params=self._sampling_params
        )
        self.seconds += time.monotonic() - began_s
        output = {
            "output_ids": torch.tensor([prompt + said.token_ids]),
            "unpadded_sequence_lengths": torch.tensor([len(prompt) + len(said.token_ids)]),
        }
        if said.log_probs is not None:
            output["logprobs"] = torch.tensor([[0.0] * len(prompt) + said.log_probs])
        yield 0, output


class ManagerAgentLoop:
    """One conversation: the manager takes the turns, the environment among `environments` scores them."""

    output_type: ClassVar[Any] = AgentLoopOutput

    def __init__(
        self,
        server_manager: Any,
        tokenizer: Any,
        environments: dict[str, Any],
        max_model_len: int,
        response_length: int | None = None,
    ) -> None:
        """Take at most `response_length` tokens after the prompt into an answer; all of them when it is None."""
        self.server_manager, self.tokenizer = server_manager, tokenizer
        self.environments, self.max_model_len = environments, max_model_len
        self.response_length = response_length

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """One attempt at a row of the data set: `raw_prompt` is a conversation, `data_source` names the environment."""
        generation = ServerManagerGeneration(self.server_manager, sampling_params)
        manager = RolloutManager(self.tokenizer, self.environments, 1, self.max_model_len, policy_generation=generation)
        messages = list(row["raw_prompt"])
        ids = await self.prompt_ids(messages)
        message = {"role": "user", "content": messages[-1]["content"], "token_ids": torch.tensor(ids)}
        sample: DatumSpec = {
            "idx": row.get("index", 0),
            "message_log": [message],
            "extra_env_info": row.get("extra_info"),
            "task_name": row["data_source"],
        }
        group = await manager.run_rollout(sample, RolloutOverrides(n=1))
        completion = group.completions[0]
        if completion.mask_reason is not None:
            raise ValueError(f"{completion.mask_reason}; leave such rows out (data.filter_overlong_prompts=true)")
        sequence = token_sequence(completion)
        return self.output_type(
            prompt_ids=sequence.prompt_ids,
            response_ids=sequence.response_ids[: self.response_length],
            response_mask=sequence.response_mask[: self.response_length],
            response_logprobs=sequence.response_logprobs[: self.response_length],
            reward_score=completion.reward,
            num_turns=len(completion.message_log),
            metrics={"generate_sequences": generation.seconds, "tool_calls": 0.0},
            extra_fields={"truncation_reason": completion.truncation_reason},
        )

    async def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt; without `return_dict=False`, transformers 5 answers with a mapping."""
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids


class TokenOutput(NamedTuple):
    """What a server manager answers."""

    token_ids: list[int]
    log_probs: list[float] | None


class TinyServerManager:
    """In the place of verl's: the tiny policy, asked with token ids."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Continue token ids."""
        said = self._sampler.sample(prompt_ids, sampling_params["max_tokens"])
        return TokenOutput(said.token_ids, said.log_probs)


def row_of(pair: tuple[int, int]) -> dict[str, Any]:
    """A row of the data set."""
    question = f"{pair[0]}+{pair[1]}="
    messages = [{"role": "user", "content": question}]
    return {"raw_prompt": messages, "data_source": "arithmetic", "extra_info": {"question": question}}


async def outputs_of(loop: ManagerAgentLoop, pairs: Sequence[tuple[int, int]]) -> list[list[AgentLoopOutput]]:
    """The attempts at every row, all of them at once."""

    async def group(pair: tuple[int, int]) -> list[AgentLoopOutput]:
        return await asyncio.gather(
            *(loop.run({"max_tokens": MAX_NEW_TOKENS}, **row_of(pair)) for _ in range(GROUP_SIZE))
        )

    return await asyncio.gather(*map(group, pairs))


def batch_of(groups: list[list[AgentLoopOutput]]) -> Batch:
    """What verl's trainer makes of them."""
    ids, log_probs, sampled, advantages = [], [], [], []
    for group in groups:
        for output, advantage in zip(group, group_advantages([it.reward_score or 0.0 for it in group]), strict=True):
            before = len(output.prompt_ids) - 1
            ids.append(torch.tensor(output.prompt_ids + output.response_ids))
            log_probs.append(torch.tensor([0.0] * before + (output.response_logprobs or [])))
            sampled.append(torch.tensor([False] * before + [bool(it) for it in output.response_mask]))
            advantages.append([advantage])
    columns = [pad_sequence(column, batch_first=True) for column in (ids, log_probs, sampled)]
    return Batch(*columns, torch.tensor(advantages))


def accuracy_of(groups: list[list[AgentLoopOutput]]) -> float:
    """The share of attempts that are exactly right."""
    scores = [output.reward_score for group in groups for output in group]
    return sum(score == 1.0 for score in scores) / len(scores)


async def main() -> dict[str, float]:
    """Train, and say how well sums that were never trained on are answered before and after."""
    torch.set_num_threads(1)
    policy, tokenizer, choose = NumberLinePolicy(), ToyTokenizer(), random.Random(0)
    server_manager = TinyServerManager(Sampler(policy))
    loop = ManagerAgentLoop(server_manager, tokenizer, {"arithmetic": ArithmeticEnvironment()}, MAX_MODEL_LEN)
    trainer = Trainer(policy)
    before = accuracy_of(await outputs_of(loop, TESTED))
    for step in range(STEPS):
        groups = await outputs_of(loop, choose.sample(TRAINED, PROMPTS_PER_STEP))
        trainer.update_on(batch_of(groups), step / STEPS)
        print(f"step {step + 1}: accuracy {accuracy_of(groups):.2f}", file=sys.stderr)  # noqa: T201
    return {"before": before, "after": accuracy_of(await outputs_of(loop, TESTED))}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))  # noqa: T201
