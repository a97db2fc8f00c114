"""Is it still the same run? What a resumed run does otherwise than the one it goes on with.

More rows or more repeats extend a run. Anything else that would shape its rows differently mixes two
experiments in one file, and is refused unless the user insists.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.config import RolloutCollectionConfig, repeats_of
from nemo_gym.rollouts.manifest import FileFingerprint, RunManifest, shown_options

logger = logging.getLogger(__name__)

_ROW_OPTIONS = ("agent_name", "responses_create_params", "num_repeats_add_seed")


class Effect(Enum):
    """What a change does to the rows of a run."""

    EXTENDS = "extends"
    """The rows so far stay as they are; more are added."""
    ALTERS = "alters"


class Change(NamedTuple):
    """One thing that is not as it was."""

    name: str
    was: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.name}: was {_shown(self.was)}, now {_shown(self.now)}"


class RunChangedError(ConfigError):
    """A run cannot be resumed because it would no longer be the same run."""


def find_changes(
    manifest: RunManifest,
    config: RolloutCollectionConfig,
    input_now: FileFingerprint | None,
    prompt_now: FileFingerprint | None,
    rows_now: Callable[[], int],
) -> list[Change]:
    """Everything that shapes rows and is not as the manifest says.

    Args:
        manifest: of the earlier run.
        config: of this one.
        input_now: of the input file, None when it is gone.
        prompt_now: of the prompt file, None when there is none.
        rows_now: counts the input rows this run uses; called only when that matters.
    """
    changes = [
        *_changed_file("input", manifest.input, input_now),
        *_changed_file("prompt_config", manifest.prompt, prompt_now),
        *_changed_options(manifest.options, shown_options(config)),
        *_changed_repeats(manifest, config),
        *_changed_shard(manifest, config),
    ]
    if input_now is not None and manifest.options.get("limit") != config.limit:
        changes += _changed_limit(manifest, config, rows_now())
    return changes


def refuse_or_report(changes: list[Change], config: RolloutCollectionConfig) -> None:
    """Let extensions pass; other changes only with `allow_changed_config`.

    Raises:
        RunChangedError: listing what changed.
    """
    altering = [change for change in changes if change.effect is Effect.ALTERS]
    if altering and not config.allow_changed_config:
        listed = "".join(f"\n  {change}" for change in altering)
        raise RunChangedError(
            f"{config.paths.rollouts} was collected differently, so it cannot be resumed like this:{listed}\n"
            "Either resume it with the former settings; or start afresh without +resume_from_cache=true, which keeps "
            f"the rollouts so far in {config.paths.previous}; or accept the change with +allow_changed_config=true, "
            "which keeps the finished rollouts and collects the missing ones with the new settings."
        )
    for change in changes:
        verb = "Extending the run" if change.effect is Effect.EXTENDS else "Going on although it changed"
        logger.warning("%s: %s", verb, change)


def _changed_file(name: str, was: FileFingerprint | None, now: FileFingerprint | None) -> Iterator[Change]:
    if (was and was.sha256) != (now and now.sha256):
        yield Change(name, _file_shown(was), _file_shown(now), Effect.ALTERS)


def _file_shown(file: FileFingerprint | None) -> str | None:
    return None if file is None else f"{file.path} ({file.size_bytes:,} bytes, sha256 {file.sha256[:12]})"


def _changed_options(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    before = dict(_leaves({name: was.get(name) for name in _ROW_OPTIONS}))
    after = dict(_leaves({name: now.get(name) for name in _ROW_OPTIONS}))
    for name in before | after:
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name), Effect.ALTERS)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _changed_repeats(manifest: RunManifest, config: RolloutCollectionConfig) -> Iterator[Change]:
    was, now = manifest.options.get("num_repeats", 1), config.num_repeats
    if was == now:
        return
    pairs = [(repeats_of(was, agent) or 0, repeats_of(now, agent) or 0) for agent in manifest.agents]
    if any(after < before for before, after in pairs):
        yield Change("num_repeats", was, now, Effect.ALTERS)
    elif any(after > before for before, after in pairs):
        yield Change("num_repeats", was, now, Effect.EXTENDS)


def _changed_shard(manifest: RunManifest, config: RolloutCollectionConfig) -> Iterator[Change]:
    was, now = manifest.shard, config.chosen_shard
    if was != now:
        yield Change("shard", was and str(was), now and str(now), Effect.ALTERS)


def _changed_limit(manifest: RunManifest, config: RolloutCollectionConfig, rows_now: int) -> Iterator[Change]:
    """What counts is how many rows are used, not the number given: a limit beyond the end of the file is none."""
    was, now = manifest.options.get("limit"), config.limit
    if manifest.input_rows is None:
        yield Change("limit", was, now, Effect.ALTERS)
    elif rows_now != manifest.input_rows:
        yield Change("limit", was, now, Effect.EXTENDS if rows_now > manifest.input_rows else Effect.ALTERS)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else repr(value)
