"""Between lists of numbers and tensors: tensors where torch is installed, lists where it is not."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.rl.interfaces import MessageLog

_INT64 = "int64"
_FLOAT32 = "float32"


class TorchMissingError(ConfigError, ImportError):
    """Something needs torch, and it is not installed."""


def require_torch(what: str) -> Any:
    """The module `torch`.

    Raises:
        TorchMissingError: it is not installed; the message says that `what` needs it.
    """
    if not torch_is_there():
        raise TorchMissingError(f"{what} needs torch, which is not installed; install nemo-gym with the extra `rl`")
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
