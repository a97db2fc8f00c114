"""Input file → materialized rows: the second pass, which numbers, repeats and seeds the rows.

Rows come out one at a time and as the bytes of their line in the materialized file; no list of them is ever held.
Repeats of a row differ in one number, so a row is serialized once, not once per repeat. The file has every row a
run sends and is complete before the first request: written aside and renamed, it is never seen half written. When a
run is extended, the rows it already had must come out unchanged: their results are in the rollouts file.

Tasks go by the numbers that rows bring along, and for all others by the order in which they come; equal lines are one
task. Whatever is used of an input, its tasks are numbered as a whole, so that what was collected from a part of it
belongs to the same tasks in a run of all.
"""

import json
import logging
import tempfile
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import Line, count_lines, ends_torn, parse, to_line
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SKILLS_REF_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.paths import write_aside
from nemo_gym.row_files import is_plain, iter_row_lines
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.input_check import (
    InputScan,
    RowRules,
    TakenIndices,
    drop_reserved,
    line_hash,
    scan_input,
    size_and_time,
    with_seed,
)
from nemo_gym.runs.manifest import Expected, RunChangedError, masked_options
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.choosing import selection_text
from nemo_gym.runs.read import records
from nemo_gym.runs.record import (
    IndexSet,
    IntSet,
    KeySet,
    RolloutKey,
    Row,
    agent_name_of,
    without_garbage_collection,
)

logger = logging.getLogger(__name__)

_AT_ONCE = 256
_LONG_LINE_BYTES = 65_536
_MOST = 2**63
_MANY = 2**32
_ROLLOUT_INDEX_BYTES = f',"{ROLLOUT_INDEX_KEY_NAME}":'.encode()
ExpectedByAgent = dict[str, Expected]


_DIGEST_BYTES = 16
ASKED = ("input", "instructions", "tools")
"""The parts of a request that say what is asked; the others say how."""


class Repeats(NamedTuple):
    """Consecutive rollouts of one task as lines of the materialized file, and what is worth knowing unparsed."""

    agent: str
    first_rollout_index: int
    lines: Sequence[bytes]
    begins_task: bool | None = None
    """Whether no other rows of the task came before; None: if the first rollout index is 0."""


class Numbers:
    """Hands out task indices and counts the rollouts of tasks that occur on several lines."""

    def __init__(self, taken: TakenIndices) -> None:
        self._taken = taken
        self._supplied: Container[int] = taken.supplied if len(taken.supplied) else ()
        self._next_index = 0
        self._emitted: dict[Any, int] = {}
        """Rollouts so far of a supplied index that occurs more than once."""
        self._of_line: dict[bytes, int] = {}
        """Task index and rollouts so far of a repeated line, in one number: there may be very many."""
        self._merged = self._rows = 0
        """Rows that became part of the task of an earlier one; all of them."""

    def report(self, path: Path) -> None:
        """Say that equal rows have become one task, which makes it more rollouts than were asked for."""
        if self._merged:
            logger.warning(
                "%d of the %d rows of %s are equal to earlier ones, so they are further rollouts of the same tasks: "
                "%d tasks. To keep them apart, give each row a number of its own as %s",
                self._merged,
                self._rows,
                path,
                self._rows - self._merged,
                TASK_INDEX_KEY_NAME,
            )

    def claim(self, row: Row, content: bytes, repeats: int) -> tuple[Any, int]:
        """The row's task index and the first of its rollout indices."""
        self._rows += 1
        if TASK_INDEX_KEY_NAME not in row:
            if line_hash(content) in self._taken.repeated_lines:
                return self._claim_repeated_line(content, repeats)
            return self._fresh_index(), 0
        index = row[TASK_INDEX_KEY_NAME]
        if index not in self._taken.supplied_twice:
            return index, 0
        first = self._emitted.get(index, 0)
        self._emitted[index] = first + repeats
        return index, first

    def _claim_repeated_line(self, content: bytes, repeats: int) -> tuple[int, int]:
        # The hash that found it repeated may be wrong; this one is not.
        digest = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        known = self._of_line.get(digest)
        index, first = (self._fresh_index(), 0) if known is None else divmod(known, _MANY)
        self._merged += known is not None
        self._of_line[digest] = index * _MANY + first + repeats
        return index, first

    def _fresh_index(self) -> int:
        index = self._next_index
        while index in self._supplied:
            index += 1
        self._next_index = index + 1
        return index


