"""Metrics files: written once, compared ever after.

A metrics file says what its data set looked like when somebody last agreed with it. Data that looks
different now is a conflict: the new metrics go beside the old ones, and the user decides.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nemo_gym.errors import ConfigError, listed
from nemo_gym.paths import NotAFolderError, make_folder, write_aside

logger = logging.getLogger(__name__)

_FROM_ONE, _BELOW_ONE = 5e-3, 5e-4
_SHOWN = 20


class MetricsConflictError(ConfigError, ValueError):
    """Metrics files that no longer agree with their data."""


class CannotWriteError(ConfigError, OSError):
    """A file that cannot be written where it belongs."""


@contextmanager
def writing_to(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well; missing folders are made."""
    try:
        make_folder(path.parent)
        with write_aside(path) as file:
            yield file
    except OSError as error:
        if isinstance(error, ConfigError) and not isinstance(error, NotAFolderError):
            raise
        raise CannotWriteError(f"cannot write {path}: {error.strerror or error}") from error


@dataclass
class MetricsFiles:
    """The metrics files of one preparation, and the conflicts among them."""

    overwrite: bool
    written: list[Path] = field(default_factory=list)
    conflicts: list[tuple[Path, Path]] = field(default_factory=list)
    """The file with the new metrics, and the file they disagree with."""

    def write(self, path: Path, content: Mapping[str, Any], reference: Path | None = None) -> bool:
        """Write `content` to `path` unless it says so already; False on a conflict that is not overwritten.

        Args:
            path: where the metrics belong.
            content: the metrics.
            reference: the file to compare with, when it is not `path`.
        """
        known = next((place for place in (path, reference) if place is not None and place.is_file()), None)
        if known is None:
            self._replace(path, content)
            return True
        found = list(differences(_read(known), content))
        if not found:
            return True
        conflict = path.with_name(f"{path.stem}_conflict.json")
        self.conflicts.append((conflict, known))
        shown = "".join(f"\n  {line}" for line in found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        logger.warning("%s disagrees with the data:%s%s", known, shown, more)
        self._replace(path if self.overwrite else conflict, content)
        if self.overwrite:
            conflict.unlink(missing_ok=True)  # of an earlier refusal
        return self.overwrite

    def settle(self) -> None:
        """Say what conflicts there were.

        Raises:
            MetricsConflictError: there were some, and they are not to be overwritten.
        """
        if not self.conflicts:
            return
        if self.overwrite:
            logger.warning("Metrics that disagreed were overwritten: %s", listed(known for _, known in self.conflicts))
            return
        named = "".join(f"\n  {conflict} (new) against {known} (old)" for conflict, known in self.conflicts)
        raise MetricsConflictError(
            f"Found conflicting aggregate metrics that need to be corrected:{named}\n"
            "If the new metrics are right, delete the old files and the new, and run the command again, or pass "
            "+overwrite_metrics_conflicts=true. If they are not, correct the data."
        )

    def _replace(self, path: Path, content: Mapping[str, Any]) -> None:
        with writing_to(path) as file:
            file.write(json.dumps(content, indent=4).encode())
        self.written.append(path)


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Where `new` says something else than `old`; what only `new` says is no difference."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key, value in old.items():
            place = f"{where}.{key}" if where else str(key)
            if key in new:
                yield from differences(value, new[key], place)
            else:
                yield f"{place}: was {value!r}, now it is missing"
    elif not _matches(old, new):
        yield f"{where}: was {old!r}, now {new!r}"


def _matches(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        tolerance = _FROM_ONE if max(abs(old), abs(new)) >= 1 else _BELOW_ONE
        return abs(old - new) <= tolerance
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and _same_elements(old, new)
    return bool(old == new)


def _same_elements(old: list[Any], new: list[Any]) -> bool:
    """In any order, each element of the one paired with one of the other."""
    unpaired = list(new)
    for item in old:
        position = next((at for at, other in enumerate(unpaired) if not any(differences(item, other, "."))), None)
        if position is None:
            return False
        del unpaired[position]
    return True


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); delete it to have it written anew") from error
