"""The driver of a run in shards: hands them out, shows how they are doing, and gives a lost one to somebody else.

It goes on until every shard has ended, or one of them shows that going on is no use, or it is asked to stop.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nemo_gym.distributed.cluster import ShardLostError
from nemo_gym.distributed.messages import Report, ShardEnd, ShardOrder
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.jsonl import count_lines
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.progress_state import ProgressState, total_of
from nemo_gym.rollouts.sharding import Shard
from nemo_gym.rollouts.stop_rules import Stop, StopKind

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""In a row without a new rollout: then it is not bad luck."""
_LOOK_EVERY_S = 0.5
_STOPPED_WITHIN_S = 90.0
_EXIT_OK, _EXIT_INCOMPLETE, _EXIT_USER_MISTAKE, _EXIT_INTERRUPTED = 0, 1, 2, 130


class Workers(Protocol):
    """Who runs the shards; `Cluster` is one."""

    def submit(self, order: ShardOrder) -> Any:
        """Have a shard run; what is returned stands for its end."""

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        """The latest reports."""

    def ended(self, running: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Those that have ended."""

    def result(self, ended: Any) -> ShardEnd:
        """How one ended."""

    def abandon(self, running: Sequence[Any]) -> None:
        """End workers without waiting."""


class ShardFailedError(GymError):
    """A shard that cannot be brought to an end."""


@dataclass
class ShardRecord:
    """What the driver knows of one shard."""

    output: Path
    attempts: int = 0
    losses: int = 0
    """In a row without a new rollout."""
    lines: int = 0
    """Rollouts in its file when it was last handed out."""
    state: ProgressState | None = None
    end: ShardEnd | None = None

    def rollouts_on_disk(self) -> int:
        """How many rollouts its file has now."""
        return count_lines(self.output) if self.output.exists() else 0


@dataclass
class Driver:
    """The shards of one run."""

    workers: Workers
    make_order: Callable[[Shard, int], ShardOrder]
    """(shard, attempt) -> what to have run."""
    records: dict[Shard, ShardRecord]
    at_once_running: int
    """How many shards may be handed out at the same time."""
    stopped: Stop | None = None
    _at_once: bool = False
    _mistake: str = ""
    _failure: str = ""
    _running: dict[Any, Shard] = field(default_factory=dict)

    def request_stop(self, *, at_once: bool = False) -> None:
        """Have every shard stop in good order, or without waiting for what is in flight."""
        self.stopped = self.stopped or Stop(StopKind.INTERRUPTED, "interrupted")
        self._at_once = self._at_once or at_once

    def run(self, progress: Progress) -> None:
        """Run every shard to its end.

        Raises:
            ConfigError: a shard says that the user has to correct something.
            ShardFailedError: a shard was lost again and again.
        """
        waiting = deque(self.records)
        stop_by_s: float | None = None
        try:
            while self._running or (waiting and self.stopped is None):
                while waiting and self.stopped is None and len(self._running) < self.at_once_running:
                    self._hand_out(waiting.popleft())
                for ended in self.workers.ended(list(self._running), _LOOK_EVERY_S):
                    shard = self._running.pop(ended)
                    if not self._settle(shard, ended):
                        waiting.append(shard)
                self._look(progress)
                if self.stopped is not None:
                    stop_by_s = stop_by_s or time.monotonic() + _STOPPED_WITHIN_S
                    if time.monotonic() > stop_by_s:
                        logger.warning("%d shards did not stop in time and are abandoned", len(self._running))
                        break
        finally:
            self.workers.abandon(list(self._running))
        if self._mistake:
            raise ConfigError(self._mistake)
        if self._failure:
            raise ShardFailedError(self._failure)

    def in_flight(self) -> int:
        """Rollouts that are with their agents, over all shards."""
        return sum(record.state.in_flight for record in self.records.values() if record.state and not record.end)

    def _hand_out(self, shard: Shard) -> None:
        record = self.records[shard]
        record.attempts += 1
        record.lines = record.rollouts_on_disk()
        self._running[self.workers.submit(self.make_order(shard, record.attempts))] = shard

    def _look(self, progress: Progress) -> None:
        running = set(self._running.values())
        over = {shard: record.attempts for shard, record in self.records.items() if shard not in running}
        for report in self.workers.look(over, stop=self.stopped is not None, at_once=self._at_once):
            if report.state is not None:
                self.records[report.shard].state = report.state
        progress.take_over(total_of(record.state for record in self.records.values() if record.state is not None))

    def _settle(self, shard: Shard, ended: Any) -> bool:
        """Take note of how a shard ended; False when it is to be handed out again."""
        record = self.records[shard]
        try:
            end = self.workers.result(ended)
        except ShardLostError as error:
            return self._is_given_up(shard, f"its worker is gone ({error})")
        if end.exit_code == _EXIT_USER_MISTAKE:
            self._mistake = self._mistake or f"shard {shard} on {end.node}: {_last_error(end.problem)}"
            self._stop(StopKind.FAIL_FAST, self._mistake)
        elif end.summary is None or (end.exit_code == _EXIT_INTERRUPTED and self.stopped is None):
            return self._is_given_up(shard, f"it ended with code {end.exit_code} on {end.node}: {end.problem.strip()}")
        elif end.summary["stopped"] is not None:
            self._stop(StopKind(end.summary["stopped"]["kind"]), f"shard {shard}: {end.summary['stopped']['message']}")
        record.end = end
        logger.info("Shard %s ended on %s", shard, end.node)
        return True

    def _is_given_up(self, shard: Shard, why: str) -> bool:
        record = self.records[shard]
        if self.stopped is not None:
            return True
        record.losses = 1 if record.rollouts_on_disk() > record.lines else record.losses + 1
        log = RolloutPaths(record.output).log
        if record.losses < MAX_LOSSES:
            logger.warning("Shard %s is run again and goes on with what it has written: %s", shard, why)
            return False
        self._failure = f"shard {shard} was lost {record.losses} times without a new rollout (its log: {log}): {why}"
        self._stop(StopKind.FAIL_FAST, self._failure)
        return True

    def _stop(self, kind: StopKind, message: str) -> None:
        if self.stopped is None:
            self.stopped = Stop(kind, message)
            logger.warning("Stopping all shards: %s", message)


def _last_error(log: str) -> str:
    """What a shard said last, from its last error message on."""
    _, marker, message = log.rpartition("\nError: ")
    return (message if marker else log).strip().removeprefix("Error: ")
