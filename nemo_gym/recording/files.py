"""Recorded calls on disk: append-only files, one for each writer, found again by an index.

A recording is a folder. Every model server that records makes a file of its own in it, `<server>-<host>-<pid>-….calls`,
so that any number of servers, replicas and hosts can write at once. A file is a row of frames and nothing else. A frame
is 64 bytes that say which call it is and how long it is, with a checksum of their own, and then the call: the answer as
it was sent, and JSON about it, the request included, compressed if zstandard is there. A frame is written before the
answer goes out, with those of calls that end at the same time, by one system call. So a killed server loses at most the
calls that were in flight; what it left of one at the end of its file is passed over.

`<file>.idx` has an entry for every frame. It is made when a recording is opened and may be deleted at any time.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.jsonl import parse
from nemo_gym.paths import install_command, write_aside

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CALLS_SUFFIX = ".calls"
INDEX_SUFFIX = ".idx"
_HEAD = struct.Struct("<4sB3xQQQQIIIIII")
HEAD_BYTES = _HEAD.size
_MAGIC = b"NGC1"
_IS_ZSTD = 1
_ZSTD_LEVEL = -1
"""A third more bytes than with level 1, in half the time."""
_WORTH_COMPRESSING = 4096
"""Bytes of a call; less would take longer to compress than to write."""
_MOST_BYTES = 1 << 31
"""Of one call."""
_MOST_BYTES_AT_ONCE = 4_000_000
"""Of calls that wait to be written together."""
_INDEX_HEAD = struct.Struct("<4sIQQ")
_INDEX_MAGIC = b"NGI1"
_ENTRY_FIELDS = ("high", "low", "sample", "ended_ns", "offset", "ordinal", "size")
_ENTRY = [(name, "<u4" if name in ("ordinal", "size") else "<u8") for name in _ENTRY_FIELDS]
"""The type of an entry of an index, as numpy takes it."""
_WORTH_AN_INDEX = 256
"""Frames that are read again, rather than put into a new index."""
_LOOK_AGAIN_S = 1.0
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class MissingCallError(GymError):
    """A call that is to be answered from a recording, and is not in it."""


class DamagedRecordingError(GymError):
    """A recorded call is not what was written: its checksum is another."""


def is_missing_call(error: BaseException) -> bool:
    """Whether an error is what a server says that cannot answer a call from its recording."""
    names = (MissingCallError.__name__, DamagedRecordingError.__name__)
    return getattr(error, "error_class", None) in names


class CallKey(NamedTuple):
    """What a call is found by: 128 bits of its canonical request and sample, and how many equal ones came before."""

    high: int
    low: int
    ordinal: int


class Frame(NamedTuple):
    """Where a call is, and which."""

    key: CallKey
    sample: int
    """64 bits of the identity of the rollout."""
    ended_ns: int
    offset: int
    size: int
    """Of all of the frame."""


class RecordedCall(NamedTuple):
    """A call as it is kept."""

    response: bytes
    """The body of the answer, as it was sent."""
    about_json: bytes

    @property
    def about(self) -> dict[str, Any]:
        """Who asked what, when; the request is its `request`."""
        return dict(parse(self.about_json))


class Damage(NamedTuple):
    """A place in a file where something is wrong."""

    file: Path
    offset: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}, offset {self.offset}: {self.what}"


class _Head(NamedTuple):
    flags: int
    frame: Frame
    response_bytes: int
    raw_bytes: int
    checksum: int


def _read_head(data: Any, at: int) -> _Head | None:
    """The head of the frame at a place; None if there is none, or its checksum is wrong."""
    magic, flags, high, low, sample, ended_ns, ordinal, response, raw, stored, checksum, own = _HEAD.unpack_from(
        data, at
    )
    if magic != _MAGIC or own != zlib.crc32(data[at : at + HEAD_BYTES - 4]):
        return None
    frame = Frame(CallKey(high, low, ordinal), sample, ended_ns, at, HEAD_BYTES + stored)
    return _Head(flags, frame, response, raw, checksum)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


class Writer:
    """Appends the calls of one server in one process; its file is made with the first of them."""

    def __init__(self, folder: Path, server: str, max_bytes: int | None = None) -> None:
        host = _UNFIT.sub("_", socket.gethostname())[:40]
        name = f"{_UNFIT.sub('_', server)[:80]}-{host}-{os.getpid()}-{token_hex(4)}{CALLS_SUFFIX}"
        self.path = folder / name
        self.is_full = False
        self._max_bytes = max_bytes
        self._total = self._looked_at_s = 0.0
        self._size = self._added = 0
        self._frames: list[bytes] = []
        self._descriptor: int | None = None
        zstandard = _zstandard()
        self._compress = None if zstandard is None else zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress

    def append(
        self, key: CallKey, sample: int, response: bytes, about: bytes, ended_ns: int | None = None
    ) -> Frame | None:
        """Keep a call; None when it is not kept, because there is no room: that is said once, and nothing follows."""
        frame = self.add(key, sample, response, about, ended_ns or time.time_ns())
        return frame if self.write() else None

    def add(self, key: CallKey, sample: int, response: bytes, about: bytes, ended_ns: int) -> Frame | None:
        """Keep a call with the next `write`; None when it is not kept."""
        if self.is_full:
            return None
        raw = response + about
        is_compressed = self._compress is not None and len(raw) >= _WORTH_COMPRESSING
        stored = self._compress(raw) if is_compressed else raw  # type: ignore[misc]
        size = HEAD_BYTES + len(stored)
        if len(raw) > _MOST_BYTES:
            logger.warning("a call of %d bytes is too large to be recorded", len(raw))
            return None
        if self._max_bytes is not None and self._folder_bytes() + self._added + size > self._max_bytes:
            self._stop(f"the recording in {self.path.parent} has reached max_bytes={self._max_bytes}")
            return None
        if self._added + size > _MOST_BYTES_AT_ONCE:
            self.write()
        flags = _IS_ZSTD if is_compressed else 0
        head = _HEAD.pack(
            _MAGIC, flags, *key[:2], sample, ended_ns, key.ordinal, len(response), len(raw), len(stored),
            zlib.crc32(stored), 0,
        )[:-4]  # fmt: skip
        frame = Frame(key, sample, ended_ns, self._size + self._added, size)
        self._frames.append(b"".join((head, zlib.crc32(head).to_bytes(4, "little"), stored)))
        self._added += size
        return frame

    def write(self) -> bool:
        """Write what was added, by one system call; whether all of it could be."""
        frames, self._frames, self._added = self._frames, [], 0
        if not frames:
            return not self.is_full
        data = b"".join(frames)
        try:
            if self._descriptor is None:
                flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
                with contextlib.suppress(OSError):  # for `prune`; there are file systems without locks
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            written = os.write(self._descriptor, data)
            if written < len(data):
                whole = [end for end in accumulate(map(len, frames)) if end <= written]
                os.ftruncate(self._descriptor, self._size + (whole[-1] if whole else 0))
                raise OSError(f"only {written} of {len(data)} bytes could be written")
        except OSError as error:
            self._stop(f"{self.path} cannot be written ({error})")
            return False
        self._size += len(data)
        self._total += len(data)
        return True

    def _stop(self, why: str) -> None:
        self.is_full = True
        logger.warning("%s: further model calls are answered, but not recorded", why)

    def _folder_bytes(self) -> float:
        """What all writers have written; looked up now and then, because others write, too."""
        now_s = time.monotonic()
        if not self._looked_at_s or now_s - self._looked_at_s > _LOOK_AGAIN_S:
            self._looked_at_s = now_s
            self._total = sum(_size_of(path) for path in call_files(self.path.parent))
        return self._total

    def close(self) -> None:
        """Let the file go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def call_files(folder: Path, server: str | None = None) -> list[Path]:
    """The files of a recording, those of one server if one is named, sorted."""
    start = "" if server is None else f"{_UNFIT.sub('_', server)[:80]}-"
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(CALLS_SUFFIX) and name.startswith(start)]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Scan(NamedTuple):
    """What a file was found to hold from some place on."""

    frames: list[Frame]
    damage: list[Damage]
    end: int
    """Where the next frame will begin."""
    torn_bytes: int = 0
    """Of a frame that was not finished when its writer was killed, or is being written."""


