"""The files of a run: their names, all made from its `output_jsonl_fpath`, and what a file is, judged by its content.

Results on disk are sacred, and so is everything else that happens to lie where a run wants to write. Only the files of
an earlier run make room for a new one: those that its manifest speaks for, and those that hold what such a file holds.
A few lines are looked at, so a file of any size is judged at once.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.paths import odd_file, refuse_long_names, refuse_odd_file
from nemo_gym.runs.record import NG_FAILURE_CLASS_KEY, REWARD_KEY, key_or_none

MATERIALIZED_SUFFIX = "_materialized_inputs.jsonl"
BESIDE_ROLLOUTS = (
    "_failures.jsonl",
    MATERIALIZED_SUFFIX,
    "_reward_profiling.jsonl",
    "_selected.jsonl",
    "_manifest.json",
    "_aggregate_metrics.json",
    "_agent_metrics.json",
    "_reward_profile.html",
    ".lock",
    ".corrupt",
    ".tmp",
    ".partial",
)
"""How the files end that commands write beside rollouts, and that are no rollouts themselves."""

_HEAD_BYTES = 1 << 16
_LINES = 100
"""Lines without a record, before it is no file of records: the end of a damaged one is usually sound."""
_RECORDS = 3
"""Records that tell what kind of file it is."""


def corrupt_of(path: Path) -> Path:
    """Where the damaged lines go that are taken out of a file of a run."""
    return path.with_name(f"{path.stem}.jsonl.corrupt")


@dataclass(frozen=True)
class RolloutPaths:
    """Where a run's files are.

    Nothing here but the rollouts, the failures and the materialized inputs ends in `.jsonl`, so that a
    glob over rollout files picks up no lock, no manifest and no debris.
    """

    rollouts: Path
    """One line per finished rollout, exactly as the user named it."""

    @classmethod
    def of_output(cls, output: Path) -> "RolloutPaths":
        """Those of a run that is to be written.

        Raises:
            ConfigError: the name is too long for some of them.
        """
        paths = cls(output)
        refuse_long_names("output_jsonl_fpath", *paths.of_one_run)
        return paths

    @property
    def materialized_inputs(self) -> Path:
        """Every row the run sends, with its agent, parameters and indices."""
        return self._sibling(MATERIALIZED_SUFFIX)

    @property
    def failures(self) -> Path:
        """The sidecar: one line per failed attempt."""
        return self._sibling("_failures.jsonl")

    @property
    def aggregate_metrics(self) -> Path:
        """What the agents computed from the finished rollouts."""
        return self._sibling("_aggregate_metrics.json")

    @property
    def manifest(self) -> Path:
        """What was run, with what, and how it ended."""
        return self._sibling("_manifest.json")

    @property
    def lock(self) -> Path:
        """Held by the one collector that may write."""
        return self._sibling(".lock")

    @property
    def log(self) -> Path:
        """What a collector says that runs where nobody sees it."""
        return self._sibling(".log")

    @property
    def previous(self) -> Path:
        """The folder of earlier runs that a fresh run moved out of the way."""
        return self._sibling(".previous")

    @property
    def rollouts_corrupt(self) -> Path:
        """Damaged lines taken out of the rollouts."""
        return corrupt_of(self.rollouts)

    @property
    def failures_corrupt(self) -> Path:
        """Damaged lines taken out of the failures."""
        return corrupt_of(self.failures)

    @property
    def materialized_inputs_corrupt(self) -> Path:
        """Damaged lines taken out of the materialized inputs."""
        return corrupt_of(self.materialized_inputs)

    @property
    def manifest_corrupt(self) -> Path:
        """A manifest that could not be read and was replaced."""
        return self._sibling("_manifest.json.corrupt")

    @property
    def how_to_view(self) -> str:
        """The command that shows the rollouts, for the last lines of those that make them."""
        return f"Read the rollouts: {shlex.join(['ng_view', f'+path={self.rollouts}'])}"

    @property
    def of_one_run(self) -> tuple[Path, ...]:
        """What makes up a run and moves with it."""
        return (
            self.rollouts,
            self.failures,
            self.aggregate_metrics,
            self.materialized_inputs,
            self.manifest,
            self.rollouts_corrupt,
            self.failures_corrupt,
            self.materialized_inputs_corrupt,
            self.manifest_corrupt,
        )

    def _sibling(self, ending: str) -> Path:
        return self.rollouts.with_name(self.rollouts.stem + ending)


class Kind(Enum):
    """What a regular file holds, in words."""

    EMPTY = "an empty file"
    ROLLOUTS = "a rollouts file"
    FAILURES = "a failures file (attempts that failed)"
    INPUTS = "a materialized-inputs file (rows as they were sent, without results)"
    BARE = "a file of rollout indices"
    RESULTS = "results that do not say which rollouts they are"
    ROWS = "a data set (rows without results)"
    NUMBERED_ROWS = "rows with task indices and without results"
    METRICS = "a metrics file"
    MANIFEST = "the manifest of a run"
    PROFILE = "a reward profile (one line per task)"
    EXAMPLES = "a training data set of ng_export"
    PAGE = "a web page"
    JSON = "JSON of another kind"
    TEXT = "a text file"
    BINARY = "a binary file"


RECORDS = frozenset({Kind.ROLLOUTS, Kind.FAILURES, Kind.INPUTS, Kind.BARE})
"""Files with a line per rollout or attempt."""


def kind_of(path: Path) -> Kind:
    """What a regular file holds, as far as its beginning tells."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        return Kind.BINARY if head and path.stat().st_size > len(head) else Kind.EMPTY
    if b"\0" in head:
        return Kind.BINARY
    if head.lstrip().startswith(b"["):
        return _kind_of_array(head.strip())
    objects = islice((value for value in _values(path) if isinstance(value, dict)), _RECORDS)
    kinds = Counter(map(_kind_of_object, objects))
    return max(kinds, key=lambda kind: kinds[kind]) if kinds else _kind_of_document(head.lstrip())


