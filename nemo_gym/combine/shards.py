"""Which files are combined, and whether they belong together.

- The natural glob over shards also matches what lies beside them: failures, materialized inputs, the result of an
  earlier aggregation. None of that is a shard.
- Shards must make up one run: all of them there, each once, cut from the same input. What a shard is says its manifest,
  or, when that was not copied along, its name. Files that are no shards of a run, such as slices cut by hand, are not
  judged by that.
- Rollouts of different models or settings do not make one score: what shapes a rollout is compared between shards of
  the same agent. Addresses and inputs differ between shards by design.
"""

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, listed
from nemo_gym.http.pace_books import PACE_KEYS
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.runs.files import BESIDE_ROLLOUTS, MATERIALIZED_SUFFIX, Kind, RolloutPaths, kind_of
from nemo_gym.runs.manifest import FileFingerprint, RunManifest, tell_files_apart
from nemo_gym.runs.options import RolloutAggregationConfig, repeats_of
from nemo_gym.runs.options.choosing import selection_in, selection_text
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_NAMED = 20
_OF_THE_MACHINE = frozenset({"host", "port", "num_workers", "num_replicas", "isolation", "datasets", *PACE_KEYS})
_DIFFERENCES_NAMED = 10

_NO_ROLLOUTS = frozenset(
    {
        Kind.INPUTS,
        Kind.FAILURES,
        Kind.ROWS,
        Kind.NUMBERED_ROWS,
        Kind.METRICS,
        Kind.MANIFEST,
        Kind.PROFILE,
        Kind.EXAMPLES,
    }
)
"""What is surely something else; what may be damaged rollouts is read, and that says what is wrong with it."""


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
    for path in map(Path, _expand_input_glob(config.input_glob)):
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


def _expand_input_glob(input_glob: str) -> list[str]:
    """What the comma-separated patterns match: sorted within each, without repetition, whatever kind of file it is."""
    paths: dict[str, None] = {}
    for pattern in _patterns(input_glob):
        matches = sorted(glob.glob(pattern))  # noqa: PTH207 - patterns may be absolute
        if not matches and Path(pattern).exists():  # a name with brackets in it
            matches = [pattern]
        paths.update(dict.fromkeys(matches))
    return list(paths)


def _patterns(input_glob: str) -> list[str]:
    return [str(Path(part.strip()).expanduser()) for part in input_glob.split(",") if part.strip()]


def _why_not(path: Path, output: Path, *, is_named: bool) -> str | None:
    if not path.is_file():
        return "it is not a file"
    ending = next((ending for ending in BESIDE_ROLLOUTS if path.name.endswith(ending)), None)
    if ending is not None:
        return f"files that end in {ending} are not rollouts"
    if not is_named and output.exists() and path.samefile(output):
        return "it is the output"
    kind = kind_of(path)
    if kind in _NO_ROLLOUTS:
        raise ConfigError(
            f"{path} is {kind.value}, not {Kind.ROLLOUTS.value}; let +input_glob match rollout files only"
        )
    return None


def _without_rollouts(found: ShardFiles, output: RolloutPaths) -> Iterator[RolloutPaths]:
    for path, _ in found.excluded:
        paths = RolloutPaths(path.with_name(f"{path.name.removesuffix(MATERIALIZED_SUFFIX)}.jsonl"))
        if (
            path.name.endswith(MATERIALIZED_SUFFIX)
            and paths.rollouts != output.rollouts
            and not paths.rollouts.exists()
        ):
            yield paths


def _nothing_matched(input_glob: str, excluded: list[Excluded]) -> str:
    message = f"No shards matched input_glob={input_glob!r} (looked in {Path.cwd()})"
    if excluded:
        left_out = (f"{path} ({reason})" for path, reason in excluded)
        message += f"; what it matches is left out: {listed(left_out, 3)}"
    return f"{message}. Give the path of a rollouts file, a glob in quotes, or several of them separated by commas"


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
    _refuse_difference("input", {path: manifest.input for path, manifest in known.items()})
    _refuse_difference("earlier run", {path: manifest.of for path, manifest in known.items()})
    _refuse_difference("selection", {path: _selection_text(manifest) for path, manifest in known.items()})
    _refuse_difference("number of rows", {path: manifest.input_rows for path, manifest in known.items()})