def scan(path: Path, start: int = 0, *, verify: bool = False) -> Scan:
    """The frames of a file from `start` on; with `verify` their content is held against its checksum, too."""
    frames: list[Frame] = []
    damage: list[Damage] = []
    with _mapped(path) as data:
        at, size = start, len(data)
        while size - at >= HEAD_BYTES:
            head = _read_head(data, at)
            if head is None:
                following = _next_frame(data, at + 1)
                if following is None and data[at : at + 4] != _MAGIC and not any(data[at:size]):
                    break  # blocks of zeros, as a machine that lost power leaves them
                damage.append(Damage(path, at, "the head of a call is damaged"))
                if following is None:
                    return Scan(frames, damage, size)
                at = following
                continue
            end = at + head.frame.size
            if end > size:
                break
            if verify and zlib.crc32(data[at + HEAD_BYTES : end]) != head.checksum:
                damage.append(Damage(path, at, f"a call of {head.frame.size} bytes is damaged: its checksum is wrong"))
            else:
                frames.append(head.frame)
            at = end
        return Scan(frames, damage, at, size - at)


def _next_frame(data: Any, start: int) -> int | None:
    """The next place at which a frame begins."""
    at = data.find(_MAGIC, start)
    while at >= 0 and len(data) - at >= HEAD_BYTES:
        if _read_head(data, at) is not None:
            return int(at)
        at = data.find(_MAGIC, at + 1)
    return None


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def read_call(path: Path, frame: Frame) -> RecordedCall:
    """The call of a frame.

    Raises:
        DamagedRecordingError: it is not what was written.
        ConfigError: it is compressed, and what reads that is not installed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, frame.size, frame.offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedRecordingError(f"{path} cannot be read: {error}") from error
    head = _read_head(data, 0) if len(data) == frame.size else None
    if head is None or head.frame.key != frame.key or zlib.crc32(data[HEAD_BYTES:]) != head.checksum:
        raise DamagedRecordingError(
            f"{path}, offset {frame.offset}: the recorded call is damaged. `ng_recordings +folder={path.parent} "
            "+check=true` lists what is, +prune=true drops it, and recording mode auto records it again"
        )
    raw = data[HEAD_BYTES:]
    if head.flags & _IS_ZSTD:
        zstandard = _zstandard()
        if zstandard is None:
            raise ConfigError(f"{path} is compressed by zstandard; install what reads it: {install_command('data')}")
        raw = zstandard.ZstdDecompressor().decompress(raw, max_output_size=head.raw_bytes)
    return RecordedCall(raw[: head.response_bytes], raw[head.response_bytes :])


@dataclass
class _File:
    """How far a file has been read."""

    path: Path
    frames: "np.ndarray[Any, Any]"
    end: int = 0


class Index:
    """The calls of a recording by their key, some 50 bytes each; what others write meanwhile is found by `refresh`."""

    def __init__(self, folder: Path, server: str | None = None) -> None:
        self.folder = folder
        self.damage: list[Damage] = []
        self._server = server
        self._files: dict[Path, _File] = {}
        self._recent: dict[CallKey, tuple[Path, Frame]] = {}
        self._paths: list[Path] = []
        self._sorted: np.ndarray[Any, Any] | None = None
        self._highs: np.ndarray[Any, Any] | None = None
        self._file_of: np.ndarray[Any, Any] | None = None
        self._looked_at_s = 0.0
        self._load()

    def __len__(self) -> int:
        return (0 if self._sorted is None else len(self._sorted)) + len(self._recent)

    def find(self, key: CallKey) -> tuple[Path, Frame] | None:
        """The last call with this key that was recorded."""
        found = self._recent.get(key)
        if found is not None or self._sorted is None:
            return found
        assert self._highs is not None
        assert self._file_of is not None
        at = int(self._highs.searchsorted(self._highs.dtype.type(key.high)))
        best: tuple[Path, Frame] | None = None
        while at < len(self._highs) and int(self._highs[at]) == key.high:
            frame = _frame_of(self._sorted[at])
            if frame.key == key and (best is None or frame.ended_ns >= best[1].ended_ns):
                best = self._paths[int(self._file_of[at])], frame
            at += 1
        return best

    def calls_of(self, sample: int) -> list[tuple[Path, Frame]]:
        """The calls of one rollout, the first first."""
        found = [(path, frame) for path, frame in self._recent.values() if frame.sample == sample]
        if self._sorted is not None:
            assert self._file_of is not None
            for at in (self._sorted["sample"] == sample).nonzero()[0]:
                found.append((self._paths[int(self._file_of[at])], _frame_of(self._sorted[at])))
        return sorted(found, key=lambda item: item[1].ended_ns)

    def add(self, path: Path, frame: Frame) -> None:
        """A call that this process has recorded itself."""
        self._recent[frame.key] = path, frame

    def refresh(self, own: Path | None = None) -> bool:
        """Look for what others have recorded since, at most once in a second; whether there was something."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s < _LOOK_AGAIN_S:
            return False
        self._looked_at_s = now_s
        has_more = False
        for path in call_files(self.folder, self._server):
            known = self._files.get(path)
            start = 0 if known is None else known.end
            if path == own or _size_of(path) - start < HEAD_BYTES:
                continue
            found = scan(path, start)
            if known is None:
                self._files[path] = _File(path, _entries([]), end=found.end)
            else:
                known.end = found.end
            for frame in found.frames:
                self._recent[frame.key] = path, frame
            has_more |= bool(found.frames)
        return has_more

    def _load(self) -> None:
        import numpy

        self._looked_at_s = time.monotonic()
        for path in call_files(self.folder, self._server):
            self._files[path] = self._read(path)
        self._paths = list(self._files)
        parts = [file.frames for file in self._files.values()]
        if not sum(map(len, parts)):
            return
        numbers = numpy.repeat(numpy.arange(len(parts), dtype=numpy.uint32), [len(part) for part in parts])
        together = numpy.concatenate(parts)
        order = numpy.argsort(together["high"], kind="stable")
        self._sorted, self._file_of = together[order], numbers[order]
        self._highs = numpy.ascontiguousarray(self._sorted["high"])

    def _read(self, path: Path) -> _File:
        known, covered = _load_index(path)
        found = scan(path, covered)
        self.damage += found.damage
        if found.frames:
            known = _entries(found.frames, known)
        if len(found.frames) >= _WORTH_AN_INDEX and not found.damage:
            _save_index(path, known, found.end)
        return _File(path, known, end=found.end)


