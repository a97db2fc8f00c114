"""A run in shards, whoever runs them: from checking the input to the metrics.

The driver hands the shards out, shows how they are doing, and gives a lost one to somebody else. It goes on until every
shard has ended, or one of them shows that going on is no use, or it is asked to stop.
"""

import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from nemo_gym import runtime
from nemo_gym.collect.collector import lines_to_upload
from nemo_gym.collect.failures import FailuresOfClass
from nemo_gym.collect.metrics import AggregationError, values_for_tracking
from nemo_gym.collect.progress import Progress, ProgressState, total_of
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.collect.summary import RunSummary, why_no_metrics
from nemo_gym.combine.aggregation import RolloutAggregationHelper
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.executors.base import Job
from nemo_gym.executors.caps import PACE, WHOLE_PACE, Budgets, Leader, Report, add_spending, caps_of, spent_before
from nemo_gym.executors.shard import ShardEnd, ShardOrder
from nemo_gym.executors.steering import DriverControl, Orders
from nemo_gym.http.pace_books import sets_pace
from nemo_gym.jsonl import count_lines
from nemo_gym.keys import HEAD_SERVER_KEY_NAME
from nemo_gym.launch.offline_metrics import OfflineAgents
from nemo_gym.paths import make_folder, open_own
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import only_writer
from nemo_gym.runs.manifest import masked_command
from nemo_gym.runs.options import AttendingOptions, RolloutAggregationConfig, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard, ShardOptions
from nemo_gym.runs.record import Outcome
from nemo_gym.runs.rows import InputRows
from nemo_gym.runs.run import check_output, refuse_files_of_others
from nemo_gym.runs.store import archive_previous
from nemo_gym.runtime import stopping_on_signals
from nemo_gym.trackers.base import TRACKERS, tracking

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""In a row without a new rollout: then it is not bad luck."""
_LOOK_EVERY_S = 0.5
_HELD_LOOKS = 4
_STOPPED_WITHIN_S = 90.0
_EXIT_OK, _EXIT_INCOMPLETE, _EXIT_USER_MISTAKE, _EXIT_INTERRUPTED = 0, 1, 2, 130
_OWN = {
    *AttendingOptions.model_fields,
    "output_jsonl_fpath",
    "input_jsonl_fpath",
    "resume_from_cache",
    "run_timeout_s",
    "json",
    "json_format",
}
_REPORTS_PER_S = 400
_OF_THE_PROCESS = ("NEMO_GYM_CONFIG",)
"""Variables that hand a configuration to a child on this machine; a shard reads its own."""


class Workers(Protocol):
    """Who runs the shards."""

    def submit(self, order: ShardOrder) -> Any:
        """Have a shard run; what is returned stands for its end."""

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        """The latest reports."""

    def set_caps(self, caps: Mapping[str, int]) -> None:
        """Have other numbers hold for the caps of the run."""

    def set_orders(self, orders: Mapping[str, Any]) -> None:
        """Have all shards know what a person wants."""

    def ended(self, running: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Those that have ended."""

    def result(self, ended: Any) -> ShardEnd:
        """How one ended.

        Raises:
            ShardLostError: its worker did not live to tell.
        """

    def abandon(self, running: Sequence[Any]) -> None:
        """End workers without waiting."""


class ShardLostError(GymError):
    """A shard's worker or node is gone; what the shard had written is not."""


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
    budget: Budgets = field(default_factory=Budgets)
    """What all shards may use together."""
    leader: Leader | None = None
    """Who decides on caps that adapt, if there are any."""
    stopped: Stop | None = None
    orders: Orders = field(default_factory=Orders)
    """What a person wants."""
    _held_looks: int = 0
    """How often in a row all shards that run said that their next rollout would exceed it."""
    _at_once: bool = False
    _mistake: str = ""
    _failure: str = ""
    _running: dict[Any, Shard] = field(default_factory=dict)

    def request_stop(self, *, at_once: bool = False, why: str = "interrupted") -> None:
        """Have every shard stop in good order, or without waiting for what is in flight."""
        self.stopped = self.stopped or Stop(StopKind.INTERRUPTED, why)
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

    def notice(self) -> str:
        """A few words for the progress line."""
        return "paused" if self.orders.is_paused else self.leader.notice() if self.leader else ""

    def in_flight(self) -> int:
        """Rollouts that are with their agents, over all shards."""
        return sum(record.state.in_flight for record in self.records.values() if record.state and not record.end)

    def shards_running(self) -> set[Shard]:
        """Those that make rollouts now and can be asked."""
        return {shard for shard in list(self._running.values()) if self.records[shard].state is not None}

    def _hand_out(self, shard: Shard) -> None:
        record = self.records[shard]
        record.attempts += 1
        record.lines = record.rollouts_on_disk()
        self._running[self.workers.submit(self.make_order(shard, record.attempts))] = shard

    def _look(self, progress: Progress) -> None:
        running = set(self._running.values())
        over = {shard: record.attempts for shard, record in self.records.items() if shard not in running}
        self._pass_on()
        reports = self.workers.look(over, stop=self.stopped is not None, at_once=self._at_once)
        for report in reports:
            if report.state is not None:
                self.records[report.shard].state = report.state
            self.orders.take(report.shard, report.answers)
        self._stop_if_spent([report for report in reports if report.shard in running])
        if self.leader is not None and self.orders.caps is None:
            self.workers.set_caps(self.leader.look(reports, running))
        progress.take_over(total_of(record.state for record in self.records.values() if record.state is not None))

    def _pass_on(self) -> None:
        """What a person wants."""
        if (orders := self.orders.to_pass_on()) is not None:
            self.workers.set_orders(orders)

    def _stop_if_spent(self, reports: Sequence[Report]) -> None:
        """End the run when nothing is in flight and no shard may start a rollout; a share may be on its way to one."""
        is_held = bool(reports) and len(reports) == len(self._running) and all(report.is_held for report in reports)
        self._held_looks = self._held_looks + 1 if is_held else 0
        if self._held_looks >= _HELD_LOOKS:
            given = ", ".join(f"{name}={limit:,g}" for name, limit in self.budget.limits.items())
            self._stop(StopKind.BUDGET, f"the next rollout of any shard would exceed {given}")

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


