"""Which rows of an input a run has that was told to choose, and in which order.

Choosing reads the input once for the conditions, and once more where task indices matter; of a row it keeps a byte, and
of a chosen one eight for its place in a random order. Loaded only by runs that choose.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, did_you_mean, listed
from nemo_gym.jsonl import Line, MalformedLineError
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.paths import near_files
from nemo_gym.row_files import iter_row_lines, read_rows
from nemo_gym.runs.facts import bare_name
from nemo_gym.runs.files import Kind, RolloutPaths, kind_of, require_rollouts
from nemo_gym.runs.input_check import TakenIndices, estimated_lines
from nemo_gym.runs.manifest import fingerprint, read_manifest
from nemo_gym.runs.options.choosing import ChoosingOptions, TaskRanges, selection_text
from nemo_gym.runs.read import plain_records
from nemo_gym.runs.record import REWARD_KEY, IndexSet, KeySet, Row, SeenFilter, is_finite_number
from nemo_gym.runs.rows import Numbers
from nemo_gym.runs.select import Expression, field_of

logger = logging.getLogger(__name__)

_LOOKED_INTO = 100
"""Rows whose nested fields are known by name to whoever misspells one."""
_MOST_NAMES = 10_000
_STEP, _FIRST_MIX, _SECOND_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of SplitMix64, which gives different numbers to different positions."""
Positions: TypeAlias = NDArray[np.int64]
RepeatsOf = Callable[[Row], int]
"""How many rollouts a row asks for."""


class Earlier:
    """What became of the rollouts of an earlier run, as far as `+only` asks for it."""

    def __init__(self, only: str, given: str) -> None:
        """Read the rollouts file that was given as `+of`, and the failures beside it.

        Raises:
            ConfigError: it is no rollouts file.
        """
        self._only = only
        self.path = _existing_rollouts(given)
        self._finished, self._failed = KeySet(), KeySet()
        self._solved, self._tried = IndexSet(), IndexSet()
        for key, _, result in plain_records(self.path, "skip"):
            assert key is not None
            self._finished.add(key)
            self._tried.add(key[0])
            reward = result.get(REWARD_KEY)
            if is_finite_number(reward) and reward >= 1:
                self._solved.add(key[0])
        for key, _, _ in plain_records(RolloutPaths(self.path).failures, "skip", may_lack_key=True):
            if key is not None:
                self._failed.add(key)
                self._tried.add(key[0])

    def wanted(self, task_index: Any, rollouts: range) -> Sequence[int]:
        """Those of the rollouts of a task that are chosen."""
        if self._only == "unsolved":
            return rollouts if task_index in self._tried and task_index not in self._solved else ()
        missing = [rollout for rollout in rollouts if (task_index, rollout) not in self._finished]
        if self._only == "missing":
            return missing
        return [rollout for rollout in missing if (task_index, rollout) in self._failed]


def _existing_rollouts(given: str) -> Path:
    path = Path(given).expanduser()
    if not path.exists():
        near = near_files(given)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigPathNotFoundError(f"+of={given}: there is no such file{hint} (looked in {Path.cwd()})")
    if not path.is_file():
        raise ConfigError(f"+of={given} is no file; name the rollouts file of the earlier run")
    require_rollouts(path, "of")
    if kind_of(path) is Kind.RESULTS:
        raise ConfigError(f"+of={given} holds {Kind.RESULTS.value}; name the rollouts file of a run")
    return path


@dataclass(frozen=True)
class Chosen:
    """The rows of an input that a run has."""

    is_chosen: bytearray
    """For each row of the input."""
    rows: int
    """How many are chosen."""
    order: Positions | None = None
    """Their order, as numbers among the chosen ones; None when it is that of the file."""
    earlier: Earlier | None = None
    """What decides about single rollouts, too."""

    def lines(self, path: Path) -> Iterator[Line]:
        """The chosen rows as lines, in file order."""
        return compress(iter_row_lines(path), self.is_chosen)