def _entries(frames: list[Frame], earlier: "np.ndarray[Any, Any] | None" = None) -> "np.ndarray[Any, Any]":
    """An entry for each frame, behind those that there are."""
    import numpy

    rows = [
        (*frame.key[:2], frame.sample, frame.ended_ns, frame.offset, frame.key.ordinal, frame.size) for frame in frames
    ]
    made = numpy.array(rows, dtype=_ENTRY)
    return made if earlier is None else numpy.concatenate([earlier, made])


def _frame_of(entry: Any) -> Frame:
    high, low, sample, ended_ns, offset, ordinal, size = (int(value) for value in entry)
    return Frame(CallKey(high, low, ordinal), sample, ended_ns, offset, size)


def _load_index(path: Path) -> "tuple[np.ndarray[Any, Any], int]":
    """The entries that the index of a file has, and how much of the file they cover; none if it is of no use."""
    import numpy

    entry = numpy.dtype(_ENTRY)
    nothing = numpy.zeros(0, dtype=entry), 0
    try:
        data = path.with_name(path.name + INDEX_SUFFIX).read_bytes()
        magic, checksum, covered, count = _INDEX_HEAD.unpack_from(data)
    except (OSError, struct.error):
        return nothing
    entries = data[_INDEX_HEAD.size :]
    is_sound = magic == _INDEX_MAGIC and checksum == zlib.crc32(data[8:]) and len(entries) == count * entry.itemsize
    if not is_sound or covered > _size_of(path):
        return nothing
    return numpy.frombuffer(entries, dtype=entry), covered


def _save_index(path: Path, entries: "np.ndarray[Any, Any]", covered: int) -> None:
    body = _INDEX_HEAD.pack(_INDEX_MAGIC, 0, covered, len(entries))[8:] + entries.tobytes()
    data = _INDEX_MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
    try:
        with write_aside(path.with_name(path.name + INDEX_SUFFIX)) as file:
            file.write(data)
    except OSError as error:  # one can do without it
        logger.info("%s gets no index: %s", path, error)
