"""What is known of the records of one file without reading it again: a small database in the user's cache folder.

One pass over the file fills it. When the file has grown, only what was appended is read; when it is another file, or
was changed in the middle, all is begun anew. A piece of some thousand rows is kept as one blob of bytes per column.
Several processes may use it at once: whoever adds a piece first makes sure that the others have not done so already.
What was appended last is held in memory for a while, so that watching a run does not write all the time.
"""

import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nemo_gym.runs.facts import (
    COLUMNS,
    MOST_FIELDS,
    PLACES,
    facts_of,
    plain,
    read_for_facts,
    read_leniently,
    visit_fields,
)
from nemo_gym.view.record_columns import Column, column_of, from_bytes, joined, nothing, to_bytes

logger = logging.getLogger(__name__)

_VERSION = 1
_PIECE_ROWS = 16_384
_SMALL_ROWS = 4_096
"""A last piece with fewer rows is written again together with what follows."""
_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_CHECKED_BYTES = 4_096
_MOST_PARTS = 16
_HELD_S = 15.0
"""How long rows that were appended are held in memory only."""
_PATIENCE_S = 60.0
_BUILT_IN = (*PLACES, *COLUMNS)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value);
CREATE TABLE IF NOT EXISTS piece (number INTEGER PRIMARY KEY, rows INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS part (name TEXT NOT NULL, piece INTEGER NOT NULL, data BLOB NOT NULL,
                                 PRIMARY KEY (name, piece)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS field (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""
_MEMORY = ":memory:"
_TABLES = ("state", "piece", "part", "field")
FIELD = "field:"
"""In front of the names of columns that are fields of records."""


class Position(NamedTuple):
    """How far a file has been read, and which file that was."""

    identity: str = ""
    size: int = 0
    lines: int = 0
    rows: int = 0
    edge: str = ""
    """A digest of the first bytes, and of those before `size`: whoever writes the file anew changes one of them."""


class _Builder:
    """Rows that are not in the database yet."""

    def __init__(self) -> None:
        self.rows = 0
        self.places: list[tuple[int, int, int]] = []
        self.facts: list[tuple[Any, ...]] = []
        self.fields: dict[str, tuple[list[int], list[Any]]] = {}

    def add(self, place: tuple[int, int, int], record: Any, *, is_failure: bool) -> None:
        self.places.append(place)
        self.facts.append(facts_of(record, is_failure=is_failure))
        if type(record) is dict:
            visit_fields(record, self._note)
        self.rows += 1

    def _note(self, name: str, value: Any) -> None:
        field = self.fields.get(name)
        if field is None:
            if len(self.fields) >= MOST_FIELDS:
                return
            field = self.fields[name] = ([], [])
        field[0].append(self.rows)
        field[1].append(plain(value))

    def columns(self) -> dict[str, Column]:
        """Everything that was added."""
        if not self.rows:
            return {}
        built_in = zip(*(place + facts for place, facts in zip(self.places, self.facts, strict=True)), strict=True)
        columns = {name: column_of(values) for name, values in zip(_BUILT_IN, built_in, strict=True)}
        for name, (places, values) in self.fields.items():
            columns[FIELD + name] = column_of(values, places, self.rows)
        return columns


class _Part(NamedTuple):
    """Some rows in columns."""

    rows: int
    columns: dict[str, Column]

    def column(self, name: str) -> Column:
        return self.columns.get(name) or nothing(self.rows)


def _joined_parts(parts: Sequence[_Part]) -> _Part:
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: joined([part.column(name) for part in parts]) for name in names}
    return _Part(sum(part.rows for part in parts), columns)


class FileIndex:
    """The index of one file; `refresh` brings it up to date, and the rest is about what was read by then."""

    def __init__(self, path: Path, folder: Path | None, *, is_failures: bool = False) -> None:
        self.path = path
        self.generation = 0
        """Another number after every change."""
        self.replaced = 0
        """How often all was begun anew because the file was another one."""
        self._is_failures = is_failures
        self._database = _open(folder, path)
        self._position = self._stored()
        self._held: list[_Part] = []
        self._builder = _Builder()
        self._held_from = self._position
        self._held_since = 0.0

    @property
    def rows(self) -> int:
        """How many records there are."""
        return self._position.rows

    @property
    def read_bytes(self) -> int:
        """How much of the file was read."""
        return self._position.size

    def close(self) -> None:
        """Write down what is held, and let go of the database."""
        with suppress(sqlite3.Error):
            self._store()
        self._database.close()

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Read what was appended, at most about `most_bytes` of it; True when all of it was read."""
        try:
            return self._refresh(most_bytes)
        except sqlite3.Error as error:
            logger.warning("the index of %s is kept in memory only: %s", self.path, error)
            self._database.close()
            self._database = _connect(_MEMORY)
            self._forget(Position())
            return self._refresh(most_bytes)

    def _refresh(self, most_bytes: int | None) -> bool:
        try:
            file = self.path.open("rb", buffering=_BUFFER_BYTES)
        except OSError:
            if self._position.size:
                self._begin_anew(Position())
            return True
        with file:
            status = os.fstat(file.fileno())
            if (stored := self._stored()) != self._held_from:
                self._forget(stored)
            self._check(file, status)
            begun = self._position.size
            while self._position.size < status.st_size:
                if most_bytes is not None and self._position.size - begun >= most_bytes:
                    return False
                if not self._read_piece(file, status):
                    break
        if self._held_rows and time.monotonic() - self._held_since > _HELD_S:
            self._store()
        return True

    def column(self, name: str) -> Column:
        """One column of all rows."""
        mine = self._held_from.rows
        parts = []
        for rows, data in self._database.execute(
            "SELECT piece.rows, part.data FROM piece LEFT JOIN part ON part.piece = piece.number AND part.name = ? "
            "ORDER BY piece.number",
            (name,),
        ):
            parts.append(nothing(rows) if data is None else from_bytes(data))
        stored = joined(parts) if parts else nothing(0)
        # Another process may have gone further, or begun anew: the next refresh takes that up.
        if len(stored) > mine:
            stored = stored.take(np.arange(mine))
        elif len(stored) < mine:
            stored = joined([stored, nothing(mine - len(stored))])
        self._settle_new_rows()
        return joined([stored, *(part.column(name) for part in self._held)])

    @property
    def _held_rows(self) -> int:
        """Rows that are not in the database."""
        return self._position.rows - self._held_from.rows

    def _settle_new_rows(self) -> None:
        """Make columns of what was read since the last time, so that it is done once for each row."""
        if self._builder.rows:
            self._held.append(_Part(self._builder.rows, self._builder.columns()))
            self._builder = _Builder()
        if len(self._held) > _MOST_PARTS:
            self._held = [_joined_parts(self._held)]

    def fields(self) -> list[str]:
        """The fields of records that have a column, without `FIELD` in front."""
        stored = {name for (name,) in self._database.execute("SELECT name FROM field")}
        self._settle_new_rows()
        held = {name.removeprefix(FIELD) for part in self._held for name in part.columns if name.startswith(FIELD)}
        return sorted(stored | held)

    def _check(self, file: IO[bytes], status: os.stat_result) -> None:
        """Begin anew when the file is not the one that was read, or no longer begins as it did."""
        known = self._position
        if not known.size:
            return
        same = known.identity == _identity(status) and known.size <= status.st_size
        if not same or (status.st_size != known.size and _edge(file, known.size) != known.edge):
            self._begin_anew(Position())
            self.replaced += 1

    def _begin_anew(self, position: Position) -> None:
        with self._writing():
            for table in _TABLES:
                self._database.execute(f"DELETE FROM {table}")
        self._forget(position)

    def _forget(self, position: Position) -> None:
        self._builder, self._held = _Builder(), []
        self._position = self._held_from = position
        self.generation += 1

    def _read_piece(self, file: IO[bytes], status: os.stat_result) -> bool:
        """Add some thousand rows; False when there is no whole line any more."""
        if not self._held_rows:
            self._held_since = time.monotonic()
        offset, lines = self._position.size, self._position.lines
        file.seek(offset)
        room = _PIECE_ROWS - self._held_rows
        begun = offset
        add, is_failure = self._builder.add, self._is_failures
        for raw in file:
            if raw[-1:] != b"\n" and not _is_whole(raw):
                break
            lines += 1
            content = raw.strip()
            if content:
                place = offset + (0 if raw[0] == content[0] else raw.index(content)), len(content), lines
                try:
                    record = read_for_facts(content)
                except (ValueError, RecursionError, MemoryError):
                    record = None
                add(place, record, is_failure=is_failure)
                room -= 1
            offset += len(raw)
            if not room or offset - begun >= _PIECE_BYTES or offset >= status.st_size:
                break
        if offset == begun:
            return False
        rows = self._held_from.rows + sum(part.rows for part in self._held) + self._builder.rows
        self._position = Position(_identity(status), offset, lines, rows, _edge(file, offset))
        self.generation += 1
        if not room or offset - begun >= _PIECE_BYTES or self._held_rows >= _SMALL_ROWS:
            self._store()
        return True

    def _stored(self) -> Position:
        state = dict(self._database.execute("SELECT key, value FROM state"))
        try:
            return Position(**{name: state[name] for name in Position._fields})
        except KeyError:
            return Position()

    def _store(self) -> None:
        """Write down the rows that are held, unless another process has gone further already."""
        if not self._held_rows:
            return
        self._settle_new_rows()
        with self._writing() as write:
            stored = self._stored()
            if stored != self._held_from:
                position = stored
            else:
                position = self._position
                self._write_piece(write)
                values = position._asdict().items()
                write.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", values)
        self._forget(position)

    def _write_piece(self, write: sqlite3.Connection) -> None:
        rows, columns = _joined_parts(self._held)
        last = write.execute("SELECT number, rows FROM piece ORDER BY number DESC LIMIT 1").fetchone()
        number = 0 if last is None else last[0] + 1
        if last is not None and last[1] < _SMALL_ROWS:
            number = last[0]
            found = write.execute("SELECT name, data FROM part WHERE piece = ?", (number,))
            before = _Part(last[1], {name: from_bytes(data) for name, data in found})
            rows, columns = _joined_parts([before, _Part(rows, columns)])
            write.execute("DELETE FROM part WHERE piece = ?", (number,))
        write.execute("INSERT OR REPLACE INTO piece VALUES (?, ?)", (number, rows))
        parts = ((name, number, to_bytes(column)) for name, column in columns.items())
        write.executemany("INSERT INTO part VALUES (?, ?, ?)", parts)
        names = ((name.removeprefix(FIELD),) for name in columns if name.startswith(FIELD))
        write.executemany("INSERT OR IGNORE INTO field VALUES (?)", names)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.rollback()
            raise
        self._database.commit()


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}"


def _edge(file: IO[bytes], size: int) -> str:
    """A digest of the first bytes of a file and of the last ones before `size`."""
    descriptor = file.fileno()
    first = os.pread(descriptor, min(size, _CHECKED_BYTES), 0)
    last = os.pread(descriptor, min(size, _CHECKED_BYTES), max(0, size - _CHECKED_BYTES))
    return hashlib.sha256(first + last).hexdigest()


def _is_whole(raw: bytes) -> bool:
    """Whether a last line without its newline is a record all the same."""
    try:
        return isinstance(read_leniently(raw), dict)
    except (ValueError, RecursionError, MemoryError):
        return False


def _open(folder: Path | None, path: Path) -> sqlite3.Connection:
    """The database of a file, in memory where there is no folder to write to."""
    if folder is not None:
        name = folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.sqlite"
        for is_last in (False, True):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                return _connect(str(name))
            except (sqlite3.Error, OSError) as error:
                if is_last or isinstance(error, sqlite3.OperationalError | OSError):
                    logger.warning("%s cannot be used (%s): the index is made again the next time", name, error)
                    break
                with suppress(OSError):
                    name.unlink()
    return _connect(_MEMORY)


def _connect(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        if connection.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
            for table in _TABLES:
                connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("SELECT count(*) FROM piece, state").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection
