"""What driver, board, worker and shard tell each other; all of it can be pickled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.rollouts.progress_state import ProgressState
from nemo_gym.rollouts.sharding import Shard


@dataclass(frozen=True)
class ShardOrder:
    """What a worker needs to run one shard."""

    shard: Shard
    attempt: int
    """Counted from 1; more than one means that a worker was lost."""
    arguments: Sequence[str]
    """Options of `ng_collect_rollouts`."""
    output: Path
    """The rollouts file of the shard, absolute."""
    token: Path
    """A file of the driver beside it: a node that does not see it does not share the folder."""
    folder: Path | None
    """Where to run; None for the folder that Ray made for the task."""
    environment: Mapping[str, str] = field(default_factory=dict)
    report_every_s: float = 0.5


@dataclass(frozen=True)
class Report:
    """How a running shard is doing."""

    shard: Shard
    attempt: int
    node: str
    state: ProgressState | None = None
    """None before it has begun to collect."""
    caps: Mapping[str, int] = field(default_factory=dict)
    """Those it goes by."""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """How much of each cap it takes up."""
    is_draining: bool = False
    """Whether it has nothing more to start."""


@dataclass(frozen=True)
class Instruction:
    """What a running shard is to do."""

    caps: Mapping[str, int] = field(default_factory=dict)
    stop: bool = False
    at_once: bool = False


@dataclass(frozen=True)
class ShardEnd:
    """How a shard ended whose worker lived to tell."""

    exit_code: int
    node: str
    summary: Mapping[str, Any] | None = None
    """What `RunSummary.as_json` says, when it got that far."""
    problem: str = ""
    """The end of its log, or what kept it from starting."""