def run_in_shards(
    config: RolloutCollectionConfig,
    job: Job,
    connect: Callable[[Mapping[str, int], Budgets], AbstractContextManager[Workers]],
    folder: Path | None,
) -> RunSummary:
    """Collect the rollouts of `config` in `num_shards` shards, merge them, compute their metrics.

    `connect` takes the caps and budgets of all shards together; `folder` is where shards run (see `ShardOrder`).

    Raises:
        ConfigError: something the user can correct, here or in a shard.
        ShardFailedError: a shard was lost again and again.
    """
    started_s = time.monotonic()
    leader = Leader.of(config)
    caps = caps_of(leader.most(config.concurrency) if leader else config.concurrency)
    caps |= {PACE: WHOLE_PACE} if sets_pace(job.global_config) else {}
    budget = Budgets(config.budgets, spent_before(config))
    with connect(caps, budget) as workers:
        run = ShardedRun.of(config, job.arguments, folder, started_s)
        with run.token_on_disk():
            at_once = min([len(run.records), *caps.values()])
            driver = Driver(workers, run.order, run.records, at_once, budget, leader)
            before = sum(record.rollouts_on_disk() for record in run.records.values())
            progress = Progress(
                run.expected,
                finished_before=min(before, run.expected),
                in_flight=driver.in_flight,
                notice=driver.notice,
            )
            control = DriverControl(driver, progress, config, started_s)
            with (
                only_writer(RolloutPaths(run.output)) as lock,
                control.attended(lock.announce),
                stopping_on_signals(driver.request_stop, on_the_spot=True),
                progress,
            ):
                driver.run(progress)
            summary = summary_of(
                run.output, run.records.values(), expected=run.expected, finished_before=before, stopped=driver.stopped
            )
            ends = {shard: None if it.end is None else it.end.summary for shard, it in run.records.items()}
            add_spending(summary, config, ends, driver.budget)
    _conclude(config, job.global_config, summary, job.arguments)
    summary.wall_time_s = time.monotonic() - started_s
    return summary


@dataclass
class ShardedRun:
    """One run in shards, before and while it goes on: its input, its files and what each shard is told."""

    config: RolloutCollectionConfig
    arguments: Sequence[str]
    """Of the command, as far as they concern the shards."""
    started_s: float
    expected: int
    records: dict[Shard, ShardRecord]
    token: Path
    folder: Path | None
    """Where shards run; see `ShardOrder`."""

    @classmethod
    def of(
        cls, config: RolloutCollectionConfig, arguments: Sequence[str], folder: Path | None, started_s: float
    ) -> "ShardedRun":
        """Check the input, and move the files of an earlier run out of the way unless it is resumed."""
        assert config.num_shards is not None
        inputs = InputRows(config)
        inputs.check()
        expected = inputs.count_rollouts()
        output = Path(config.output_jsonl_fpath).absolute()
        make_folder(output.parent)
        shards = [Shard(index, config.num_shards) for index in range(config.num_shards)]
        records = {shard: ShardRecord(shard.file(output)) for shard in shards}
        if not config.resume_from_cache:
            for path in (output, *(record.output for record in records.values())):
                check_output(RolloutPaths(path))
            for record in records.values():
                paths = RolloutPaths(record.output)
                with only_writer(paths):
                    refuse_files_of_others(paths)
                    archive_previous(paths)
        token = output.with_name(f".{output.stem}.{secrets.token_hex(8)}.token")
        return cls(config, _for_shards(arguments), started_s, expected, records, token, folder)

    @property
    def output(self) -> Path:
        """The merged rollouts."""
        return Path(self.config.output_jsonl_fpath)

    @contextlib.contextmanager
    def token_on_disk(self) -> Iterator[None]:
        """A file by which nodes recognise the folder."""
        os.close(open_own(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            yield
        finally:
            self.token.unlink(missing_ok=True)

    def order(self, shard: Shard, attempt: int) -> ShardOrder:
        """The options with which a worker runs a shard for the n-th time."""
        overrides = {
            "input_jsonl_fpath": self.config.input_jsonl_fpath,
            "agent_name": self.config.agent_name or "null",
            "prompt_config": self.config.prompt_config or "null",
            "output_jsonl_fpath": Path(self.config.output_jsonl_fpath).absolute(),
            "executor": "local",
            "shard_index": shard.index,
            "num_shards": shard.count,
            "resume_from_cache": "true",
            "run_timeout_s": self._time_left(),
            "upload_rollouts": "false",
            **({} if self.config.of is None else {"of": Path(self.config.of).expanduser().absolute()}),
            **{tracker.switch: "null" for tracker in TRACKERS.values()},  # the driver tracks the run
            f"{HEAD_SERVER_KEY_NAME}.port": 0,
        }
        return ShardOrder(
            shard=shard,
            attempt=attempt,
            arguments=[*self.arguments, *(f"++{name}={value}" for name, value in overrides.items())],
            output=self.records[shard].output,
            token=self.token,
            folder=self.folder,
            environment={
                name: value
                for name, value in inherited_environment().items()
                if name.startswith("NEMO_GYM_") and not name.startswith(_OF_THE_PROCESS)
            },
            report_every_s=max(0.5, shard.count / _REPORTS_PER_S),
        )

    def _time_left(self) -> str:
        if self.config.run_timeout_s is None:
            return "null"
        return str(max(1.0, self.config.run_timeout_s - (time.monotonic() - self.started_s)))


def _for_shards(arguments: Sequence[str]) -> list[str]:
    """The arguments that shards get as they are; what the driver decides for them comes after these."""
    dropped = _OWN | set(ShardOptions.model_fields)
    return [
        argument for argument in arguments if argument.lstrip("+~").partition("=")[0].partition(".")[0] not in dropped
    ]


def summary_of(
    output: Path, records: Iterable[ShardRecord], *, expected: int, finished_before: int, stopped: Stop | None
) -> RunSummary:
    """The summary of the whole run; a shard that has none of its own counts with its file.

    What was on disk before may be more than is asked for now: the shards say how much.
    """
    records = list(records)
    own_summaries = [record.end.summary for record in records if record.end is not None and record.end.summary]
    no_longer_asked = sum(own.get("no_longer_asked", 0) for own in own_summaries)
    finished_before = max(0, finished_before - no_longer_asked)
    summary = RunSummary(
        RolloutPaths(output),
        expected=expected,
        finished_before=finished_before,
        owed=expected - finished_before,
        stopped=stopped,
        no_longer_asked=no_longer_asked,
    )
    finished = 0
    for record in records:
        own = record.end.summary if record.end is not None else None
        if own is None:
            finished += record.rollouts_on_disk()
            continue
        finished += own["finished"]
        summary.counts[Outcome.FAILURE] += own["failed"]
        summary.counts[Outcome.DISCARDED] += own["discarded"]
        summary.given_up += own["given_up"]
        summary.not_needed += own.get("not_needed", 0)
        summary.tokens.update(own["tokens"])
        summary.health.add_told(own.get("health", {}), own["finished"] - own.get("finished_before", 0))
        for name, failures in own["failures"].items():
            of_class = summary.failures.by_class.setdefault(name, FailuresOfClass(failures["example"]))
            of_class.attempts += failures["attempts"]
            of_class.rollouts += failures["rollouts"]
    summary.counts[Outcome.SUCCESS] = max(0, finished - finished_before)
    return summary


def _conclude(
    config: RolloutCollectionConfig, global_config: DictConfig, summary: RunSummary, arguments: Sequence[str]
) -> None:
    """Merge the shards and compute the metrics, unless the run was interrupted."""
    if summary.is_interrupted:
        return
    summary.metrics_unwanted = why_no_metrics(config)
    if summary.metrics_unwanted is not None:
        return
    assert config.num_shards is not None
    output = summary.paths.rollouts
    combining = RolloutAggregationConfig.model_validate(
        {
            "input_glob": Shard(0, config.num_shards).glob(output),
            "output_jsonl_fpath": str(output),
            "offline": True,
            "allow_changed_config": config.allow_changed_config,
        }
    )
    helper = RolloutAggregationHelper(loader=lambda: OfflineAgents(global_config))
    try:
        combined = runtime.run(helper.aggregate(combining))
    except AggregationError as error:
        summary.metrics_problem = str(error)
        return
    summary.metrics, summary.metrics_path = combined.metrics, combined.metrics_path
    with tracking(global_config, masked_command(arguments)) as tracker:
        if tracker is not None:
            if config.upload_rollouts:
                tracker.log_rollouts(lines_to_upload(summary.paths))
            tracker.log(values_for_tracking(summary.metrics))