def _refuse_difference(what: str, value_of: Mapping[Path, FileFingerprint | str | int | None]) -> None:
    examples: list[tuple[Any, Path]] = []
    for path, value in value_of.items():
        if all(value != other for other, _ in examples):
            examples.append((value, path))
    if len(examples) > 1:
        described = "; ".join(f"{'unknown' if value is None else value} in {path}" for value, path in examples)
        raise ShardSetError(
            f"the shards do not belong together, their {what} differs: {described}. Collect them again from one input, "
            "or accept it with +allow_changed_config=true"
        )


def _selection_text(manifest: RunManifest) -> str:
    selection = selection_in(manifest.options)
    if manifest.of is not None:  # which is known by its content
        selection.pop("of", None)
    return selection_text(selection) or "the whole input"


def _missing(files: Mapping[Shard, Path]) -> list[Path]:
    """The files that would be there, named as those that are."""
    shard, path = next(iter(files.items()))
    stem = path.stem.removesuffix(shard.file(Path("x")).stem.removeprefix("x"))
    output = path.with_name(f"{stem}{path.suffix}")
    absent = (Shard(index, shard.count) for index in range(shard.count))
    return [other.file(output) for other in absent if other not in files]


Settings = dict[str, Any]
"""What shaped the rollouts of one agent, flat."""


class DifferentConfigsError(ConfigError, ValueError):
    """Shards were collected with different settings."""


def check_configs(manifests: Mapping[Path, RunManifest], *, allow_changed: bool) -> list[str]:
    """The differences between shards, each as a line of text.

    Raises:
        DifferentConfigsError: there are some, and they are not allowed.
    """
    differences = list(dict.fromkeys(_differences(manifests)))
    if differences and not allow_changed:
        named = differences[:_DIFFERENCES_NAMED]
        more = len(differences) - len(named)
        lines = "".join(f"\n  {difference}" for difference in [*named, *([f"and {more} more"] if more else [])])
        raise DifferentConfigsError(
            f"the shards were collected differently, so their rollouts do not make one score:{lines}\n"
            "Aggregate them separately, or accept it with +allow_changed_config=true"
        )
    for difference in differences:
        logger.warning("shards were collected differently: %s", difference)
    return differences


def _differences(manifests: Mapping[Path, RunManifest]) -> Iterator[str]:
    first_of_agent: dict[str, tuple[Path, Settings]] = {}
    for path, manifest in manifests.items():
        for agent in manifest.agents:
            settings = _settings(manifest, agent)
            first_path, first = first_of_agent.setdefault(agent, (path, settings))
            for name in first | settings:
                was, now = first.get(name), settings.get(name)
                if was != now:
                    was_text, now_text = _texts(was, now)
                    yield f"{name}: {was_text} in {first_path}, {now_text} in {path}"


def _settings(manifest: RunManifest, agent: str) -> Settings:
    options = manifest.options
    config = manifest.config or {}
    return {
        **dict(_leaves(options.get(RESPONSES_CREATE_PARAMS_KEY_NAME), RESPONSES_CREATE_PARAMS_KEY_NAME)),
        "num_repeats": repeats_of(options.get("num_repeats", 1), agent),
        "num_repeats_add_seed": bool(options.get("num_repeats_add_seed")),
        "skills": (options.get("skills") or {}).get("path"),
        "prompt_config": manifest.prompt,
        "models": sorted(manifest.models),
        **{
            name: value
            for instance in _with_servers(config, agent)
            for name, value in _leaves(config[instance], instance)
        },
    }


def _with_servers(config: Mapping[str, Any], agent: str) -> list[str]:
    """The agent and the servers it refers to, directly or not, as far as the config has them."""
    found = [agent] if agent in config else []
    for instance in found:
        found += [name for name in _refs(config[instance]) if name in config and name not in found]
    return found


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("type"), str) and isinstance(node.get("name"), str):
            yield node["name"]
        for inner in node.values():
            yield from _refs(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _refs(inner)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        yield path, node
        return
    for key, inner in node.items():
        name = str(key)
        if name not in _OF_THE_MACHINE and "url" not in name:
            yield from _leaves(inner, f"{path}.{name}")


def _texts(one: Any, other: Any) -> tuple[str, str]:
    if isinstance(one or other, FileFingerprint):
        return tell_files_apart(one, other)
    return _text(one), _text(other)


def _text(value: Any) -> str:
    return "not set" if value is None else shown(repr(value), 60)
