"""A policy small enough to train on a CPU in seconds, with a tokenizer of its own.

The policy continues `3+4=` with a digit. It knows from the start that an answer is one digit and then an end; what
the digits are worth it has to find out. Everything a trainer needs of a large policy is here in small: sampling with
log-probs, and log-probs of given tokens.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

MARKS = ("<system>", "<user>", "<assistant>", "<tool>", "<end>")
CHARACTERS = "0123456789+= ."
TOKENS = (*CHARACTERS, *MARKS)
ID_OF = {token: number for number, token in enumerate(TOKENS)}
END = ID_OF["<end>"]
NUM_DIGITS = 10


class ToyTokenizer:
    """One token per character, one per mark; with the methods of a Hugging Face tokenizer that rollouts use."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> dict[str, Any]:
        """The ids of a text; characters it does not know are left out."""
        ids = [ID_OF[character] for character in text if character in ID_OF]
        return {"input_ids": torch.tensor([ids], dtype=torch.int64) if return_tensors == "pt" else ids}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        tokens = (TOKENS[int(token)] for token in token_ids)
        return "".join(token for token in tokens if not (skip_special_tokens and token in MARKS))

    def batch_decode(self, sequences: Sequence[Any], *, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several sequences of ids."""
        return [self.decode(sequence, skip_special_tokens=skip_special_tokens) for sequence in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Every message as its mark, its text and an end; defaults and answers are those of transformers 5."""
        ids: list[int] = []
        for message in conversation:
            ids += [ID_OF[f"<{message['role']}>"], *self(text_of(message))["input_ids"], END]
        if add_generation_prompt:
            ids.append(ID_OF["<assistant>"])
        if not tokenize:
            return self.decode(ids)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


def text_of(message: dict[str, Any]) -> str:
    """What a chat message says; of a tool call, its expression."""
    if message.get("tool_calls"):
        return "".join(json.loads(call["function"]["arguments"])["expression"] for call in message["tool_calls"])
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Sample(NamedTuple):
    """What the policy said."""

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool
    """Whether it was stopped before it had come to an end."""


class NumberLinePolicy(nn.Module):
    """Adds up what the digits so far are worth and answers with a digit near the sum.

    All it has is what each token is worth, how sure it is of sums, and which token follows which.
    """

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Parameter(torch.full((NUM_DIGITS,), 2.25))
        self.log_width = nn.Parameter(torch.tensor(0.5))
        self.follows = nn.Parameter(torch.zeros(len(TOKENS), len(TOKENS)))
        with torch.no_grad():
            self.follows[ID_OF["<assistant>"], :NUM_DIGITS] = 6.0
            self.follows[:NUM_DIGITS, END] = 12.0

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probs [..., T, vocabulary] of what follows each of the tokens `ids` [..., T]."""
        worth = nn.functional.pad(self.worth, (0, len(TOKENS) - NUM_DIGITS))
        sums = worth[ids].cumsum(-1).unsqueeze(-1)
        near = -((torch.arange(NUM_DIGITS) - sums) ** 2) * torch.exp(-2 * self.log_width) / 2
        return torch.log_softmax(self.follows[ids] + nn.functional.pad(near, (0, len(TOKENS) - NUM_DIGITS)), dim=-1)

    def log_probs(self, ids: Tensor) -> Tensor:
        """The log-prob of each token of `ids` [..., T] but the first, given those before it."""
        return self(ids[..., :-1]).gather(-1, ids[..., 1:].unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def sample(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Sample:
        """Continue a prompt until an end or the cap on tokens."""
        generator = torch.Generator().manual_seed(seed)
        ids, log_probs = torch.tensor(prompt), []
        for _ in range(max_new_tokens):
            choices = self(ids)[-1]
            token = torch.multinomial(choices.exp(), 1, generator=generator)
            log_probs.append(float(choices[token]))
            ids = torch.cat([ids, token])
            if int(token) == END:
                return Sample(ids[len(prompt) :].tolist(), log_probs, truncated=False)
        return Sample(ids[len(prompt) :].tolist(), log_probs, truncated=True)


class Sampler:
    """Samples reproducibly: the n-th time a prompt is seen it gets the n-th seed, in whatever order prompts come."""

    def __init__(self, policy: NumberLinePolicy, seed: int = 0) -> None:
        self.policy = policy
        self._seed = seed
        self._seen: Counter[tuple[int, ...]] = Counter()

    def sample(self, prompt: Sequence[int], max_new_tokens: int) -> Sample:
        """Continue a prompt."""
        key = tuple(prompt)
        self._seen[key] += 1
        return self.policy.sample(prompt, max_new_tokens, crc32(repr((self._seed, self._seen[key], key)).encode()))


class PolicyGeneration:
    """The policy as a `GenerationInterface`, which is how the native path asks it to continue."""

    def __init__(self, sampler: Sampler, max_new_tokens: int) -> None:
        self._sampler = sampler
        self._max_new_tokens = max_new_tokens

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the continuation of each row."""
        for row, length in enumerate(data["input_lengths"].tolist()):
            prompt = data["input_ids"][row, :length].tolist()
            said = self._sampler.sample(prompt, self._max_new_tokens)
            whole = torch.tensor([prompt + said.token_ids])
            yield (
                row,
                {
                    "output_ids": whole,
                    "logprobs": torch.tensor([[0.0] * length + said.log_probs]),
                    "generation_lengths": torch.tensor([len(said.token_ids)]),
                    "unpadded_sequence_lengths": torch.tensor([whole.shape[1]]),
                    "truncated": torch.tensor([said.truncated]),
                },
            )
