"""A transformer of a few thousand random weights, its tokenizer, and something for it to learn, all made on the spot.

What it is asked for is a lucky digit, twice; every 7 is worth half a point. That is little, but it is learned from
rewards alone, over two turns, with words of the environment between them that are not to be trained on.
"""

from collections.abc import AsyncIterator
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_gym.rl import EnvironmentReturn

WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "digit", "again", *"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    model = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Two small layers with random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    )


class LuckyDigits:
    """An environment of two turns: every 7 is worth half a point."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        """Score the last answers, and ask once more."""
        turns = [(info or {}).get("turn", 0) + 1 for info in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "<user> again <end> <assistant>"} for _ in turns],
            metadata=[{"turn": turn} for turn in turns],
            next_stop_strings=None,
            rewards=torch.tensor([0.5 * ("7" in log[-1]["content"].split()) for log in message_log_batch]),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
        )


class TransformerGeneration:
    """A transformer that is in this process, as a `GenerationInterface`; an answer of one token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the continuation of the one row there is."""
        prompt = data["input_ids"]
        with torch.no_grad():
            choices = torch.log_softmax(self.model(input_ids=prompt).logits[0, -1].float(), -1)
        token = choices.argmax() if greedy else torch.multinomial(choices.exp(), 1)[0]
        yield (
            0,
            {
                "output_ids": torch.cat([prompt, token.reshape(1, 1)], 1),
                "logprobs": torch.cat([torch.zeros(prompt.shape), choices[token].reshape(1, 1)], 1),
                "unpadded_sequence_lengths": data["input_lengths"] + 1,
            },
        )
