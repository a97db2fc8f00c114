"""What a trainer, an environment and a generator say to each other, and its tensors. Needs no torch.

A message log is a list of messages: `role`, `content`, `token_ids`, and for what the policy generated also
`generation_logprobs`, one per token. Token ids are int64 tensors and log-probs float32 tensors wherever torch
is installed, plain lists where it is not. Where the versions of the weights are known, `weight_versions` of a generated
message has those of its first and its last token; if it was interrupted, `weight_segments` has `[version, tokens]` of
each part, and `token_loss_mask`, if asked for, a 0 for every token that is not to be trained on.
"""

import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple, NotRequired, Protocol, TypeAlias

from typing_extensions import TypedDict

from nemo_gym.errors import ConfigError
from nemo_gym.paths import install_command

__all__ = [
    "Completion",
    "DatumSpec",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "GroupBuffer",
    "Message",
    "MessageLog",
    "PromptGroupRecord",
    "RolloutOverrides",
    "Timer",
    "Tokenizer",
]

_INT64 = "int64"
_FLOAT32 = "float32"
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "sum": sum,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "count": lambda values: float(len(values)),
}


class Timer:
    """Measures how long named steps take."""

    def __init__(self) -> None:
        self._running: dict[str, float] = {}
        self._measured: dict[str, list[float]] = {}

    def start(self, label: str) -> None:
        """Start a stopwatch.

        Raises:
            ValueError: it is running.
        """
        if label in self._running:
            raise ValueError(f"timer {label!r} is running already; stop it first")
        self._running[label] = time.perf_counter()

    def stop(self, label: str) -> float:
        """Stop a stopwatch and return the seconds it measured.

        Raises:
            ValueError: it is not running.
        """
        if label not in self._running:
            raise ValueError(f"timer {label!r} is not running; start it first")
        elapsed_s = time.perf_counter() - self._running.pop(label)
        self._measured.setdefault(label, []).append(elapsed_s)
        return elapsed_s

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure the block."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def get_elapsed(self, label: str) -> list[float]:
        """Every measurement of a stopwatch, in seconds.

        Raises:
            KeyError: there is none.
        """
        return list(self._measured[label])

    def get_latest_elapsed(self, label: str) -> float:
        """The last measurement of a stopwatch, in seconds."""
        return self._measured[label][-1]

    def reduce(self, label: str, operation: str = "mean") -> float:
        """One number for all measurements of a stopwatch: mean, median, min, max, sum, std or count.

        Raises:
            ValueError: there is no such operation.
        """
        if operation not in _REDUCTIONS:
            raise ValueError(f"{operation!r} is no reduction; choose one of {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[operation](self._measured[label])

    def get_timing_metrics(self, reduction_op: str = "mean") -> dict[str, float]:
        """All stopwatches that measured something, each reduced to one number."""
        return {label: self.reduce(label, reduction_op) for label in self._measured}

    def reset(self, label: str | None = None) -> None:
        """Forget the measurements of one stopwatch, or of all."""
        for name in [label] if label is not None else [*self._running, *self._measured]:
            self._running.pop(name, None)
            self._measured.pop(name, None)


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
    truncation_reason: str | None = None
    """Why it was cut off: what the endpoint said, such as `max_output_tokens`; else `max_seq_len`, `generator` or
    `no_progress`."""
    turn_rewards: list[float] = field(default_factory=list)
    """The reward of each turn, where there are rewards for turns; their sum is `reward`."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, where the environment tells."""
    branches: list[MessageLog] = field(default_factory=list)
    """More samples of the same attempt, where its conversation was rewritten on the way. In each of them, only what
    was generated there has the role `assistant`: no token is trained on twice."""
    mask_reason: str | None = None
    """Why it is not to be trained on; None when it is. Without a result there is also no reward: it is NaN."""

    @property
    def samples(self) -> list[MessageLog]:
        """Everything that is trained on for this attempt."""
        return [self.message_log, *self.branches]

    @property
    def weight_versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version of the weights among its turns; None where nobody has told."""
        turns = (message for log in self.samples for message in log)
        known = [it["weight_versions"] for it in turns if it.get("weight_versions") is not None]
        versions = [version for pair in known for version in pair if version is not None]
        return (min(versions), max(versions)) if versions else None

    def __repr__(self) -> str:
        """Short: `asyncio.run` of Python 3.11 formats what a task returned, and a tensor takes milliseconds."""
        tokens = sum(len(message["token_ids"]) for message in self.message_log)
        cut = f", cut off by {self.truncation_reason}" if self.truncated else ""
        return f"<Completion: {len(self.message_log)} messages, {tokens} tokens, reward {self.reward:g}{cut}>"


@dataclass
class PromptGroupRecord:
    """All completions of one prompt, in the order of their generation index.

    There are as many as were asked for. With `min_group_size`, those that failed are among them, masked.
    """

    prompt_idx: int
    prompt: MessageLog
    extra_env_info: dict[str, Any] | None
    metadata: dict[str, Any]
    completions: list[Completion]
    rollout_metrics: dict[str, Any]

    def __repr__(self) -> str:
        """Short, for the same reason."""
        rewards = ", ".join(f"{completion.reward:g}" for completion in self.completions[:8])
        more = ", …" if len(self.completions) > 8 else ""
        return f"<PromptGroupRecord {self.prompt_idx}: {len(self.completions)} completions, rewards {rewards}{more}>"


@dataclass(frozen=True)
class RolloutOverrides:
    """What one call wants otherwise than its manager was told, such as a validation between steps; None: the same."""

    n: int | None = None
    """Completions of the prompt."""
    greedy: bool | None = None
    """Take the likeliest token each time; on the servers' path that is a temperature of 0."""
    temperature: float | None = None
    max_new_tokens: int | None = None
    """On the native path the generator gets this and the temperature with its prompt, and has to heed them."""
    split: str | None = None
    """A name for what the call is for; it stands in the group's metadata."""

    def __post_init__(self) -> None:
        if self.n is not None and self.n < 1:
            raise ValueError(f"n is {self.n}; there must be at least 1 completion")
        if self.greedy and self.temperature:
            raise ValueError(f"greedy and a temperature of {self.temperature:g} contradict each other")


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
    temperature: NotRequired[float]
    """Only where a call wants another than usual, as `max_new_tokens`."""
    max_new_tokens: NotRequired[int]
    generated_so_far: NotRequired[int]
    """So many tokens at the end of the prompt were generated before a pause, and are part of the same turn: they count
    against a cap of the generator's own. `max_new_tokens` is what is left of it."""


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
    aborted: NotRequired[Any]
    """Tensor [1] of bool: stopped from outside, for a pause; it goes on from here afterwards."""
    weight_versions: NotRequired[Any]
    """Tensor [1, 2]: the version of the weights at its first and at its last token; else the manager's counts."""


class GenerationInterface(Protocol):
    """A policy that continues prompts."""

    def generate_async(
        self, data: GenerationDatumSpec, greedy: bool = False
    ) -> AsyncIterator[tuple[int, GenerationOutputSpec]]:
        """Yield `(index of the row, output)`; called with one row at a time.

        Of several outputs the last one counts. A generator that yields what it has so far, now and then, is stopped
        for a pause by cancelling it, and goes on from there; one with a method `abort` is told with that instead, and
        ends its generations with `aborted` outputs.
        """


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def __call__(self, text: str, *, add_special_tokens: bool = ..., return_tensors: str | None = ...) -> Any:
        """Token ids of a text, as `["input_ids"]`."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool = ...) -> list[str]:
        """The texts of several lists of token ids."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = ...) -> Any:
        """Token ids of the prompt that a conversation makes, alone or as `["input_ids"]`."""


class GroupBuffer(Protocol):
    """Where groups go that are made for a trainer."""

    def reserve(self, *, weight_version: int, target_step: int | None) -> Any:
        """Room for a group; the id to commit it under."""

    async def commit(
        self, group_id: Any, record: PromptGroupRecord, *, start_weight_version: int, end_weight_version: int
    ) -> None:
        """Put a group where it was reserved."""

    async def remove_group(self, group_id: Any) -> None:
        """Give back the room of a group that could not be made."""


class TorchMissingError(ConfigError, ImportError):
    """Something needs torch, and it is not installed."""


def require_torch(what: str) -> Any:
    """The module `torch`.

    Raises:
        TorchMissingError: it is not installed; the message says that `what` needs it.
    """
    if not torch_is_there():
        raise TorchMissingError(f"{what} needs torch, which is not installed; install it with: {install_command('rl')}")
    import torch

    return torch


def torch_is_there() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


def token_tensor(ids: Any) -> Any:
    """Token ids as an int64 tensor, also when there are none."""
    return _tensor(ids, _INT64)


def part_of(tensor: Any, wanted: slice) -> Any:
    """A part of a tensor that keeps nothing else of it alive, as a slice would."""
    return tensor[wanted].clone()


def logprob_tensor(values: Any) -> Any:
    """Log-probs as a float32 tensor, also when there are none."""
    return _tensor(values, _FLOAT32)


def loss_mask_of(segments: Sequence[Sequence[int]]) -> Any:
    """1 for tokens of the last version of the weights among `[version, tokens]`, 0 for those of earlier ones."""
    last = segments[-1][0]
    return token_tensor([int(version == last) for version, tokens in segments for _ in range(tokens)])


def mask_older_parts(message_log: MessageLog) -> None:
    """Give every message that was interrupted a mask of what the last version of the weights generated."""
    for message in message_log:
        if message.get("weight_segments"):
            message["token_loss_mask"] = loss_mask_of(message["weight_segments"])


def as_list(values: Any) -> list[Any]:
    """A tensor or any sequence of numbers as a list of Python numbers."""
    listed: Any = values.tolist() if hasattr(values, "tolist") else list(values)
    return listed if isinstance(listed, list) else [listed]


def with_tensors(message_log: MessageLog) -> MessageLog:
    """The same log with its token ids and log-probs as tensors; its dicts are changed in place."""
    for message in message_log:
        message["token_ids"] = token_tensor(message["token_ids"])
        if "generation_logprobs" in message:
            message["generation_logprobs"] = logprob_tensor(message["generation_logprobs"])
        if "token_loss_mask" in message:
            message["token_loss_mask"] = token_tensor(message["token_loss_mask"])
    return message_log


def num_tokens(message_log: MessageLog, role: str | None = None) -> int:
    """Tokens in a log, of one role or of all."""
    return sum(len(message["token_ids"]) for message in message_log if role is None or message["role"] == role)


def has_nan(message_log: MessageLog) -> bool:
    """Whether any log-prob in the log is not a number."""
    return any(_has_nan(message["generation_logprobs"]) for message in message_log if "generation_logprobs" in message)


def _has_nan(values: Any) -> bool:
    if hasattr(values, "isnan"):
        return bool(values.isnan().any())
    return any(value != value for value in values)


def _tensor(values: Any, dtype_name: str) -> Any:
    if not torch_is_there():
        return as_list(values)
    torch = require_torch("a tensor")
    dtype = getattr(torch, dtype_name)
    if isinstance(values, torch.Tensor):
        return values.to(dtype)
    numbers: Sequence[Any] = as_list(values)
    return torch.tensor(numbers, dtype=dtype)
