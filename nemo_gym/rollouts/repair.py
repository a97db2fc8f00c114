"""Reading files that a killed process may have left in the middle of a line.

A line that is not a whole record is taken out of its file and kept beside it in a `.corrupt` file; the
rollout it belonged to runs again. Only call this while holding the run's lock.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import Line, ends_torn, iter_lines, parse, write_aside
from nemo_gym.rollouts.record import RolloutKey, Row, key_or_none

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """A sound line."""

    key: RolloutKey
    content: bytes
    value: Row


def sound_records(path: Path, corrupt: Path, *, may_lack_key: bool = False, repair: bool = True) -> Iterator[Record]:
    """Every record in `path`, in file order; none when there is no such file.

    When all have been read, lines that are none are moved to `corrupt` and a missing last newline is added.
    With `may_lack_key`, an object without indices is not damaged, but passed over. Without `repair` the file is
    only read.

    Raises:
        ConfigError: it begins with an unsound line and so go most: it must be another kind of file; it stays as it is.
    """
    if not path.exists():
        return
    unsound: list[Line] = []
    sound = 0
    begins_soundly = False
    for line in iter_lines(path):
        value = _parsed(line.content)
        key = key_or_none(value)
        if key is not None:
            sound += 1
            yield Record(key, line.content, value)
        elif may_lack_key and isinstance(value, dict):
            sound += 1
        else:
            unsound.append(line._replace(content=b""))
        begins_soundly = begins_soundly or (sound == 1 and not unsound)
    if len(unsound) > max(1, sound) and not begins_soundly:
        raise ConfigError(
            f"{path}: {len(unsound)} of {len(unsound) + sound} lines, the first of them line {unsound[0].number}, are "
            "not what this file should hold; name another output, or move the file away"
        )
    if not repair:
        return
    if unsound:
        _take_out(unsound, path, corrupt)
    if ends_torn(path):
        with path.open("ab") as file:
            file.write(b"\n")


def _parsed(content: bytes) -> Any:
    try:
        return parse(content)
    except ValueError:
        return None


def _take_out(unsound: list[Line], path: Path, corrupt: Path) -> None:
    with path.open("rb") as file, corrupt.open("ab") as kept:
        for line in unsound:
            file.seek(line.start)
            kept.write(file.read(line.end - line.start).rstrip(b"\n") + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
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