class InputRows:
    """The materialized rows of one input file under one config; each iteration reads the file again."""

    def __init__(self, config: RolloutCollectionConfig) -> None:
        self._config = config
        self.rules = RowRules.of(config)

    @cached_property
    def scan(self) -> InputScan:
        """The first pass, made once; raises when any row is unusable."""
        announce(self._config)
        return scan_input(self.rules)

    def check(self) -> None:
        """Make the first pass now, not when the rows are asked for.

        Raises:
            ConfigError: rows are unusable, or there are none.
        """
        if not self.scan.rows:
            raise no_rows(self.rules.path)

    def __iter__(self) -> Iterator[Repeats]:
        """Every row with its repeats adjacent, in the order of the file unless it is shuffled."""
        scan = self.scan
        if size_and_time(self.rules.path) != scan.size_and_time:
            raise ConfigError(f"{self.rules.path} changed while it was being read; start again when it is complete")
        return _materialize(self.rules, scan)

    def count_rollouts(self) -> int:
        """How many rollouts there are to be."""
        chosen = self.scan.chosen
        if chosen is not None and chosen.earlier is not None:
            return sum(len(repeats.lines) for repeats in self)
        return sum(rows * (self.rules.repeats_of(agent) or 0) for agent, rows in self.scan.rows_of_agent.items())


def announce(config: RolloutCollectionConfig) -> None:
    """Say which options shape the rows of this run."""
    if config.selection:
        logger.info("Choosing rows: %s", selection_text(config.selection))
    if config.limit is not None:
        logger.info("Using only the first %d %s", config.limit, "of them" if config.selection else "rows")
    if config.chosen_shard is not None:
        logger.info("Shard %s of the run: %s", config.chosen_shard, config.paths.rollouts)
    if config.num_repeats_add_seed:
        logger.info("Adding a seed to every rollout through metadata.extra_body (openai_model does not honour it)")
    if config.responses_create_params:
        shown = masked_options(config.responses_create_params)
        logger.info("Laying over every row's %s: %s", RESPONSES_CREATE_PARAMS_KEY_NAME, shown)
    if isinstance(config.num_repeats, dict):
        logger.info("Rollouts per row, by agent: %s", config.num_repeats)
    if config.prompt_config:
        logger.info("Filling the prompt %s", config.prompt_config)


def no_rows(path: str | Path) -> ConfigError:
    """What to raise about an input without a single row."""
    return ConfigError(
        f"{path} has no rows, so there is nothing to roll out: correct +input_jsonl_fpath or fill the file"
    )


def preprocess(config: RolloutCollectionConfig) -> list[Row]:
    """All materialized rows as a list, for callers that want them in memory."""
    with without_garbage_collection():
        return [parse(line) for repeats in InputRows(config) for line in repeats.lines]


def materialized(rows: Iterable[Row], *, is_chosen: bool = False) -> Iterator[Repeats]:
    """Rows that were made elsewhere, as they are written to the materialized file.

    Of those that were chosen from an input, the first rollout of a task may be any.
    """
    begun = IndexSet()
    for row in rows:
        begins_task = begun.add(row.get(TASK_INDEX_KEY_NAME)) if is_chosen else None
        yield Repeats(agent_name_of(row) or "", row.get(ROLLOUT_INDEX_KEY_NAME, 0), [to_line(row)], begins_task)


def _materialize(rules: RowRules, scan: InputScan) -> Iterator[Repeats]:
    numbers = Numbers(scan)
    unused: list[str] = []
    sent = 0
    begun = None if scan.chosen is None else IndexSet()
    earlier = None if scan.chosen is None else scan.chosen.earlier
    for row, task_index, first in _in_order(rules, scan, numbers):
        drop_reserved(row)
        agent = rules.complete(row, unused)
        row[TASK_INDEX_KEY_NAME] = task_index
        if rules.shard is not None and not rules.shard.has_task(task_index):
            continue
        sent += 1
        rollouts: Sequence[int] = range(first, first + (rules.repeats_of(agent) or 0))
        if earlier is not None:
            rollouts = earlier.wanted(task_index, range(first, first + len(rollouts)))
        begins_task = None if begun is None else begun.add(task_index)
        for start in range(0, len(rollouts), _AT_ONCE):
            indices = rollouts[start : start + _AT_ONCE]
            lines = _lines(row, indices, add_seed=rules.add_seed)
            yield Repeats(agent, indices[0], lines, begins_task and not start)
    if rules.shard is not None and not sent:
        logger.warning("Shard %s has none of the %d rows of %s: nothing to do", rules.shard, scan.rows, rules.path)
    if begun is None:
        numbers.report(rules.path)


