"""Before a run goes on: is it still the same run, what is asked of it now, and are its rows complete?

More of the same input extends a run, and asking for less, or for something else of it, keeps what there is: rows that
are asked for now must be those that were sent. Whatever else shapes rows must not have changed, unless the user
insists.
"""

import logging
from collections.abc import Collection, Iterator
from functools import cache

from nemo_gym.jsonl import parse
from nemo_gym.paths import write_aside
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import (
    Effect,
    FilesNow,
    RunChangedError,
    RunFacts,
    RunManifest,
    find_changes,
    input_path,
    now_text,
    read_manifest,
    refuse_or_report,
)
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.read import records
from nemo_gym.runs.record import Row
from nemo_gym.runs.rows import FormerRows, InputRows, is_complete, rewrite_rows, write_rows

logger = logging.getLogger(__name__)


def reconcile(config: RolloutCollectionConfig, facts: RunFacts) -> RunManifest | None:
    """Compare the run with its manifest, extend or complete its rows, and return the manifest brought up to date.

    A run without a manifest is taken as it is. When there is one that cannot be read, the rows are made again and
    must come out as they were.

    Raises:
        RunChangedError: it would no longer be the same run.
    """
    manifest = read_manifest(config.paths.manifest)
    if manifest is None and config.paths.manifest.exists() and input_path(config) is not None:
        return _replace_manifest(config, facts)
    if manifest is None:
        _take_as_it_is(config)
        return None

    @cache
    def inputs() -> InputRows:
        return InputRows(config)

    files = FilesNow.of_run(config)
    changes = find_changes(manifest, config, files, lambda: inputs().scan.rows)
    refuse_or_report(changes, config)
    _warn_of_other_models(manifest, facts)
    is_input_gone = files.input is None and [change.name for change in changes] == ["input"]
    rows_differ = bool(changes) and not is_input_gone
    if rows_differ or not is_complete(config.paths.materialized_inputs, manifest.expected_rollouts):
        _make_rows_again(manifest, config, inputs(), {change.effect for change in changes})
    manifest.describe(config, facts)
    manifest.resumed_at.append(now_text())
    return manifest


def rows_to_resume(config: RolloutCollectionConfig) -> Iterator[Row]:
    """The rows that a run would have if it were resumed now; touches nothing.

    Raises:
        RunChangedError: it would no longer be the same run.
    """
    paths = config.paths
    manifest = read_manifest(paths.manifest)
    is_as_it_was = False
    if manifest is not None:
        changes = find_changes(manifest, config, FilesNow.of_run(config), lambda: InputRows(config).scan.rows)
        refuse_or_report(changes, config)
        is_as_it_was = not changes and is_complete(paths.materialized_inputs, manifest.expected_rollouts)
    elif paths.materialized_inputs.exists():
        is_as_it_was = not paths.manifest.exists()
    elif not (paths.manifest.exists() or config.allow_changed_config):
        raise _nothing_tells_rows(paths)
    if is_as_it_was:
        return (row for _, _, row in records(paths.materialized_inputs, "leave"))
    return (parse(line) for repeats in InputRows(config) for line in repeats.lines)


def _make_rows_again(
    manifest: RunManifest, config: RolloutCollectionConfig, inputs: InputRows, effects: Collection[Effect]
) -> None:
    """Replace the materialized rows by those that are asked for now, and say what that changes."""
    former = None
    if Effect.ALTERS not in effects:
        former = FormerRows.read(config.paths, may_drop=Effect.NARROWS in effects)
    expected = rewrite_rows(inputs, config.paths, former)
    if not effects:
        manifest.agents = expected
        return
    if not manifest.history:
        manifest.note_asked(manifest.options, at=manifest.started_at)
    total = sum(of_agent.rollouts for of_agent in expected.values())
    dropped = 0 if former is None else former.dropped
    added = total - (0 if former is None else former.kept)
    manifest.describe_rows(config, expected, inputs.scan.rows, added=added, dropped=dropped)
    manifest.is_narrowed |= former is None or dropped > 0
    if dropped:
        logger.warning(
            "%d rollouts are no longer asked for: those that are finished stay in %s and have no part in the metrics. "
            "Asked for now: %d, of which %d had not been asked for before",
            dropped,
            config.paths.rollouts,
            total,
            added,
        )


def _replace_manifest(config: RolloutCollectionConfig, facts: RunFacts) -> RunManifest:
    paths, inputs = config.paths, InputRows(config)
    former = None if config.allow_changed_config else FormerRows.read(paths, may_drop=False)
    expected = rewrite_rows(inputs, paths, former)
    paths.manifest.replace(paths.manifest_corrupt)  # brought to the disk with the new one
    logger.warning("%s is damaged: it is now %s, and is written anew", paths.manifest, paths.manifest_corrupt)
    manifest = RunManifest(resumed_at=[now_text()], is_narrowed=True)  # what was asked for before is not known
    manifest.describe_rows(config, expected, inputs.scan.rows)
    manifest.describe(config, facts)
    return manifest


def _take_as_it_is(config: RolloutCollectionConfig) -> None:
    paths = config.paths
    if paths.materialized_inputs.exists():
        logger.warning(
            "%s does not exist, so input and options cannot be compared; the rows in %s are taken as they are",
            paths.manifest,
            paths.materialized_inputs,
        )
        return
    if not config.allow_changed_config:
        raise _nothing_tells_rows(paths)
    with write_aside(paths.materialized_inputs) as file:
        write_rows(InputRows(config), file)


def _nothing_tells_rows(paths: RolloutPaths) -> RunChangedError:
    return RunChangedError(
        f"{paths.rollouts} cannot be resumed: neither {paths.materialized_inputs} nor {paths.manifest} exists, so "
        "nothing says which rows its rollouts belong to. Start afresh without +resume_from_cache=true, which keeps "
        f"them in {paths.previous}; or, if input and options are the same as then, pass +allow_changed_config=true"
    )


def _warn_of_other_models(manifest: RunManifest, facts: RunFacts) -> None:
    if manifest.models and facts.models and manifest.models != list(facts.models):
        logger.warning("The rollouts so far came from the models %s; now it is %s", manifest.models, list(facts.models))
