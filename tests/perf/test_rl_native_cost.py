"""What the native path costs beside its arithmetic: one tensor per turn and one concatenation."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from nemo_gym.rl.interfaces import EnvironmentReturn
from nemo_gym.rl.native import AsyncRolloutImpl
from nemo_gym.rl.rollout_manager import RolloutManager
from tests.perf.side_by_side.estimates import Target, hold

torch = pytest.importorskip("torch", reason="the native path works on tensors: install the extra `rl`")

MOST = 1.5
ROUNDS = 7


class Tokens:
    """Decodes nothing and encodes two tokens."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[1, 2]], dtype=torch.int64)}

    def decode(self, token_ids: Any, **_: Any) -> str:
        return "text"


def manager_of(turns: int, tokens: int, rollouts: int) -> RolloutManager:
    tokenizer: Any = Tokens()
    return RolloutManager(tokenizer, {"t": Environment(turns)}, rollouts, 10**9, policy_generation=Policy(tokens))


class Policy:
    """Continues every prompt by the same number of tokens, made before."""

    def __init__(self, tokens: int) -> None:
        self.ids = torch.full((1, tokens), 7, dtype=torch.int64)
        self.logprobs = torch.full((1, tokens), -0.5)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        prompt = data["input_ids"]
        yield (
            0,
            {
                "output_ids": torch.cat([prompt, self.ids], dim=1),
                "logprobs": torch.cat([torch.zeros(prompt.shape), self.logprobs], dim=1),
                "unpadded_sequence_lengths": torch.tensor([prompt.shape[1] + self.ids.shape[1]]),
            },
        )


class Environment:
    """Ends after so many turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        turn = metadata[0]["turn"] + 1
        observation = [{"role": "environment", "content": "go on"}]
        return EnvironmentReturn(observation, [{"turn": turn}], None, [0.5], [turn >= self.turns])


def sample(tokens: int) -> Any:
    log = [{"role": "user", "content": "", "token_ids": torch.ones(tokens, dtype=torch.int64)}]
    return {"idx": 0, "message_log": log, "extra_env_info": {"turn": 0}, "task_name": "t"}


def product(turns: int, tokens: int, rollouts: int) -> Callable[[], Any]:
    manager = manager_of(turns, tokens, rollouts)
    return lambda: asyncio.run(manager.run_rollout(sample(32)))


def stand_in(turns: int, tokens: int, rollouts: int) -> Callable[[], Any]:
    """The same arithmetic and the same awaits, and nothing else."""
    policy, environment, tokenizer = Policy(tokens), Environment(turns), Tokens()

    async def one() -> None:
        state, log = {"turn": 0}, [sample(32)["message_log"][0]["token_ids"].clone()]
        for _ in range(turns):
            prompt = torch.cat(log).unsqueeze(0)
            async for _, output in policy.generate_async({"input_ids": prompt}):
                log.append(torch.tensor(output["output_ids"][0, prompt.shape[1] :].tolist()))
                torch.tensor(output["logprobs"][0, prompt.shape[1] :].tolist())
            step = await environment.step([[{"role": "assistant", "content": tokenizer.decode(log[-1])}]], [state])
            state = step.metadata[0]
            log.append(tokenizer("go on")["input_ids"][0])

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(rollouts)))

    return lambda: asyncio.run(all_of_them())


def cpu_s(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize(("turns", "tokens", "rollouts"), [(1, 200, 256), (4, 200, 128), (1, 32_768, 32)])
def test_what_a_rollout_costs(turns: int, tokens: int, rollouts: int) -> None:
    torch.set_num_threads(1)
    ours, theirs = product(turns, tokens, rollouts), stand_in(turns, tokens, rollouts)
    ours(), theirs()
    target = Target(f"{turns} turns of {tokens} tokens, over the same arithmetic alone", most=MOST)
    hold(lambda: [cpu_s(ours) / cpu_s(theirs)], target, rounds=ROUNDS)


def test_memory_of_long_conversations() -> None:
    """32 turns that end at 32k tokens keep at most twice the tokens' own size alive."""
    turns, tokens, rollouts = 32, 1_024, 16
    manager = manager_of(turns, tokens, rollouts)
    assert isinstance(manager._impl, AsyncRolloutImpl)
    record = asyncio.run(manager.run_rollout(sample(32)))
    gc.collect()
    kept = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for completion in record.completions
        for message in completion.message_log
        for tensor in (message["token_ids"], message.get("generation_logprobs"))
        if tensor is not None
    }
    own = rollouts * (32 * 8 + turns * (tokens * (8 + 4) + 2 * 8))
    print(f"\nkept {sum(kept.values()) / 2**20:.1f} MiB for {own / 2**20:.1f} MiB of tokens and log-probs")
    assert sum(kept.values()) <= 2 * own