def _in_order(rules: RowRules, scan: InputScan, numbers: Numbers) -> Iterator[tuple[Row, Any, int]]:
    """The rows that are used, in the order in which they are sent: (row, task index, first rollout index)."""
    if scan.chosen is None or scan.chosen.order is None:
        for _, row, task_index, first in _numbered(rules, scan, numbers):
            yield row, task_index, first
        return
    is_own = is_plain(rules.path)
    with rules.path.open("rb") if is_own else tempfile.TemporaryFile() as file:
        rows = _RowsAtRandom(cast(BinaryIO, file), is_own=is_own)
        for line, _, task_index, first in _numbered(rules, scan, numbers):
            rows.add(line, task_index, first)
        for number in map(int, scan.chosen.order):
            yield rows.row(number)


def _numbered(rules: RowRules, scan: InputScan, numbers: Numbers) -> Iterator[tuple[Line, Row, Any, int]]:
    """The same in file order; rows that are not used have their numbers, too."""
    lines = iter_row_lines(rules.path)
    used = repeat(1, scan.rows) if scan.chosen is None else scan.chosen.is_chosen
    for is_used, line in zip(used, lines, strict=False):
        row: Row = parse(line.content)
        task_index, first = numbers.claim(row, line.content, rules.repeats_of_row(row))
        if is_used:
            yield line, row, task_index, first


class _RowsAtRandom:
    """Rows that are read in another order than they come: from their own file, or else from a copy of their lines."""

    def __init__(self, file: BinaryIO, *, is_own: bool) -> None:
        self._file, self._is_own = file, is_own
        self._offsets, self._lengths = array("q"), array("q")
        self._tasks, self._firsts = array("q"), array("q")

    def add(self, line: Line, task_index: Any, first: int) -> None:
        """Take one row; an index that is no number comes with the row."""
        self._offsets.append(line.offset if self._is_own else self._file.tell())
        self._lengths.append(len(line.content))
        self._tasks.append(task_index if type(task_index) is int and 0 <= task_index < _MOST else -1)
        self._firsts.append(first)
        if not self._is_own:
            self._file.write(line.content)

    def row(self, number: int) -> tuple[Row, Any, int]:
        """A row, its task index and its first rollout index."""
        self._file.seek(self._offsets[number])
        row: Row = parse(self._file.read(self._lengths[number]))
        task_index = self._tasks[number]
        return row, row[TASK_INDEX_KEY_NAME] if task_index < 0 else task_index, self._firsts[number]


class _LongLines(Sequence[bytes]):
    """Lines that are made when they are asked for: all of them together may be a gigabyte."""

    def __init__(self, head: bytes, indices: Sequence[int]) -> None:
        self._head, self._indices = head, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return self._head + b"%d}\n" % self._indices[place]

    def write_to(self, file: BinaryIO) -> None:
        """Write them without making any."""
        for index in self._indices:
            file.write(self._head)
            file.write(b"%d}\n" % index)


def _lines(row: Row, indices: Sequence[int], *, add_seed: bool) -> Sequence[bytes]:
    if not add_seed and ROLLOUT_INDEX_KEY_NAME not in row:
        head = to_line(row)[:-2] + _ROLLOUT_INDEX_BYTES
        if len(head) >= _LONG_LINE_BYTES:
            return _LongLines(head, indices)
        return [head + b"%d}\n" % index for index in indices]
    params = row[RESPONSES_CREATE_PARAMS_KEY_NAME]
    lines = []
    for index in indices:
        seeded = with_seed(params, index) if add_seed else params
        lines.append(to_line({**row, RESPONSES_CREATE_PARAMS_KEY_NAME: seeded, ROLLOUT_INDEX_KEY_NAME: index}))
    return lines


