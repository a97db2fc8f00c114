"""A run on disk: started afresh or resumed, one writer at a time.

The order matters. Nothing of an earlier run is moved before the new rows are completely written aside,
the rows are in place before the first request, and what a killed run leaves behind can be resumed.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.jsonl import write_aside
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.lock import RunLock
from nemo_gym.rollouts.manifest import RunFacts, RunManifest, now_text, write_manifest
from nemo_gym.rollouts.materialized import rewrite_rows, write_rows
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.reconcile import describe_rows, input_path, reconcile
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.resume import Plan, plan_fresh, plan_resumed, read_gate
from nemo_gym.rollouts.rows import InputRows, Repeats
from nemo_gym.rollouts.store import RolloutStore, StoreError, archive_previous

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One run while this process holds its lock; `with run.store:` opens its files."""

    config: RolloutCollectionConfig
    store: RolloutStore
    manifest: RunManifest | None
    """None when the run to resume has none."""
    is_resumed: bool
    finished_before: int = 0
    """Rollouts in the file before this start; `plan` finds out."""

    def plan(self) -> Plan:
        """What is to be run. Reads, and where needed repairs, the files: call it before the store is opened."""
        paths, cap = self.store.paths, self.config.attempt_cap
        if not self.is_resumed and self.manifest is not None:
            return plan_fresh(paths, self.manifest.agents, cap)
        gate = read_gate(paths, cap, retry_exhausted=self.config.retry_exhausted)
        plan = plan_resumed(paths, gate)
        if self.manifest is not None and plan.total < self.manifest.expected_rollouts:  # damaged rows were taken out
            rewrite_rows(InputRows(self.config), paths, must_keep=True)
            plan = plan_resumed(paths, gate)
        self.finished_before = plan.done
        return plan

    def counts(self) -> dict[str, int]:
        """Rollouts by outcome: successes over the whole run, the other attempts since this start."""
        finished = self.finished_before + self.store.counts[Outcome.SUCCESS]
        counts = {
            "success": finished,
            "failed_attempts": self.store.counts[Outcome.FAILURE],
            "discarded_attempts": self.store.counts[Outcome.DISCARDED],
        }
        if self.manifest is None:
            return counts
        expected = self.manifest.expected_rollouts
        return {"expected": expected, **counts, "missing": expected - finished}


def resumes(config: RolloutCollectionConfig) -> bool:
    """Whether there is an earlier run to go on with, and that is what was asked for."""
    return config.resume_from_cache and config.paths.rollouts.exists()


def check_input(config: RolloutCollectionConfig) -> InputRows | None:
    """Read and check the whole input, touching nothing; None when a run is resumed, whose rows are on disk.

    Raises:
        ConfigError: the input is missing, or any of its rows is unusable.
    """
    if resumes(config):
        return None
    inputs = InputRows(config)
    inputs.check()
    return inputs


@contextmanager
def open_run(
    config: RolloutCollectionConfig, facts: RunFacts | None = None, rows: Iterable[Repeats] | None = None
) -> Iterator[Run]:
    """Start the run that `config` describes, or go on with it.

    Check everything else first: from here on files are moved and written.

    Args:
        config: of this run.
        facts: what the manifest should say besides.
        rows: the rows of a fresh run: what `check_input` returned, or rows made elsewhere.

    Raises:
        ConfigError: another collector is at work, an input row is unusable, or the run to resume was another one.
    """
    paths = config.paths
    _refuse_overlap(config)
    with _only_writer(paths):
        is_resumed = resumes(config)
        with _explaining_disk_errors():
            if is_resumed:
                manifest = reconcile(config, facts or RunFacts())
            else:
                manifest = _start_afresh(config, facts or RunFacts(), rows)
            if manifest is not None:
                write_manifest(manifest, paths.manifest)
        run = Run(config, RolloutStore(paths), manifest, is_resumed)
        try:
            yield run
        finally:
            _record_end(run)


def _record_end(run: Run) -> None:
    if run.manifest is None:
        return
    run.manifest.ended_at, run.manifest.counts = now_text(), run.counts()
    try:
        write_manifest(run.manifest, run.store.paths.manifest)
    except OSError as error:  # a full disk has ended the run already; that error is the one to show
        logger.warning("the end of the run could not be recorded in %s: %s", run.store.paths.manifest, error)


@contextmanager
def _only_writer(paths: RolloutPaths) -> Iterator[None]:
    folder = paths.rollouts.parent
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(paths.lock))
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}, the folder of +output_jsonl_fpath: {error}") from error
        yield


@contextmanager
def _explaining_disk_errors() -> Iterator[None]:
    try:
        yield
    except GymError:
        raise
    except OSError as error:
        raise StoreError(f"the run cannot be prepared: {error}; make room for its files and start again") from error


def _refuse_overlap(config: RolloutCollectionConfig) -> None:
    """What is no file of a run, and an input that is one of them, would be moved away or overwritten."""
    if config.paths.rollouts.is_dir():
        raise ConfigError(f"+output_jsonl_fpath={config.paths.rollouts} is a folder; name a file in it")
    given = input_path(config)
    if given is not None and any(path.exists() and path.samefile(given) for path in config.paths.of_one_run):
        raise ConfigError(
            f"+input_jsonl_fpath={config.input_jsonl_fpath} is a file that this run writes itself; "
            "choose another +output_jsonl_fpath"
        )


def _start_afresh(config: RolloutCollectionConfig, facts: RunFacts, rows: Iterable[Repeats] | None) -> RunManifest:
    paths = config.paths
    if config.resume_from_cache:
        logger.info("Nothing to resume: there is no %s; starting afresh", paths.rollouts)
    source = InputRows(config) if rows is None else rows
    with write_aside(paths.materialized_inputs) as file:
        expected = write_rows(source, file)
        archive_previous(paths)
    manifest = RunManifest(started_at=now_text())
    describe_rows(manifest, config, expected, source if isinstance(source, InputRows) else None)
    manifest.describe(config, facts)
    return manifest
