"""The one way to read a file of records: rollouts, failures or materialized inputs.

A killed process may have left such a file in the middle of a line, and other programs write to it, too. What becomes
of a damaged line depends on who reads: a run that goes on makes the rollout again, whoever only informs passes over it,
and whoever makes something new of the file must not lose a line without saying so.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import (
    Line,
    MalformedLineError,
    PlainLine,
    ends_torn,
    iter_lines,
    iter_plain_lines,
    json_type,
    malformation,
    parse,
)
from nemo_gym.keys import CAPTURE_KEY, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME, TRAJECTORY_KEY
from nemo_gym.paths import append_own, sync_folder, write_aside
from nemo_gym.runs.files import corrupt_of
from nemo_gym.runs.record import KeySet, RolloutKey, Row, plain_key

logger = logging.getLogger(__name__)

_TOLD = b',"%b":{"schema_version":' % TRAJECTORY_KEY.encode()
_CAPTURED = b',"%b":{"rollout_id":' % CAPTURE_KEY.encode()
_STAMPED = b',"%b":' % TASK_INDEX_KEY_NAME.encode()
_LAST_OBSERVED = b'"latency_ttft_ms":'
_LAST_OBSERVED_BYTES = 48
"""The end of the last of the captured calls: lines of which nothing was observed are to be known at once."""
Damaged = Literal["repair", "leave", "skip", "raise"]
"""What to do about lines that are no records.

- `repair`: when all lines have been read, they are moved to the `.corrupt` file beside it, and a missing last newline
  is added. Only while holding the run's lock. A file that begins with such lines and mostly holds them is another kind
  of file: it stays as it is, and that is an error.
- `leave`: the same judgement, and the file stays as it is in any case.
- `skip`: pass over them, however many there are.
- `raise`: the first one is an error, unless it is the end of a file whose writer was stopped.

