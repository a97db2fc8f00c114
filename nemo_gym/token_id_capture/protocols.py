"""Where entries go and where they come from: files, unless a framework installs something else in this process."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nemo_gym.token_id_capture.records import TokenEntry

__all__ = [
    "TokenCaptureSnapshot",
    "TokenSink",
    "TokenSource",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
]


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    """Everything that was kept of a rollout up to a moment after which nothing is added."""

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    """Some call of the rollout is not among the entries."""
    snapshot_id: str
    version: int
    """Grows when something changed about the rollout after all."""


@runtime_checkable
class TokenSink(Protocol):
    """Takes entries in a model server. One with `async begin_call(rollout_id, model_call_id)` hears of calls first."""

    async def put(self, entry: TokenEntry) -> None:
        """Keep an entry; putting the same one again changes nothing."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Note that a call of the rollout could not be kept."""

    async def close(self) -> None:
        """Nothing more will come."""


@runtime_checkable
class TokenSource(Protocol):
    """Gives entries to whoever finishes rollouts."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """What was kept of a rollout; from now on nothing is added. May be asked again."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Forget a snapshot; whether that was done. It is not if the rollout has changed since."""

    async def close(self) -> None:
        """Nothing more will be asked."""


class _Installed:
    """What a framework has put in place of the files, for this process."""

    sink: TokenSink | None = None
    source: TokenSource | None = None


def install_token_sink(sink: TokenSink | None) -> None:
    """Where model servers of this process put entries, unless their configuration names a sink; None takes it back."""
    _Installed.sink = sink


def installed_token_sink() -> TokenSink | None:
    """What `install_token_sink` was given."""
    return _Installed.sink


def install_token_source(source: TokenSource | None) -> None:
    """Where a collector of this process finds entries; None takes it back."""
    _Installed.source = source


def installed_token_source() -> TokenSource | None:
    """What `install_token_source` was given."""
    return _Installed.source