def _values(path: Path) -> Iterable[Any]:
    for line in islice(iter_lines(path), _LINES):
        try:
            yield parse(line.content)
        except ValueError:
            continue


def _kind_of_object(value: Mapping[str, Any]) -> Kind:
    if "manifest_version" in value:
        return Kind.MANIFEST
    if value.get(NG_FAILURE_CLASS_KEY) is not None:
        return Kind.FAILURES
    if key_or_none(value) is not None:
        if {RESPONSE_KEY_NAME, REWARD_KEY} & value.keys():
            return Kind.ROLLOUTS
        return Kind.INPUTS if RESPONSES_CREATE_PARAMS_KEY_NAME in value else Kind.BARE
    if "provenance" in value and {"prompt", "messages"} & value.keys():
        return Kind.EXAMPLES
    if {RESPONSE_KEY_NAME, REWARD_KEY} & value.keys():
        return Kind.RESULTS
    if TASK_INDEX_KEY_NAME in value and "sample" in value:
        return Kind.PROFILE
    if "provenance" in value:
        return Kind.EXAMPLES
    if not {RESPONSES_CREATE_PARAMS_KEY_NAME, "messages", "prompt"} & value.keys():
        return Kind.JSON
    return Kind.NUMBERED_ROWS if TASK_INDEX_KEY_NAME in value else Kind.ROWS


def _kind_of_array(head: bytes) -> Kind:
    names = (b'"agent_ref"', b'"agent_metrics"', b'"key_metrics"', b'"mean/')
    return Kind.METRICS if head == b"[]" or any(name in head for name in names) else Kind.JSON


