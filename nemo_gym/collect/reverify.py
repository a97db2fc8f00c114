"""Stored responses scored again: a run like any other, whose rollouts come from disk and go to environments only.

The rows of the output are those of the rollouts that it is about, so it is resumed, viewed, compared and aggregated as
any other run. Verdicts that are kept are copied, line by line as they are; a new one has the old one beside it, and the
manifest says what the difference comes to.
"""

import logging
import os
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gym.collect.collector import conclude, policies_for, roll_out, settings_for
from nemo_gym.collect.environments import (
    VERIFY_PATH,
    ChosenRows,
    Environments,
    Mode,
    StoredResponses,
    classes_wanted,
    foreign_rollouts,
    lines_to_keep,
    refusal,
    scored_again,
)
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.collect.metrics import AGGREGATE_PATH, request_arguments
from nemo_gym.collect.run_servers import facts_about
from nemo_gym.collect.server_watch import ServerWatch
from nemo_gym.collect.stopping import health_probe
from nemo_gym.collect.summary import RunSummary, count_given_up, is_settled, summary_of
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.http.client import ServerClient
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.metrics.paired import Difference, paired_difference, scale_of
from nemo_gym.paths import open_own, remove_debris, write_aside
from nemo_gym.runs.files import RolloutPaths, require_rollouts
from nemo_gym.runs.lock import only_writer
from nemo_gym.runs.manifest import (
    FileFingerprint,
    RunChangedError,
    RunFacts,
    RunManifest,
    fingerprint,
    masked_options,
    now_text,
    read_manifest,
    write_manifest,
)
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.runs.read import keys_in, plain_records
from nemo_gym.runs.record import PREVIOUS_VERDICT_KEY, REWARD_KEY, Result, Row, is_finite_number
from nemo_gym.runs.resume import Plan
from nemo_gym.runs.rows import write_rows
from nemo_gym.runs.run import Run, check_output, refuse_files_of_others
from nemo_gym.runs.store import RolloutStore, archive_previous
from nemo_gym.terminal import shown
from nemo_gym.trackers.base import Tracker

logger = logging.getLogger(__name__)

_CHOICE = ("where", "judge_failed_only", "failed_only", "limit")
"""The options that a resumed run must have as they were."""


@dataclass(frozen=True)
class Flip:
    """A task whose verdict changed."""

    task: Any
    before: float
    after: float
    """Mean rewards over the rollouts that have both."""


@dataclass
class VerdictDelta:
    """What the new verdicts come to, against those before."""

    rollouts: int = 0
    """Rollouts that have a verdict from before and from now."""
    better: int = 0
    worse: int = 0
    newly_scored: int = 0
    """Rollouts that had no verdict before."""
    newly_scored_reward: float | None = None
    """Their mean reward."""
    tasks: int = 0
    tasks_better: int = 0
    tasks_worse: int = 0
    found: Difference | None = None
    """Of the mean reward, task by task; None for fewer than two tasks."""
    flips: list[Flip] = field(default_factory=list)
    """The tasks that changed most, those first."""

    def as_json(self) -> dict[str, Any]:
        """For programs, and for the manifest."""
        found = self.found
        interval = None if found is None else {"low": found.ci_low, "high": found.ci_high, "confidence": 0.95}
        return {
            "rollouts": {"compared": self.rollouts, "better": self.better, "worse": self.worse},
            "newly_scored": {"rollouts": self.newly_scored, "mean_reward": self.newly_scored_reward},
            "tasks": {"compared": self.tasks, "better": self.tasks_better, "worse": self.tasks_worse},
            "mean_reward": None if found is None else {"before": found.base, "after": found.new, "delta": found.delta},
            "interval": interval,
            "p": None if found is None else found.p,
            "flips": [{"task": flip.task, "before": flip.before, "after": flip.after} for flip in self.flips],
        }

    def lines(self) -> Iterator[str]:
        """The summary as lines of text, for a terminal."""
        if self.found is not None:
            found = self.found
            yield (
                f"Mean reward: {found.base:.4g} before, {found.new:.4g} now: {found.delta:+.4g} "
                f"(95 % interval {found.ci_low:+.4g} to {found.ci_high:+.4g}, {found.tasks} tasks)"
            )
        if self.rollouts:
            same = self.rollouts - self.better - self.worse
            yield f"Verdicts: {self.better} better, {self.worse} worse, {same} as before"
            yield f"Tasks that changed: {self.tasks_better} better, {self.tasks_worse} worse, of {self.tasks}"
        for flip in self.flips:
            yield f"  task {shown(flip.task)}: {flip.before:.4g} → {flip.after:.4g}"
        if self.newly_scored:
            mean = "" if self.newly_scored_reward is None else f", mean reward {self.newly_scored_reward:.4g}"
            yield f"Scored for the first time: {self.newly_scored} rollouts{mean}"