def choose(
    path: Path, options: ChoosingOptions, limit: int | None, taken: TakenIndices, repeats_of: RepeatsOf
) -> Chosen:
    """Find the rows that `options` leave; everything about the numbers of tasks goes into `taken`.

    Raises:
        ConfigError: a row is not JSON, an option names what is not there, or no row is left.
    """
    survey = _Survey(path, options)
    survey.read(taken)
    earlier = None if options.only is None or options.of is None else Earlier(options.only, options.of)
    if earlier is not None:
        _warn_of_another_input(earlier.path, path)
    steps = _Steps(path, options, len(survey.holds))
    tasks = None if options.tasks is None else TaskRanges.parse(options.tasks)
    if tasks is not None or earlier is not None:
        _narrow(path, survey.holds, steps, taken, repeats_of, tasks, earlier)
    elif options.where is not None:
        steps.note("where", survey.holds.count(1))
    positions = np.flatnonzero(np.frombuffer(survey.holds, np.uint8)).astype(np.int64)
    if options.shuffle_seed is not None:
        positions = positions[np.argsort(_priorities(positions, options.shuffle_seed, "shuffle"))]
    if options.sample is not None:
        positions = _sampled(positions, options.sample, options.sample_seed or 0, survey.strata_of(positions))
        steps.note("sample", len(positions))
    positions = positions[:limit]
    steps.report(len(positions))
    is_chosen = bytearray(len(survey.holds))
    np.frombuffer(is_chosen, np.uint8)[positions] = 1
    order = None if options.shuffle_seed is None else np.argsort(np.argsort(positions))
    return Chosen(is_chosen, len(positions), order, earlier)


class _Survey:
    """The first reading: which rows fulfil the condition, and which kind of row each is."""

    def __init__(self, path: Path, options: ChoosingOptions) -> None:
        self._path = path
        self._condition = None if options.where is None else Expression.parse(options.where, "+where")
        self._names = [] if self._condition is None else self._condition.names()
        self._sample_by = options.sample_by
        self._unseen = {*self._names, *([] if options.sample_by is None else [options.sample_by])}
        self._known: dict[str, None] = {}
        self.holds = bytearray()
        """For each row whether it fulfils the condition."""
        self._strata = array("i")
        self._number_of_stratum: dict[bytes, int] = {}

    def read(self, taken: TakenIndices) -> None:
        """Read every row.

        Raises:
            ConfigError: a row is not JSON, or no row has a field that is asked for.
        """
        seen = SeenFilter(estimated_lines(self._path))
        for line, row in read_rows(self._path):
            if isinstance(row.get(TASK_INDEX_KEY_NAME), list | dict):
                raise MalformedLineError(f"{self._path}, line {line.number}: {TASK_INDEX_KEY_NAME} must be a number")
            taken.note(row, line.content, seen)
            if self._unseen:
                self._unseen -= {name for name in self._unseen if _has(row, bare_name(name))}
                self._note_names(row)
            self.holds.append(self._condition is None or self._condition.holds(_looking_into(row)))
            if self._sample_by is not None:
                self._strata.append(self._stratum_of(row, self._sample_by))
        if self.holds:
            self._refuse_unknown()

    def strata_of(self, positions: Positions) -> NDArray[np.int32]:
        """Which kind each of some rows is; all the same when nobody asked."""
        if self._sample_by is None:
            return np.zeros(len(positions), np.int32)
        return np.array(self._strata, np.int32)[positions]

    def _stratum_of(self, row: Row, name: str) -> int:
        value = orjson.dumps(field_of(row, bare_name(name)), option=orjson.OPT_SORT_KEYS)
        return self._number_of_stratum.setdefault(value, len(self._number_of_stratum))

    def _note_names(self, row: Row) -> None:
        if len(self._known) < _MOST_NAMES:
            deep = len(self.holds) < _LOOKED_INTO
            self._known.update(dict.fromkeys(_names_in(row) if deep else row))

    def _refuse_unknown(self) -> None:
        known = [*self._known, *(name for name in self._names if name not in self._unseen)]
        if self._condition is not None:
            self._condition.require_known(known, list(self._known))
        if self._sample_by in self._unseen:
            meant = did_you_mean(str(self._sample_by), known)
            raise ConfigError(
                f"+sample_by={self._sample_by}: no row of {self._path} has such a field{meant} "
                f"(there are {listed(self._known, 30)})"
            )


def _looking_into(row: Row) -> Callable[[str], Any]:
    return lambda name: field_of(row, bare_name(name))


def _has(row: Mapping[str, Any], name: str) -> bool:
    return name in row or field_of(row, name) is not None


