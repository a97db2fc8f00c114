"""Do the shards make up one run: all of them there, each once, cut from the same input?

What a shard is says its manifest, or, when that was not copied along, its name. Files that are no shards of a run,
such as slices cut by hand, are not judged here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_gym.errors import ConfigError, listed
from nemo_gym.rollouts.config import RolloutAggregationConfig
from nemo_gym.rollouts.manifest import RunManifest
from nemo_gym.rollouts.sharding import Shard

_NAMED = 20


class ShardSetError(ConfigError, ValueError):
    """Shards are missing, there more than once, or of different runs."""


class ShardSet(NamedTuple):
    """The shards of one run."""

    files: Mapping[Shard, Path]
    missing: Sequence[Path]
    """The files of the shards that are not there."""

    @property
    def is_complete(self) -> bool:
        """Whether there is a run cut into shards, and all of them are there."""
        return bool(self.files) and not self.missing


def check_shard_set(
    paths: Sequence[Path], manifests: Mapping[Path, RunManifest], config: RolloutAggregationConfig
) -> ShardSet:
    """Find the shards of a run among the rollout files, and check that they make it up.

    Raises:
        ShardSetError: naming the files, when they do not and the options do not say that this is known.
    """
    by_shard: dict[Shard, list[Path]] = {}
    for path in paths:
        shard = _shard_of(path, manifests.get(path))
        if shard is not None:
            by_shard.setdefault(shard, []).append(path)
    if not by_shard:
        return ShardSet({}, [])
    _refuse_different_splits(by_shard)
    if config.on_duplicate == "error":
        _refuse_repeated(by_shard)
    files = {shard: found[0] for shard, found in by_shard.items()}
    if not config.allow_changed_config:
        _refuse_different_inputs(files, manifests)
    missing = _missing(files)
    if missing and not config.allow_missing_shards:
        raise ShardSetError(
            f"{len(missing)} of {next(iter(files)).count} shards of this run are missing: {listed(missing, _NAMED)}. "
            f"There are {listed(files.values(), _NAMED)}. Collect the missing ones (the same command with their "
            "+shard), correct +input_glob, or combine what is there with +allow_missing_shards=true"
        )
    return ShardSet(files, missing)


def _shard_of(path: Path, manifest: RunManifest | None) -> Shard | None:
    return Shard.of_file(path) if manifest is None else manifest.shard


def _refuse_different_splits(by_shard: Mapping[Shard, Sequence[Path]]) -> None:
    example_of_count = {shard.count: paths[0] for shard, paths in by_shard.items()}
    if len(example_of_count) > 1:
        named = ", ".join(f"{path} is one of {count}" for count, path in sorted(example_of_count.items()))
        raise ShardSetError(
            f"the shards are of runs that were cut into different numbers of them: {named}. "
            "Name the shards of one run in +input_glob"
        )


def _refuse_repeated(by_shard: Mapping[Shard, Sequence[Path]]) -> None:
    repeated = [f"shard {shard}: {listed(paths, _NAMED)}" for shard, paths in by_shard.items() if len(paths) > 1]
    if repeated:
        raise ShardSetError(
            f"shards were run more than once: {'; '.join(repeated[:_NAMED])}. Take one of each out of +input_glob, or "
            "say whose records count: +on_duplicate=first or +on_duplicate=last, in the order of input_glob"
        )


def _refuse_different_inputs(files: Mapping[Shard, Path], manifests: Mapping[Path, RunManifest]) -> None:
    """Whatever shifts the task indices makes shards overlap, or leave gaps, without a trace in their numbers."""
    known = {path: manifests[path] for path in files.values() if path in manifests}
    _refuse_difference("input", {path: _input_text(manifest) for path, manifest in known.items()})
    _refuse_difference("number of rows", {path: str(manifest.input_rows) for path, manifest in known.items()})


def _refuse_difference(what: str, text_of: Mapping[Path, str]) -> None:
    example_of = {text: path for path, text in text_of.items()}
    if len(example_of) > 1:
        described = "; ".join(f"{text} in {path}" for text, path in example_of.items())
        raise ShardSetError(
            f"the shards do not belong together, their {what} differs: {described}. Collect them again from one input, "
            "or accept it with +allow_changed_config=true"
        )


def _input_text(manifest: RunManifest) -> str:
    """By content: shards that prepared their data themselves have it in different files."""
    file = manifest.input
    return "unknown" if file is None else f"{file.size_bytes:,} bytes with sha256 {file.sha256[:12]}"


def _missing(files: Mapping[Shard, Path]) -> list[Path]:
    """The files that would be there, named as those that are."""
    shard, path = next(iter(files.items()))
    stem = path.stem.removesuffix(shard.file(Path("x")).stem.removeprefix("x"))
    output = path.with_name(f"{stem}{path.suffix}")
    absent = (Shard(index, shard.count) for index in range(shard.count))
    return [other.file(output) for other in absent if other not in files]