@dataclass
class ReverifySummary:
    """What scoring again came to."""

    run: RunSummary
    delta: VerdictDelta
    is_unsafe: bool = False

    def as_json(self) -> dict[str, Any]:
        """For programs: what a run says of itself, and the difference."""
        return {**self.run.as_json(), "unsafe": self.is_unsafe, "delta": self.delta.as_json()}


def measure_delta(path: Path, flips: int) -> VerdictDelta:
    """Compare the verdicts in a file with those from before that stand beside them; reads it once."""
    delta, new_total = VerdictDelta(), 0.0
    before, after, places = array("d"), array("d"), array("q")
    place_of: dict[Any, int] = {}
    for _, _, record in plain_records(path, "skip"):
        previous, now = record.get(PREVIOUS_VERDICT_KEY), record.get(REWARD_KEY)
        if not isinstance(previous, dict) or not is_finite_number(now):
            continue
        then = previous.get(REWARD_KEY)
        if not is_finite_number(then):
            delta.newly_scored += 1
            new_total += now
            continue
        before.append(then)
        after.append(now)
        places.append(place_of.setdefault(record[TASK_INDEX_KEY_NAME], len(place_of)))
    if delta.newly_scored:
        delta.newly_scored_reward = new_total / delta.newly_scored
    if before:
        _compare(
            delta, np.frombuffer(before), np.frombuffer(after), np.frombuffer(places, np.int64), list(place_of), flips
        )
    return delta


def _compare(delta: VerdictDelta, before: Any, after: Any, places: Any, tasks: list[Any], flips: int) -> None:
    delta.rollouts = len(before)
    delta.better, delta.worse = int((after > before).sum()), int((after < before).sum())
    counts = np.bincount(places)
    base, new = np.bincount(places, before) / counts, np.bincount(places, after) / counts
    changes = new - base
    delta.tasks = len(tasks)
    delta.tasks_better, delta.tasks_worse = int((changes > 0).sum()), int((changes < 0).sum())
    rewards = np.append(before, after)
    most = 1.0 if rewards.min() >= 0 and rewards.max() <= 1 else np.inf
    delta.found = paired_difference(base, new, scale_of(rewards, np.append(base, new)), most)
    order = np.argsort(-np.abs(changes), kind="stable")[:flips].tolist()
    delta.flips = [Flip(tasks[place], float(base[place]), float(new[place])) for place in order if changes[place]]


@contextmanager
def stored_rollouts(config: RolloutReverificationConfig) -> Iterator[ChosenRows]:
    """Find the rollouts that are to be scored, which may be read while the block runs; asks no server.

    Raises:
        ConfigError: something the user can correct.
    """
    check_sources(config)
    finished = not config.keeps_verdicts
    with StoredResponses(RolloutPaths(config.rollouts), finished=finished, classes=classes_wanted(config)) as stored:
        chosen = ChosenRows(config, stored)
        chosen.choose()
        _announce(config, stored, chosen)
        yield chosen