Where there is no file there are no records, except for `raise`.
"""
Record: TypeAlias = tuple[RolloutKey, Line, Row]
"""(the rollout it is about, where it stands, what it says)"""
AnyRecord: TypeAlias = tuple[RolloutKey | None, Line, Row]
"""The same, where records need not say which rollout they are about."""
PlainRecord: TypeAlias = tuple[tuple[Any, int] | None, PlainLine, Row]
"""The same in tuples without names."""
OnSkipped: TypeAlias = Callable[[Line], object]


@overload
def records(path: Path, damaged: Damaged, *, on_skipped: OnSkipped | None = None) -> Iterator[Record]: ...
@overload
def records(
    path: Path, damaged: Damaged, *, may_lack_key: bool, on_skipped: OnSkipped | None = None
) -> Iterator[AnyRecord]: ...
def records(
    path: Path, damaged: Damaged, *, may_lack_key: bool = False, on_skipped: OnSkipped | None = None
) -> Iterator[Any]:
    """Every record of a file, in file order, one at a time.

    A record is a JSON object with the indices of a rollout; with `may_lack_key`, any JSON object. `on_skipped` gets
    every line that is passed over.

    Raises:
        ConfigError: a line is no record, or too many are none; see `Damaged`.
    """
    new_tuple = tuple.__new__  # what RolloutKey(...) and Line(...) come down to, in half the time
    for key, line, record in plain_records(path, damaged, may_lack_key=may_lack_key, on_skipped=on_skipped):
        yield None if key is None else new_tuple(RolloutKey, key), new_tuple(Line, line), record


def plain_records(
    path: Path,
    damaged: Damaged,
    *,
    may_lack_key: bool = False,
    on_skipped: OnSkipped | None = None,
    read: Callable[[bytes], Any] = orjson.loads,
) -> Iterator[PlainRecord]:
    """What `records` gives, for those who read millions of them and need no names.

    `read` may leave out of a record what its reader does not look at.
    """
    if damaged != "raise" and not path.exists():
        return
    damage = _Damage(path, damaged, on_skipped)
    sound = 0
    for line in iter_plain_lines(path):
        try:
            value = read(line[3])
            key = value[TASK_INDEX_KEY_NAME], value[ROLLOUT_INDEX_KEY_NAME]
            hash(key)
        except (KeyError, TypeError):
            key = None
        except ValueError:
            value = _parsed_or_error(line[3])
            key = plain_key(value)
        if key is not None or (may_lack_key and isinstance(value, dict)):
            sound += 1
            yield key, line, value
        else:
            damage.note(Line(*line), value, begins=not sound)
    damage.settle(sound)


def without_observations(content: bytes) -> Any:
    """A record without what was observed of its rollout, most of its line, if that stands where a collector puts it.

    Where it seems to, and does not, what is left cannot be read, or all of it is.

    Raises:
        ValueError: as `orjson.loads`.
    """
    if _LAST_OBSERVED in content[-_LAST_OBSERVED_BYTES:]:
        told, captured = content.find(_TOLD), content.rfind(_CAPTURED)
        stamped = content.rfind(_STAMPED, told, captured)
        if 0 < told < stamped < captured:
            with suppress(ValueError):
                return orjson.loads(b"%b%b}" % (content[:told], content[stamped:captured]))
    return orjson.loads(content)


def _parsed_or_error(content: bytes) -> Any:
    try:
        return parse(content)
    except ValueError as error:
        return error


def keys_in(path: Path) -> KeySet:
    """Which rollouts there are in a file that may be damaged or absent."""
    keys = KeySet()
    for key, _, _ in plain_records(path, "skip"):
        assert key is not None
        keys.add(key)
    return keys


class _Damage:
    """The lines of one file that are no records."""

    def __init__(self, path: Path, damaged: Damaged, on_skipped: OnSkipped | None) -> None:
        self._path = path
        self._damaged = damaged
        self._on_skipped = on_skipped
        self._begins = False
        """Whether the file begins with one of them."""
        self._unsound: list[Line] = []
        """Without their content; kept only for those who judge the file by them."""

    def note(self, line: Line, value: object, *, begins: bool) -> None:
        """Take in a line with what it holds, or the error that says why it holds nothing."""
        if self._damaged == "raise":
            self._refuse_unless_torn(line, value)
        elif self._damaged != "skip":
            self._begins = self._begins or begins
            self._unsound.append(line._replace(content=b""))
        if self._on_skipped is not None:
            self._on_skipped(line)

    def settle(self, sound: int) -> None:
        """Judge the file, of which everything has been read, and repair it if that was asked for."""
        unsound = self._unsound
        if len(unsound) > max(1, sound) and self._begins:
            raise ConfigError(
                f"{self._path}: {len(unsound)} of {len(unsound) + sound} lines, the first of them line "
                f"{unsound[0].number}, are not what this file should hold; name another output, or move the file away"
            )
        if self._damaged != "repair":
            return
        if unsound:
            _take_out(unsound, self._path)
        if ends_torn(self._path):
            with self._path.open("ab") as file:
                file.write(b"\n")

    def _refuse_unless_torn(self, line: Line, value: object) -> None:
        place = f"{self._path}, line {line.number}"
        if isinstance(value, ValueError):
            if not self._is_torn(line):
                raise MalformedLineError(f"{place}: {malformation(line.content, value)}") from value
            if self._on_skipped is None:
                logger.warning("%s ends in the middle of line %d, which is left out", self._path, line.number)
        elif isinstance(value, dict):
            raise MalformedLineError(f"{place}: no {TASK_INDEX_KEY_NAME} and {ROLLOUT_INDEX_KEY_NAME}")
        else:
            raise MalformedLineError(f"{place}: expected a JSON object, found {json_type(value)}")

    def _is_torn(self, line: Line) -> bool:
        """Whether the line had no end when it was read; by now its writer may have gone on."""
        with self._path.open("rb") as file:
            file.seek(line.end - 1)
            return file.read(1) != b"\n"


def _take_out(unsound: list[Line], path: Path) -> None:
    corrupt = corrupt_of(path)
    with path.open("rb") as file, append_own(corrupt) as kept:
        for line in unsound:
            file.seek(line.start)
            kept.write(file.read(line.end - line.start).rstrip(b"\n") + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    sync_folder(corrupt.parent)
    if len(unsound) == 1 and unsound[0].end == path.stat().st_size:
        os.truncate(path, unsound[0].start)
    else:
        _rewrite_without({line.start for line in unsound}, path)
    numbers = [line.number for line in unsound]
    logger.warning("%s: lines %s were damaged and are now in %s", path, numbers, corrupt)


def _rewrite_without(starts: set[int], path: Path) -> None:
    with write_aside(path) as file:
        for line in iter_lines(path):
            if line.start not in starts:
                file.write(line.content + b"\n")
