"""A run on disk: started afresh or resumed, one writer at a time, and none of its files another run's.

The order matters. Nothing of an earlier run is moved before the new rows are completely written aside, the rows are
in place before the first request, and what a killed run leaves behind can be resumed. The files beside an output
are named by it without its ending, so `a.json` and `a.jsonl` would have the same ones, and `a_failures.jsonl` as an
output would be the sidecar of `a.jsonl`: whose they are is in the manifest, and others are refused.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from nemo_gym.errors import ConfigError
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.paths import odd_file, refuse_odd_file, remove_debris, resolve_for_reading, write_aside
from nemo_gym.row_files import iter_row_lines
from nemo_gym.runs.files import RolloutPaths, refuse_strangers
from nemo_gym.runs.lock import only_writer
from nemo_gym.runs.manifest import RunFacts, RunManifest, input_path, now_text, write_manifest
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.read import keys_in, records
from nemo_gym.runs.reconcile import reconcile
from nemo_gym.runs.record import KeySet, Outcome, agent_name_of
from nemo_gym.runs.repeats import RepeatRule, earlier_durations, told_of
from nemo_gym.runs.resume import (
    Cached,
    Gate,
    Plan,
    plan_fresh,
    plan_in_memory,
    plan_resumed,
    read_attempts,
    read_gate,
)
from nemo_gym.runs.rows import FormerRows, InputRows, Repeats, no_rows, rewrite_rows, write_rows
from nemo_gym.runs.spending import Meter, Samples, meter_for
from nemo_gym.runs.store import FileChangedError, RolloutStore, archive_previous, explaining_refusals

logger = logging.getLogger(__name__)

_LOOKED_AT = 3
"""Records that tell what kind of file it is."""


def refuse_files_of_others(paths: RolloutPaths, option: str = "output_jsonl_fpath") -> None:
    """Raise unless the files of this output are its own, or nobody's.

    Raises:
        ConfigError: they belong to another output, which is still there.
    """
    for owner, file in _claims(paths):
        raise ConfigError(
            f"+{option}={paths.rollouts} would share {file.name} with {owner}, whose file it is: what lies beside an "
            "output is named by it without its ending. Choose a name, or a folder, of its own"
        )


def _claims(paths: RolloutPaths) -> Iterator[tuple[Path, Path]]:
    """(an output that is there, the file of it that `paths` would use)"""
    ours, siblings = paths.rollouts, [path for path in paths.of_one_run if path != paths.rollouts]
    named = _output_in(paths.manifest)
    if named is not None and named != ours and named.stem == ours.stem and named.exists():
        yield named, paths.manifest
    existing = [path for path in siblings if path.exists()]
    if existing and not paths.manifest.exists() and not ours.exists():
        yield from ((other, existing[0]) for other in _other_rollouts(ours))
    for sibling in existing:
        if _output_in(RolloutPaths(sibling).manifest) == sibling:
            yield sibling, sibling
    for ending in (sibling.name.removeprefix(ours.stem) for sibling in siblings):
        if ours.name.endswith(ending) and ours.name != ending:
            owner = _output_in(RolloutPaths(ours.with_name(f"{ours.name.removesuffix(ending)}.jsonl")).manifest)
            if owner is not None and owner.exists():
                yield owner, ours


def _output_in(manifest: Path) -> Path | None:
    """The rollouts file that a manifest is about, beside it; None when there is none that says so."""
    if odd_file(manifest) is not None:
        return None
    try:
        run = RunManifest.model_validate_json(manifest.read_bytes())
    except (OSError, ValidationError):
        return None
    output = run.options.get("output_jsonl_fpath")
    if not isinstance(output, str):
        return None
    return manifest.with_name((Path(output) if run.shard is None else run.shard.file(Path(output))).name)


def _other_rollouts(ours: Path) -> Iterator[Path]:
    """Files that go by the same name with another ending, and hold rollouts."""
    for path in sorted(ours.parent.iterdir()):
        if path.stem == ours.stem and path != ours and path.is_file():
            first = list(islice(records(path, "skip", may_lack_key=True), _LOOKED_AT))
            if first and all(key is not None for key, _, _ in first):
                yield path


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
    is_damaged: bool = False
    """Whether somebody else has written to its files, so that only what is still there counts."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the models that the config asks for, as far as they are known."""
        return () if self.manifest is None else self.manifest.models

    def meter(self) -> Meter | None:
        """Something to count with what the rollouts of this run use; None where nobody wants to know beforehand."""
        return meter_for(self.config, self.models, Samples()) if self.config.is_metered else None

    def plan(self) -> Plan:
        """What is to be run. Reads, and where needed repairs, the files: call it before the store is opened."""
        paths, cap, rule = self.store.paths, self.config.attempt_cap, repeat_rule(self.config)
        if not self.is_resumed and self.manifest is not None:
            return plan_fresh(paths, self.manifest.agents, cap, rule)
        with explaining_refusals(paths.rollouts, "read"):
            return self._plan_resumed(paths, cap, rule)

    def _plan_resumed(self, paths: RolloutPaths, cap: int, rule: RepeatRule | None) -> Plan:
        gate = read_gate(paths, cap, retry_exhausted=self.config.retry_exhausted, meter=self.meter(), rule=rule)
        asked = None if self.manifest is None else self.manifest.agents
        plan = plan_resumed(paths, gate, asked=asked)
        if self.manifest is not None and plan.total < self.manifest.expected_rollouts:  # damaged rows were taken out
            rewrite_rows(InputRows(self.config), paths, FormerRows.read(paths, may_drop=False))
            plan = plan_resumed(paths, gate, asked=asked)
        self.finished_before = plan.done
        self._note_not_needed(plan)
        self.store.expect_unchanged()
        return plan

    def _note_not_needed(self, plan: Plan) -> None:
        if self.manifest is not None:
            self.manifest.not_needed = told_of(plan.not_needed, plan.rule)

    def plan_for(self, cached: Cached) -> Plan:
        """What is to be run, where rows and the results of an earlier run are in memory already."""
        paths, config = self.store.paths, self.config
        meter, rule = self.meter(), repeat_rule(self.config)
        for row, result in zip(cached.done_rows, cached.done_results, strict=True):
            if meter is not None:
                meter.add(result, row.get(TASK_INDEX_KEY_NAME), agent_name_of(row) or "")
            if rule is not None:
                rule.add(row.get(TASK_INDEX_KEY_NAME), result)
        attempts = read_attempts(paths, meter=meter) if self.is_resumed else {}
        gate = Gate(KeySet(), attempts, config.attempt_cap, config.retry_exhausted, meter, rule)
        self.finished_before = len(cached.done_results)
        self.store.expect_unchanged()
        plan = plan_in_memory(cached, paths, gate, None if self.manifest is None else self.manifest.agents)
        self._note_not_needed(plan)
        return plan

    def counts(self) -> dict[str, int]:
        """Rollouts by outcome: successes over the whole run, the other attempts since this start."""
        finished = self.finished_before + self.store.counts[Outcome.SUCCESS]
        if self.is_damaged:
            finished = min(finished, len(keys_in(self.store.paths.rollouts)))
        counts = {
            "success": finished,
            "failed_attempts": self.store.counts[Outcome.FAILURE],
            "discarded_attempts": self.store.counts[Outcome.DISCARDED],
        }
        if self.manifest is None:
            return counts
        expected = self.manifest.expected_rollouts
        not_needed = expected - self.manifest.needed_rollouts
        told = {"not_needed": not_needed} if not_needed else {}
        return {"expected": expected, **counts, **told, "missing": expected - finished - not_needed}


