"""Before a run is resumed: is it the same run, and are its rows complete?"""

import logging
from functools import cache
from itertools import islice
from pathlib import Path

from nemo_gym.jsonl import write_aside
from nemo_gym.paths import resolve_for_reading
from nemo_gym.rollouts.changes import Effect, RunChangedError, find_changes, refuse_or_report
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.manifest import FileFingerprint, RunFacts, RunManifest, fingerprint, now_text, read_manifest
from nemo_gym.rollouts.materialized import ExpectedByAgent, is_complete, rewrite_rows, write_rows
from nemo_gym.rollouts.rows import InputRows
from nemo_gym.row_files import iter_row_lines

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

    input_now = input_fingerprint(config)
    changes = find_changes(manifest, config, input_now, prompt_fingerprint(config), lambda: inputs().scan.rows)
    refuse_or_report(changes, config)
    _warn_of_other_models(manifest, facts)
    is_input_gone = input_now is None and [change.name for change in changes] == ["input"]
    rows_differ = bool(changes) and not is_input_gone
    if rows_differ or not is_complete(config.paths.materialized_inputs, manifest.expected_rollouts):
        must_keep = not any(change.effect is Effect.ALTERS for change in changes)
        expected = rewrite_rows(inputs(), config.paths, must_keep=must_keep)
        describe_rows(manifest, config, expected, inputs())
    manifest.describe(config, facts)
    manifest.resumed_at.append(now_text())
    return manifest


def describe_rows(
    manifest: RunManifest, config: RolloutCollectionConfig, expected: ExpectedByAgent, inputs: InputRows | None
) -> None:
    """Record where the rows came from and how many there are; `inputs` is None when they were made elsewhere."""
    manifest.input = input_fingerprint(config)
    manifest.input_rows = _count_rows(config) if inputs is None else inputs.scan.rows
    manifest.prompt = prompt_fingerprint(config)
    manifest.agents = expected


def _count_rows(config: RolloutCollectionConfig) -> int | None:
    path = input_path(config)
    return None if path is None else sum(1 for _ in islice(iter_row_lines(path), config.limit))


def input_path(config: RolloutCollectionConfig) -> Path | None:
    """The input file, if it exists."""
    path = resolve_for_reading(config.input_jsonl_fpath)
    return path if path.is_file() else None


def input_fingerprint(config: RolloutCollectionConfig) -> FileFingerprint | None:
    """Of the input file, if it exists."""
    path = input_path(config)
    return None if path is None else fingerprint(path)


def prompt_fingerprint(config: RolloutCollectionConfig) -> FileFingerprint | None:
    """Of the prompt file, if there is one."""
    if not config.prompt_config:
        return None
    path = resolve_for_reading(config.prompt_config, Path.is_file)
    return fingerprint(path) if path.is_file() else None


def _replace_manifest(config: RolloutCollectionConfig, facts: RunFacts) -> RunManifest:
    paths, inputs = config.paths, InputRows(config)
    expected = rewrite_rows(inputs, paths, must_keep=not config.allow_changed_config)
    paths.manifest.replace(paths.manifest_corrupt)
    logger.warning("%s is damaged: it is now %s, and is written anew", paths.manifest, paths.manifest_corrupt)
    manifest = RunManifest(resumed_at=[now_text()])
    describe_rows(manifest, config, expected, inputs)
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
        raise RunChangedError(
            f"{paths.rollouts} cannot be resumed: neither {paths.materialized_inputs} nor {paths.manifest} exists, so "
            "nothing says which rows its rollouts belong to. Start afresh without +resume_from_cache=true, which keeps "
            f"them in {paths.previous}; or, if input and options are the same as then, pass +allow_changed_config=true"
        )
    with write_aside(paths.materialized_inputs) as file:
        write_rows(InputRows(config), file)


def _warn_of_other_models(manifest: RunManifest, facts: RunFacts) -> None:
    if manifest.models and facts.models and manifest.models != list(facts.models):
        logger.warning("The rollouts so far came from the models %s; now it is %s", manifest.models, list(facts.models))
