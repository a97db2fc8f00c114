"""The first pass over an input file: is every row usable, and which indices are taken?

It touches nothing and remembers a few bytes per row, whatever the rows hold. Everything wrong with
the file is one error that names the lines.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import Line, json_type, malformation, parse
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.prompt import conflict_message
from nemo_gym.rollouts.compact import IndexSet, IntSet, SeenFilter
from nemo_gym.rollouts.config import DEFAULT_ENTRY
from nemo_gym.rollouts.record import Row
from nemo_gym.rollouts.row_rules import OWN_INPUT, ROWS, RowRules
from nemo_gym.row_files import iter_row_lines

_TASK_INDEX_BYTES = TASK_INDEX_KEY_NAME.encode()
_HASH_BITS = 2**63 - 1
_SAMPLE_BYTES = 1 << 18
_LISTED_LINES = 100
_LISTED_PROBLEMS = 20
_MOST_PROBLEMS = 1_000
"""With so many different ones it is the wrong file; there is no point in reading on."""


class InputRowsError(ConfigError, ValueError, KeyError):
    """Rows of an input file that cannot be rolled out, all of them in one message."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class InputScan:
    """What the first pass found out."""

    size_and_time: tuple[int, int]
    """Of the file, to notice when it changes before it is read again."""
    rows: int = 0
    """How many rows are used."""
    rows_of_agent: Counter[str] = field(default_factory=Counter)
    supplied: IndexSet = field(default_factory=IndexSet)
    """Every task index that the file brings itself, also beyond the limit."""
    supplied_twice: set[Any] = field(default_factory=set)
    repeated_lines: IntSet = field(default_factory=IntSet)
    """Hashes of the lines without an index that occur more than once, and of a few others."""


@dataclass
class _Problem:
    count: int = 0
    lines: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def at(self, line: int, position: int) -> None:
        self.count += 1
        if self.count <= _LISTED_LINES:
            self.lines.append(line)
            self.positions.append(position)

    def listed(self) -> str:
        more = self.count - len(self.lines)
        return f"{self.lines}" + (f" and {more:,} more" if more else "")


def scan_input(rules: RowRules) -> InputScan:
    """Read the whole file once.

    Raises:
        InputRowsError: rows are malformed, name no agent, or cannot be rolled out for another reason.
    """
    scan = InputScan(size_and_time(rules.path))
    seen = SeenFilter(_estimated_lines(rules.path))
    problems: dict[str, _Problem] = {}
    for line in _with_progress_bar(iter_row_lines(rules.path)):
        if rules.limit is not None and scan.rows >= rules.limit:
            _note_index_beyond_limit(line, scan)
            continue
        for problem in _scan_row(line, rules, scan, seen):
            problems.setdefault(problem, _Problem()).at(line.number, scan.rows)
        scan.rows += 1
        if len(problems) >= _MOST_PROBLEMS:
            break
    texts = [_text(problem, found, rules.path) for problem, found in problems.items()]
    texts += _uncovered_agents(rules, scan)
    if texts:
        raise InputRowsError(_consolidated(texts, rules.path))
    _warn_of_unused_agents(rules, scan)
    return scan


def line_hash(content: bytes) -> int:
    """What equal lines have in common; unequal ones hardly ever."""
    return hash(content) & _HASH_BITS


def size_and_time(path: Path) -> tuple[int, int]:
    """What changes when somebody writes to a file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _scan_row(line: Line, rules: RowRules, scan: InputScan, seen: SeenFilter) -> list[str]:
    try:
        row = parse(line.content)
    except ValueError as error:
        return [f"line {line.number}: {malformation(line.content, error)}"]
    if not isinstance(row, dict):
        return [f"rows {ROWS}: expected a JSON object, found {json_type(row)}"]
    problems: list[str] = []
    is_auto = TASK_INDEX_KEY_NAME not in row
    agent = rules.complete(row, problems)
    if agent:
        scan.rows_of_agent[agent] += 1
    if problems:
        return problems
    if is_auto:
        hashed = line_hash(line.content)
        if seen.came_before(hashed):
            scan.repeated_lines.add(hashed)
    else:
        _note_supplied(row, scan)
    return problems


def _estimated_lines(path: Path) -> int:
    """Judged from the beginning of the file; being wrong costs a little time, nothing else."""
    with path.open("rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    return 1 + path.stat().st_size * (1 + sample.count(b"\n")) // (1 + len(sample))


def _note_supplied(row: Row, scan: InputScan) -> None:
    index = row[TASK_INDEX_KEY_NAME]
    if not scan.supplied.add(index):
        scan.supplied_twice.add(index)


def _note_index_beyond_limit(line: Line, scan: InputScan) -> None:
    """Rows beyond the limit only reserve their index, so that keys stay the same when the run is extended."""
    if _TASK_INDEX_BYTES not in line.content:
        return
    try:
        row = parse(line.content)
    except ValueError:
        return
    if isinstance(row, dict) and not isinstance(row.get(TASK_INDEX_KEY_NAME, []), list | dict):
        scan.supplied.add(row[TASK_INDEX_KEY_NAME])


def _uncovered_agents(rules: RowRules, scan: InputScan) -> list[str]:
    uncovered = sorted(agent for agent in scan.rows_of_agent if rules.repeats_of(agent) is None)
    if not uncovered:
        return []
    return [
        f"num_repeats says nothing about the agents {uncovered} and has no {DEFAULT_ENTRY!r} for them; "
        f"it lists {_listed_agents(rules)}"
    ]


def _warn_of_unused_agents(rules: RowRules, scan: InputScan) -> None:
    unused = sorted(set(_listed_agents(rules)) - set(scan.rows_of_agent))
    if unused:
        warnings.warn(f"num_repeats names agents that no row uses (a typo?): {unused}", UserWarning, stacklevel=3)


def _listed_agents(rules: RowRules) -> list[str]:
    return [] if isinstance(rules.num_repeats, int) else sorted(set(rules.num_repeats) - {DEFAULT_ENTRY})


def _text(problem: str, found: _Problem, path: Path) -> str:
    if problem == OWN_INPUT:
        return conflict_message(found.positions, f" (lines {found.listed()} of {path})")
    return problem.replace(ROWS, found.listed())


def _consolidated(texts: list[str], path: Path) -> str:
    if len(texts) == 1:
        return f"{path}: {texts[0]}"
    more = len(texts) - _LISTED_PROBLEMS
    listed = [*texts[:_LISTED_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return f"{path} has {len(texts)} problems (rows are given by line number):" + "".join(
        f"\n- {text}" for text in listed
    )


def _with_progress_bar(lines: Iterator[Line]) -> Iterator[Line]:
    """A bar on the terminal when reading takes more than a moment; nothing elsewhere."""
    from tqdm import tqdm

    return iter(tqdm(lines, desc="Reading rows", unit=" rows", delay=1.0, disable=None, leave=False))