class Reverification:
    """One run of `ng_reverify`: `await Reverification(config, chosen, client).run()`."""

    def __init__(
        self,
        config: RolloutReverificationConfig,
        chosen: ChosenRows,
        client: ServerClient,
        command: Sequence[str] = (),
        *,
        pauses: RetryPauses | None = None,
        tracker: Tracker | None = None,
        environment_of: Mapping[str, str] | None = None,
    ) -> None:
        """`environment_of` names the environments of agents that the run behind `client` may not have."""
        self._config = config
        self._chosen = chosen
        self._client = client
        self._command = command
        self._pauses = pauses or RetryPauses()
        self._tracker = tracker
        self._environments = Environments(client, environment_of)

    async def run(self) -> ReverifySummary:
        """Score what is asked for, with everything checked before the first file is touched.

        Raises:
            ConfigError: something the user can correct.
        """
        started_s = time.monotonic()
        config, chosen = self._config, self._chosen
        is_unsafe = await self._guard(chosen.agents())
        options = config.as_collection(is_unsafe=is_unsafe)
        with _open(config, options, chosen, facts_about(self._client, self._command)) as run:
            summary = await self._score(run, chosen.stored)
            delta = measure_delta(run.store.paths.rollouts, config.flips)
            assert run.manifest is not None
            run.manifest.delta = delta.as_json()
        summary.wall_time_s = time.monotonic() - started_s
        if is_unsafe:
            logger.warning("%s holds verdicts that may be wrong, since +force=true was given", summary.paths.rollouts)
        return ReverifySummary(summary, delta, is_unsafe)

    async def _guard(self, agents: Collection[str]) -> bool:
        """Return whether the verdicts will be unsafe, which only `force` lets pass."""
        foreign = foreign_rollouts(self._config, agents, self._environments.names)
        environments = await self._environments.ask_modes(agents)
        why = refusal(self._config, environments, foreign)
        if why and not self._config.force:
            raise ConfigError(why)
        for environment in environments if self._config.judge_failed_only else ():
            if environment.mode is Mode.UNKNOWN:
                logger.warning("%s; it is asked all the same, since only its judge had failed", environment)
        if why:
            logger.warning("Scoring all the same, since +force=true was given: %s", why)
        return bool(why)

    async def _score(self, run: Run, stored: StoredResponses) -> RunSummary:
        plan = run.plan()
        summary = summary_of(plan, run.config, run.models)
        with run.store:  # both files exist after any run
            pass
        if is_settled(summary, run.config):
            return summary
        if plan.owed:
            await self._roll_out(run, plan, stored, summary)
        summary.tokens.clear()  # they were spent when the rollouts were made
        await conclude(run, plan, self._ask, summary, self._tracker)
        summary.given_up = count_given_up(summary, run.config.attempt_cap)
        return summary

    async def _roll_out(self, run: Run, plan: Plan, stored: StoredResponses, summary: RunSummary) -> None:
        server_of, config = self._environments.server_of, self._config

        async def post(row: Row) -> Any:
            found = stored.find(row)
            assert found is not None, "only rows that have a response are owed"
            verdict = await self._environments.verdict(row, found)
            return scored_again(row, found, verdict) if isinstance(verdict, dict) else verdict

        async def probe(agent: str) -> str:
            return await health_probe(self._client)(server_of(agent))

        watch = ServerWatch(self._client, config.max_silence_s, config.max_refused_s, asked_for=server_of)
        settings = replace(settings_for(run.config, plan, self._pauses), path=VERIFY_PATH)
        await roll_out(
            run,
            plan,
            post,
            summary,
            settings,
            probe=probe,
            servers=watch,
            following=lambda dispatch, progress: nullcontext(),
            policies=policies_for(run, plan, summary),
        )

    async def _ask(self, agent: str, records: Collection[Result]) -> object:
        """The metrics of an agent's rollouts, from the environment that scored them."""
        server = self._environments.server_of(agent)
        answer = await self._client.post(server_name=server, url_path=AGGREGATE_PATH, **request_arguments(records))
        await raise_for_status(answer)
        told: object = await get_response_json(answer)
        return told


def check_sources(config: RolloutReverificationConfig) -> None:
    """Refuse what cannot be the files of a run, and an output that is one of them or is there; touches nothing.

    Raises:
        ConfigError: naming the option and the remedy.
    """
    if not config.rollouts.is_file():
        raise ConfigPathNotFoundError(
            f"+rollouts_jsonl_fpath={config.rollouts} does not exist (looked in {Path.cwd()})"
        )
    require_rollouts(config.rollouts, "rollouts_jsonl_fpath")
    if not config.materialized_inputs.is_file():
        raise ConfigPathNotFoundError(
            f"{config.materialized_inputs} does not exist (looked in {Path.cwd()}): the rows that the rollouts were "
            "made of say what a verdict is asked about; name their file with +materialized_inputs_jsonl_fpath"
        )
    sources = [config.rollouts, *RolloutPaths(config.rollouts).of_one_run, config.materialized_inputs]
    for output in (config.output(is_unsafe=False), config.output(is_unsafe=True)):
        written = RolloutPaths.of_output(output).of_one_run
        if any(path.exists() and source.exists() and path.samefile(source) for path in written for source in sources):
            raise ConfigError(
                f"+output_jsonl_fpath={output} belongs to the run that is scored again; name another file. To score "
                "only what that run failed to score, resume it: +resume_from_cache=true asks no agent again for that"
            )
    possible = [config.output(is_unsafe=is_unsafe) for is_unsafe in ((False, True) if config.force else (False,))]
    in_the_way = [_in_the_way(config, RolloutPaths.of_output(output)) for output in possible]
    if all(in_the_way):  # whatever the environments say of themselves
        raise _output_exists(in_the_way[0])


def _in_the_way(config: RolloutReverificationConfig, paths: RolloutPaths) -> list[Path]:
    """Files of an earlier output that nothing was said about."""
    is_settled_by_option = config.resume_from_cache or config.append or config.overwrite
    return [] if is_settled_by_option else [path for path in (paths.rollouts, paths.failures) if path.exists()]


