"""What a trainer, an environment and a generator say to each other. Needs no torch.

A message log is a list of messages: `role`, `content`, `token_ids`, and for what the policy generated also
`generation_logprobs`, one per token. Token ids are int64 tensors and log-probs float32 tensors wherever torch
is installed, plain lists where it is not.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, Protocol, TypeAlias

from typing_extensions import TypedDict

from nemo_gym.rl.timer import Timer

__all__ = [
    "Completion",
    "DatumSpec",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "Message",
    "MessageLog",
    "PromptGroupRecord",
    "Timer",
    "Tokenizer",
]

Message: TypeAlias = dict[str, Any]
MessageLog: TypeAlias = list[Message]


class DatumSpec(TypedDict):
    """One prompt, as the trainer's data loader gives it."""

    message_log: MessageLog
    """The prompt, tokenized."""
    extra_env_info: dict[str, Any] | None
    """What the environment knows about the task; on the servers' path the row for the agent."""
    idx: int
    task_name: NotRequired[str]
    """Chooses the environment on the native path."""
    stop_strings: NotRequired[list[str] | None]
    length: NotRequired[int]
    loss_multiplier: NotRequired[float]


@dataclass
class Completion:
    """One attempt at a prompt."""

    message_log: MessageLog
    """The prompt and everything that followed; shared with nobody."""
    env_extras: dict[str, Any] | None
    """What the environment knows in the end; on the servers' path the agent's whole answer."""
    truncated: bool
    reward: float


@dataclass
class PromptGroupRecord:
    """All completions of one prompt, in the order of their generation index. There are no partial groups."""

    prompt_idx: int
    prompt: MessageLog
    extra_env_info: dict[str, Any] | None
    metadata: dict[str, Any]
    completions: list[Completion]
    rollout_metrics: dict[str, Any]


class GenerationConfig(TypedDict):
    """How the policy samples."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_strings: list[str] | None
    stop_token_ids: list[int] | None


class EnvironmentReturn(NamedTuple):
    """What an environment answers to a batch of message logs."""

    observations: list[dict[str, str]]
    """`role` and `content` of the message that follows."""
    metadata: Sequence[Any]
    """The task's state from now on; None leaves it as it is."""
    next_stop_strings: Sequence[list[str] | None] | None
    rewards: Any
    """A tensor of shape [B], or a list of B numbers."""
    terminateds: Any
    """A tensor of shape [B], or a list of B booleans."""
    answers: list[str | None] | None = None


class EnvironmentInterface(Protocol):
    """An environment of the native path: a plain object, one with coroutines, or the handle of a Ray actor."""

    def step(self, message_log_batch: list[MessageLog], metadata: list[Any]) -> Any:
        """Score the last message of each log and say what follows, as an `EnvironmentReturn`."""


class GenerationDatumSpec(TypedDict):
    """What a generator is asked to continue."""

    input_ids: Any
    """Tensor [B, T], right padded."""
    input_lengths: Any
    """Tensor [B]."""
    stop_strings: NotRequired[list[list[str] | None]]


class GenerationOutputSpec(TypedDict):
    """What a generator answers for one row."""

    output_ids: Any
    """Tensor [1, L]: the prompt, followed by what was generated."""
    unpadded_sequence_lengths: Any
    """Tensor [1]: prompt and generation together."""
    generation_lengths: NotRequired[Any]
    logprobs: NotRequired[Any]
    """Tensor [1, L], zeros over the prompt."""
    truncated: NotRequired[Any]
    """Tensor [1] of bool: stopped by the cap on tokens."""
    gen_leader_worker_idx: NotRequired[Any]
    """Who generated it: per row an int, or a list of one."""


class GenerationInterface(Protocol):
    """A policy that continues prompts."""

    def generate_async(
        self, data: GenerationDatumSpec, greedy: bool = False
    ) -> AsyncIterator[tuple[int, GenerationOutputSpec]]:
        """Yield `(index of the row, output)`; called with one row at a time."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def __call__(self, text: str, *, add_special_tokens: bool = ..., return_tensors: str | None = ...) -> Any:
        """Token ids of a text, as `["input_ids"]`."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool = ...) -> list[str]:
        """The texts of several lists of token ids."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = ...) -> Any:
        """The prompt a conversation makes."""