def repeat_rule(config: RolloutCollectionConfig) -> RepeatRule | None:
    """What the options say about tasks that need no more repeats; it knows of no rollouts yet."""
    if config.stop_repeats_when is None:
        return None
    return RepeatRule(config.stop_repeats_when, config.num_repeats if isinstance(config.num_repeats, int) else None)


def resumes(config: RolloutCollectionConfig) -> bool:
    """Whether there is an earlier run to go on with, and that is what was asked for."""
    return config.resume_from_cache and config.paths.rollouts.exists()


def check_output(paths: RolloutPaths, *, is_resumed: bool = False) -> None:
    """Refuse an output that is no file, or where a fresh run would move something that is not of an earlier one.

    Touches nothing, so it can be called before anything is prepared.

    Raises:
        ConfigError: naming the file, what it is, and the remedy.
    """
    if paths.rollouts.is_dir():
        raise ConfigError(f"+output_jsonl_fpath={paths.rollouts} is a folder; name a file in it")
    if is_resumed:
        refuse_odd_file(paths.rollouts.resolve(), "output_jsonl_fpath")  # a link to a file is as good as the file
    else:
        refuse_strangers(paths, is_spoken_for=_output_in(paths.manifest) == paths.rollouts)


def check_input(config: RolloutCollectionConfig) -> InputRows | None:
    """Read and check the whole input, touching nothing; None when a run is resumed, whose rows are on disk.

    Raises:
        ConfigError: the input is missing or empty, any of its rows is unusable, or the output is not to be written.
    """
    is_resumed = resumes(config)
    check_output(config.paths, is_resumed=is_resumed)
    if is_resumed:
        return None
    inputs = InputRows(config)
    inputs.check()
    return inputs