@dataclass
class FormerRows:
    """The rows of the materialized file that is to be replaced."""

    hashes: IntSet = field(default_factory=IntSet)
    keys: KeySet = field(default_factory=KeySet)
    may_drop: bool = False
    """Whether rows may be left out, as far as those that stay are as they were."""
    kept: int = 0
    altered: int = 0
    """Rollouts that would be asked for differently."""

    @classmethod
    def read(cls, paths: RolloutPaths, *, may_drop: bool) -> "FormerRows":
        """Those on disk; damaged ones are taken out."""
        former = cls(may_drop=may_drop)
        for key, line, _ in records(paths.materialized_inputs, "repair"):
            former.hashes.add(line_hash(line.content))
            if may_drop:
                former.keys.add(key)
        return former

    @property
    def dropped(self) -> int:
        """How many of them are no longer there."""
        return len(self.hashes) - self.kept

    def compare(self, line: bytes) -> None:
        """Take one line of the new file into account."""
        if line_hash(line.strip()) in self.hashes:
            self.kept += 1
        elif self.may_drop:
            self.altered += RolloutKey.of(parse(line)) in self.keys

    def refuse_changes(self) -> None:
        """Raise if results would be taken for those of other rows.

        Raises:
            RunChangedError: rows would come out differently, or be lost.
        """
        count = self.altered if self.may_drop else self.dropped
        if count:
            raise RunChangedError(
                f"{count} of the {len(self.hashes)} rows of the earlier run would come out differently now (rows "
                "that share one _ng_task_index, perhaps), so their results would be taken for those of other rows. "
                "Start afresh without +resume_from_cache=true, or accept it with +allow_changed_config=true"
            )


def content_key(row: Mapping[str, Any]) -> bytes:
    """What rows of two runs have in common if they ask the same: nothing that a run has added.

    Of a record of what came back only the request counts.
    """
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    asked = {name: params[name] for name in ASKED if params.get(name)} if isinstance(params, dict) else params
    is_row = RESPONSE_KEY_NAME not in row
    content = {**telling_fields(row), RESPONSES_CREATE_PARAMS_KEY_NAME: asked} if is_row else asked
    return digest_of(content)


def digest_of(value: Any, size: int = _DIGEST_BYTES) -> bytes:
    """Return a digest of plain data, also of texts with half a surrogate pair and of numbers of any length."""
    try:
        content = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        content = json.dumps(value, sort_keys=True).encode()
    return blake2b(content, digest_size=size).digest()


def telling_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says besides the request: nothing that the run has added."""
    own = (RESPONSES_CREATE_PARAMS_KEY_NAME, AGENT_REF_KEY_NAME, RESPONSE_KEY_NAME, SKILLS_REF_KEY_NAME)
    return {name: value for name, value in row.items() if name not in own and not name.startswith("_ng_")}


def write_rows(rows: Iterable[Repeats], file: BinaryIO, former: FormerRows | None = None) -> ExpectedByAgent:
    """Write every row and count what the run asks of each agent.

    Raises:
        RunChangedError: they do not go with the `former` ones.
    """
    rollouts: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    for agent, first_rollout_index, lines, begins_task in rows:
        if isinstance(lines, _LongLines):
            lines.write_to(file)
        else:
            file.write(b"".join(lines))
        rollouts[agent] += len(lines)
        tasks[agent] += first_rollout_index == 0 if begins_task is None else begins_task
        if former is not None:
            for line in lines:
                former.compare(line)
    if former is not None:
        former.refuse_changes()
    return {agent: Expected(tasks=tasks[agent], rollouts=count) for agent, count in rollouts.items()}


def rewrite_rows(rows: Iterable[Repeats], paths: RolloutPaths, former: FormerRows | None) -> ExpectedByAgent:
    """Replace the materialized file, unless rows that were in it, the `former` ones, come out differently."""
    with write_aside(paths.materialized_inputs) as file:
        expected = write_rows(rows, file, former)
    logger.info("%s was written anew", paths.materialized_inputs)
    return expected


def is_complete(path: Path, expected_rollouts: int) -> bool:
    """Whether the file has exactly the lines it should have, as far as can be told without parsing them."""
    return path.exists() and not ends_torn(path) and count_lines(path) == expected_rollouts