def _kind_of_document(head: bytes) -> Kind:
    """Of what is no lines of objects: its beginning, without white space in front."""
    if head.startswith(b"{"):
        return Kind.MANIFEST if b'"manifest_version"' in head else Kind.JSON
    if head[:14].lower() == b"<!doctype html":
        return Kind.PAGE
    return Kind.TEXT


def what_is(path: Path) -> str:
    """What there is at a path, in words."""
    found = odd_file(path)
    return kind_of(path).value if found is None else found


def require_rollouts(path: Path, option: str) -> None:
    """Refuse a file that was given in place of rollouts; an empty one passes, and odd ones that may be rollouts.

    Raises:
        ConfigError: with what it is, and where the rollouts probably are.
    """
    kind = kind_of(path)
    if kind in (Kind.ROLLOUTS, Kind.BARE, Kind.RESULTS, Kind.EMPTY):
        return
    owner = next((path.name.removesuffix(end) for end in BESIDE_ROLLOUTS if path.name.endswith(end)), None)
    beside = None if owner is None else path.with_name(f"{owner}.jsonl")
    where = f"; the rollouts beside it are in {beside}" if beside is not None and beside.is_file() else ""
    raise ConfigError(f"+{option}={path} is {kind.value}, not {Kind.ROLLOUTS.value}{where}")


def refuse_to_replace(path: Path, option: str, *own: Kind) -> None:
    """Refuse to write over what this command has not written: kinds other than its `own`, and no regular files.

    Raises:
        ConfigError: naming the file, what it is, and the remedy.
    """
    refuse_odd_file(path, option)
    if path.exists() and (kind := kind_of(path)) not in (*own, Kind.EMPTY):
        raise ConfigError(
            f"{path} is {kind.value}, which this command did not write, and stays as it is; name another +{option}, or "
            "move it away yourself"
        )


def refuse_strangers(
    paths: RolloutPaths,
    *,
    is_spoken_for: bool = False,
    files: Collection[Path] | None = None,
    option: str = "output_jsonl_fpath",
) -> None:
    """Refuse to move or replace what is no file of an earlier run.

    A symbolic link is never moved, wherever it leads: those who find rollouts by its name would lose them.

    Args:
        paths: of the output.
        is_spoken_for: whether a manifest names these files as its own; damaged ones are recognised then, too.
        files: those of them that are to be moved or replaced; all by default.
        option: what the output was named by.

    Raises:
        ConfigError: naming the file, what it is, and the remedy.
    """
    for path, kinds in _kinds_of(paths).items():
        if not path.exists() or (files is not None and path not in files):
            continue
        if odd_file(path) is not None or not (is_spoken_for or not kinds or kind_of(path) in kinds):
            raise ConfigError(_stranger(path, paths, option))


def _kinds_of(paths: RolloutPaths) -> dict[Path, Collection[Kind]]:
    """What the files of an earlier run may hold; empty for those that take whatever was damaged."""
    return {
        **dict.fromkeys(paths.of_one_run, ()),
        **{path: {*RECORDS, Kind.EMPTY} for path in (paths.rollouts, paths.failures, paths.materialized_inputs)},
        paths.aggregate_metrics: {Kind.METRICS, Kind.EMPTY},
        paths.manifest: {Kind.MANIFEST, Kind.EMPTY},
    }


def _stranger(path: Path, paths: RolloutPaths, option: str) -> str:
    what = f"{what_is(path)} (to {path.resolve()})" if path.is_symlink() else what_is(path)
    if path == paths.rollouts:
        where = f"+{option}={path} is {what}"
    else:
        where = f"{path}, a name that +{option}={paths.rollouts} needs, is {what}"
    if path.is_symlink():
        remedy = "name the file itself, or another output; what was collected there can be resumed by either name"
        return f"{where}, which a fresh run does not move, and stays as it is: {remedy}"
    remedy = "name another output" + (", or move it away yourself" if odd_file(path) is None else "")
    return f"{where}, which is no file of an earlier run and stays as it is: {remedy}"