def _names_in(row: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a row and, dotted, what is in them."""
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)


class _Steps:
    """How many rows each step leaves."""

    def __init__(self, path: Path, options: ChoosingOptions, rows: int) -> None:
        self._path, self._options, self._rows = path, options, rows
        self._left: list[tuple[str, int]] = []

    def note(self, name: str, left: int) -> None:
        """Take note of what a step leaves.

        Raises:
            ConfigError: that is nothing; the input itself had rows.
        """
        if not left and self._rows:
            before = self._left[-1] if self._left else None
            of = f"{self._rows:,} rows of {self._path}"
            of = of if before is None else f"{before[1]:,} rows that +{before[0]} leaves of the {of}"
            shown = selection_text({name: self._options.selection[name]})
            of_whom = f" +of={self._options.of}" if name == "only" else ""
            raise ConfigError(f"{shown}{of_whom} leaves none of the {of}, so there is nothing to roll out")
        self._left.append((name, left))

    def report(self, chosen: int) -> None:
        """Say what was chosen."""
        steps = ", ".join(f"+{name} leaves {left:,}" for name, left in self._left)
        logger.info(
            "Chosen: %s of the %s rows of %s%s", f"{chosen:,}", f"{self._rows:,}", self._path, steps and f" ({steps})"
        )


def _narrow(
    path: Path,
    holds: bytearray,
    steps: _Steps,
    taken: TakenIndices,
    repeats_of: RepeatsOf,
    tasks: TaskRanges | None,
    earlier: Earlier | None,
) -> None:
    """The second reading: leave out what `+tasks` and `+only` do not mean, by the index that each task has."""
    numbers = Numbers(taken)
    hits = np.zeros(0 if tasks is None else len(tasks.ranges), bool)
    largest = -1
    by_tasks = by_where = 0
    for position, (line, row) in enumerate(read_rows(path)):
        repeats = repeats_of(row)
        index, first = numbers.claim(row, line.content, repeats)
        if tasks is not None:
            largest = max(largest, index) if type(index) is int else largest
            place = tasks.place_of(index)
            if place is None:
                holds[position] = False
                continue
            hits[place] = True
        by_tasks += 1
        by_where += holds[position]
        if holds[position] and earlier is not None:
            holds[position] = bool(len(earlier.wanted(index, range(first, first + repeats))))
    if tasks is not None:
        _refuse_absent(tasks, hits, largest, path)
        steps.note("tasks", by_tasks)
    if by_where < by_tasks:
        steps.note("where", by_where)
    if earlier is not None:
        steps.note("only", holds.count(1))


def _refuse_absent(tasks: TaskRanges, hits: NDArray[np.bool_], largest: int, path: Path) -> None:
    for (first, last), is_hit in zip(tasks.ranges, hits.tolist(), strict=True):
        if last > largest:
            there = f"0 to {largest}" if largest >= 0 else "no numbers"
            raise ConfigError(f"+tasks={tasks}: {last} is beyond the input; the tasks of {path} go by {there}")
        if not is_hit:
            missing = first if first == last else f"{first}-{last}"
            raise ConfigError(f"+tasks={tasks}: there is no task {missing} in {path}, whose rows bring their indices")


def _warn_of_another_input(of: Path, path: Path) -> None:
    """Indices of another input are those of other tasks, unless rows bring them along."""
    manifest = read_manifest(RolloutPaths(of).manifest)
    if manifest is None or manifest.input is None:
        return
    if path.stat().st_size != manifest.input.size_bytes or fingerprint(path) != manifest.input:
        logger.warning(
            "+of=%s was collected from %s, which is not the same as %s: tasks are told by their index, so be sure that "
            "the rows they have in common have the same ones",
            of,
            manifest.input.path,
            path,
        )


def _priorities(positions: Positions, seed: int, purpose: str) -> NDArray[np.uint64]:
    """A random number for each position in the input, all different; always the same for a seed and a purpose."""
    start = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    mixed = positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST_MIX)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_MIX)
    return mixed ^ (mixed >> np.uint64(31))


def _sampled(positions: Positions, size: int, seed: int, strata: NDArray[np.int32]) -> Positions:
    """So many of the positions, in the order they have.

    Of n rows of one kind the r-th in random order, counted from 0, has its turn at (2r + 1) / n; those whose turn is
    first are drawn. So every kind has its share, rounded, and a larger sample has all that a smaller one has.
    """
    priorities = _priorities(positions, seed, "sample")
    by_kind = np.lexsort((priorities, strata))
    sizes = np.bincount(strata, minlength=1)
    starts = np.cumsum(sizes) - sizes
    ranks = np.arange(len(positions)) - starts[strata[by_kind]]
    turns = np.empty(len(positions))
    turns[by_kind] = (2 * ranks + 1) / sizes[strata[by_kind]]
    drawn = np.lexsort((priorities, turns))[:size]
    return positions[np.sort(drawn)]