def check_start(config: RolloutCollectionConfig) -> None:
    """Refuse what `open_run` would refuse before it looks at a run to resume; touches nothing.

    Raises:
        ConfigError: the files are another run's, or the input is one of them.
    """
    _refuse_overlap(config)
    refuse_files_of_others(config.paths)


@contextmanager
def open_run(
    config: RolloutCollectionConfig, facts: RunFacts | None = None, rows: Iterable[Repeats] | None = None
) -> Iterator[Run]:
    """A context with the run that `config` describes, locked, and started or resumed.

    Check everything else first: from here on files are moved and written.

    Args:
        config: of this run.
        facts: what the manifest should say besides.
        rows: the rows of a fresh run: what `check_input` returned, or rows made elsewhere.

    Raises:
        ConfigError: another collector is at work, an input row is unusable, or the run to resume was another one.
        FileChangedError: somebody else has written to the files meanwhile.
    """
    paths = config.paths
    check_output(paths, is_resumed=resumes(config))
    _refuse_overlap(config)
    if config.durations_from is not None:
        earlier_durations(resolve_for_reading(config.durations_from))
    with only_writer(paths) as lock:
        refuse_files_of_others(paths)
        remove_debris(paths.of_one_run)
        is_resumed = resumes(config)
        with explaining_refusals(paths.rollouts, "prepare"):
            if is_resumed:
                manifest = reconcile(config, facts or RunFacts())
            else:
                manifest = _start_afresh(config, facts or RunFacts(), rows)
            if manifest is not None:
                write_manifest(manifest, paths.manifest)
        run = Run(config, RolloutStore(paths, lock), manifest, is_resumed)
        try:
            yield run
            run.store.verify()
        except FileChangedError:
            run.is_damaged = True
            raise
        finally:
            _record_end(run)


def _record_end(run: Run) -> None:
    if run.manifest is None:
        return
    try:
        run.manifest.ended_at, run.manifest.counts = now_text(), run.counts()
        write_manifest(run.manifest, run.store.paths.manifest)
    except OSError as error:  # a full disk has ended the run already; that error is the one to show
        logger.warning("the end of the run could not be recorded in %s: %s", run.store.paths.manifest, error)


def _refuse_overlap(config: RolloutCollectionConfig) -> None:
    """An input that is one of the run's own files would be moved away or overwritten."""
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
        if not expected and config.chosen_shard is None:
            raise no_rows(config.input_jsonl_fpath)
        archive_previous(paths)
    manifest = RunManifest(started_at=now_text())
    input_rows = source.scan.rows if isinstance(source, InputRows) else _count_rows(config)
    manifest.describe_rows(config, expected, input_rows)
    manifest.describe(config, facts)
    return manifest


def _count_rows(config: RolloutCollectionConfig) -> int | None:
    """How many rows of the input a run has whose rows were made elsewhere; None without an input."""
    path = input_path(config)
    if path is not None and config.selection:
        return InputRows(config).scan.rows
    return None if path is None else sum(1 for _ in islice(iter_row_lines(path), config.limit))