def _output_exists(existing: Sequence[Path]) -> ConfigError:
    return ConfigError(
        f"Output file already exists: {existing[0]}. Go on with +resume_from_cache=true, start afresh with "
        "+overwrite=true, which keeps it, or name another +output_jsonl_fpath"
    )


def _announce(config: RolloutReverificationConfig, stored: StoredResponses, chosen: ChosenRows) -> None:
    if stored.without_response:
        logger.warning(
            "%s holds %d rollouts without a response, which cannot be scored", config.rollouts, stored.without_response
        )
    if config.keeps_verdicts:
        logger.warning(
            "Two sources: %d verdicts are kept as they are, and %d rollouts that have none are scored, perhaps by "
            "another version of the environment",
            len(stored.done),
            len(chosen.to_score),
        )
        return
    if not len(chosen.to_score):
        which = "" if config.where is None else f" for which {config.where} holds"
        raise ConfigError(f"{config.rollouts} has no rollout with a response{which}, so there is nothing to score")
    failed = f", {len(stored.unscored)} of which failed only when they were scored" if len(stored.unscored) else ""
    stored_count = len(stored.done) - stored.without_response + len(stored.unscored)
    logger.info("Scoring %d of %d stored responses again%s", len(chosen.to_score), stored_count, failed)


@contextmanager
def _open(
    config: RolloutReverificationConfig, options: RolloutCollectionConfig, chosen: ChosenRows, facts: RunFacts
) -> Iterator[Run]:
    """The run of the output, locked; its rows are in place, and so are the verdicts that are kept."""
    paths = options.paths
    if existing := _in_the_way(config, paths):
        raise _output_exists(existing)
    is_there = paths.rollouts.exists() or paths.failures.exists()
    goes_on = is_there and (config.resume_from_cache or config.append)
    check_output(paths, is_resumed=goes_on)
    with only_writer(paths) as lock:
        refuse_files_of_others(paths)
        remove_debris(paths.of_one_run)
        sources = fingerprint(config.materialized_inputs), fingerprint(config.rollouts)
        manifest = _manifest(config, paths, sources) if config.resume_from_cache and not config.append else None
        with write_aside(paths.materialized_inputs) as file:
            expected = write_rows(chosen, file)
            if not goes_on:
                archive_previous(paths)
        manifest = manifest or RunManifest(started_at=now_text())
        options.num_repeats = chosen.repeats or 1
        manifest.describe(options, facts)
        manifest.options |= masked_options(config.model_dump(mode="json", include=set(_CHOICE)))
        manifest.agents, (manifest.input, manifest.reverified) = expected, sources
        write_manifest(manifest, paths.manifest)
        if config.keeps_verdicts:
            _copy_kept(config.rollouts, paths)
        run = Run(options, RolloutStore(paths, lock), manifest, is_resumed=goes_on or config.keeps_verdicts)
        try:
            yield run
            run.store.verify()
        finally:
            manifest.ended_at, manifest.counts = now_text(), run.counts()
            write_manifest(manifest, paths.manifest)


def _manifest(
    config: RolloutReverificationConfig, paths: RolloutPaths, sources: tuple[FileFingerprint, FileFingerprint]
) -> RunManifest | None:
    """That of the run to resume; None if there is none.

    Raises:
        RunChangedError: it was about other rollouts.
    """
    manifest = read_manifest(paths.manifest)
    if manifest is None:
        return None
    now = config.model_dump(mode="json", include=set(_CHOICE))
    changed = [
        f"{name}: was {manifest.options.get(name)}, now {now[name]}"
        for name in _CHOICE
        if manifest.options.get(name) != now[name]
    ]
    for name, was, is_now in zip(("rows", "rollouts"), (manifest.input, manifest.reverified), sources, strict=True):
        if was != is_now:
            changed.append(f"{name}: not the file that it was ({is_now.path})")
    if changed:
        raise RunChangedError(
            f"{paths.rollouts} was about something else, so it cannot be resumed: {'; '.join(changed)}. Resume it as "
            f"it was, or start afresh with +overwrite=true, which keeps the verdicts so far in {paths.previous}"
        )
    manifest.resumed_at.append(now_text())
    return manifest


def _copy_kept(source: Path, paths: RolloutPaths) -> None:
    """Bring the output what it lacks of the verdicts that are kept, line by line as they are."""
    present = keys_in(paths.rollouts)
    with os.fdopen(open_own(paths.rollouts, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as file:
        file.writelines(lines_to_keep(source, present))
        file.flush()
        os.fsync(file.fileno())
