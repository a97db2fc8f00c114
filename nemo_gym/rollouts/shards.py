"""Which files `ng_aggregate_rollouts` combines.

The natural glob over shards also matches what lies beside them: failures, materialized inputs, the
result of an earlier aggregation. None of that is a shard.
"""

import glob
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_gym.errors import ConfigPathNotFoundError, listed
from nemo_gym.rollouts.config import RolloutAggregationConfig
from nemo_gym.rollouts.paths import RolloutPaths

logger = logging.getLogger(__name__)

_MATERIALIZED = "_materialized_inputs.jsonl"
_DERIVED = (
    "_failures.jsonl",
    _MATERIALIZED,
    "_reward_profiling.jsonl",
    "_manifest.json",
    "_aggregate_metrics.json",
    "_agent_metrics.json",
    "_reward_profile.html",
    ".lock",
    ".corrupt",
    ".tmp",
    ".partial",
)
"""How the files end that commands write beside rollouts."""


class Excluded(NamedTuple):
    """A file that a pattern matches and that is no shard."""

    path: Path
    reason: str


@dataclass
class ShardFiles:
    """What the patterns come down to."""

    shards: list[Path] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    without_rollouts: list[RolloutPaths] = field(default_factory=list)
    """Runs of which only the materialized inputs are there: all their rollouts are missing."""


def find_shards(config: RolloutAggregationConfig) -> ShardFiles:
    """The files to combine, in the order of the patterns.

    Raises:
        ConfigPathNotFoundError: there are none (also a `FileNotFoundError`).
    """
    found = ShardFiles()
    seen: set[tuple[int, int]] = set()
    named = {Path(pattern) for pattern in _patterns(config.input_glob) if not glob.has_magic(pattern)}
    for path in _expand_input_glob(config.input_glob):
        reason = _why_not(path, config.paths.rollouts, is_named=path in named)
        if reason is not None:
            found.excluded.append(Excluded(path, reason))
            continue
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) not in seen:
            seen.add((stat.st_dev, stat.st_ino))
            found.shards.append(path)
    found.without_rollouts = list(_without_rollouts(found, config.paths))
    if not found.shards:
        raise ConfigPathNotFoundError(_nothing_matched(config.input_glob, found.excluded))
    for path, reason in found.excluded:
        logger.debug("%s is left out: %s", path, reason)
    return found


def _expand_input_glob(input_glob: str) -> list[Path]:
    """What the comma-separated patterns match: sorted within each, without repetition, whatever kind of file it is."""
    paths: dict[Path, None] = {}
    for pattern in _patterns(input_glob):
        matches = sorted(glob.glob(pattern))  # noqa: PTH207 - patterns may be absolute
        if not matches and Path(pattern).exists():  # a name with brackets in it
            matches = [pattern]
        paths.update((Path(match), None) for match in matches)
    return list(paths)


def _patterns(input_glob: str) -> list[str]:
    return [str(Path(part.strip()).expanduser()) for part in input_glob.split(",") if part.strip()]


def _why_not(path: Path, output: Path, *, is_named: bool) -> str | None:
    if not path.is_file():
        return "it is not a file"
    ending = next((ending for ending in _DERIVED if path.name.endswith(ending)), None)
    if ending is not None:
        return f"files that end in {ending} are not rollouts"
    if not is_named and output.exists() and path.samefile(output):
        return "it is the output"
    return None


def _without_rollouts(found: ShardFiles, output: RolloutPaths) -> Iterator[RolloutPaths]:
    for path, _ in found.excluded:
        paths = RolloutPaths(path.with_name(f"{path.name.removesuffix(_MATERIALIZED)}.jsonl"))
        if path.name.endswith(_MATERIALIZED) and paths.rollouts != output.rollouts and not paths.rollouts.exists():
            yield paths


def _nothing_matched(input_glob: str, excluded: list[Excluded]) -> str:
    message = f"No shards matched input_glob={input_glob!r} (looked in {Path.cwd()})"
    if excluded:
        left_out = (f"{path} ({reason})" for path, reason in excluded)
        message += f"; what it matches is left out: {listed(left_out, 3)}"
    return f"{message}. Give the path of a rollouts file, a glob in quotes, or several of them separated by commas"
