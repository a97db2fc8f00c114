"""What data sets are like: numbers taken row by row, and the files that keep them, written once, compared ever after.

A metrics file says what its data set looked like when somebody last agreed with it. Data that looks
different now is a conflict: the new metrics go beside the old ones, and the user decides.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym.errors import ConfigError, listed
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.paths import NotAFolderError, make_folder, write_aside

_NOT_MEASURED = {RESPONSES_CREATE_PARAMS_KEY_NAME, RESPONSE_KEY_NAME}
_SHORT_TEXT_BYTES = 8


def rounded(value: float) -> float:
    """As metrics files hold it: two decimals from 1 on, three below."""
    return round(value, 2 if abs(value) >= 1 else 3)


class Accumulator(BaseModel):
    """Numbers that can be collected in parts: parts are added, and what people read is made at the end."""

    model_config = ConfigDict(defer_build=True)

    is_aggregated: bool = Field(default=False, exclude=True)

    def add(self, other: Self) -> None:
        """Become the numbers of both.

        Raises:
            ValueError: one of them was made for reading, which cannot be undone.
        """
        if self.is_aggregated or other.is_aggregated:
            raise ValueError(f"{type(self).__name__} was aggregated: add what it was made of instead")
        self._add(other)

    def aggregate(self) -> Self:
        """A copy as it is read and written: rounded, and all 0 without an observation."""
        made = self.model_copy()
        made._aggregate()
        made.is_aggregated = True
        return made

    def _add(self, other: Self) -> None:
        raise NotImplementedError

    def _aggregate(self) -> None:
        raise NotImplementedError


class AvgMinMax(Accumulator):
    """Count, mean, extremes and spread of a number; `average` and `stddev` are there once it is aggregated."""

    total: int = Field(default=0, serialization_alias="Total # non-null values")
    average: float = Field(default=0, serialization_alias="Average")
    min: float = Field(default=0, serialization_alias="Min")
    max: float = Field(default=0, serialization_alias="Max")
    stddev: float = Field(default=0, serialization_alias="Standard deviation")
    mean: float = Field(default=0, exclude=True)
    M2: float = Field(default=0, exclude=True)
    """Sum of the squared distances from the mean."""

    def observe(self, x: float, times: int = 1) -> None:
        """Add a value that occurs so many times."""
        value = float(x)
        self._merge(times, value, value, value, 0.0)

    def _add(self, other: Self) -> None:
        self._merge(other.total, other.mean, other.min, other.max, other.M2)

    def _merge(self, count: int, mean: float, least: float, most: float, squares: float) -> None:
        if not count:
            return
        mine = self.__dict__  # past pydantic, which looks at every name that is set: this is done for every row
        before = mine["total"]
        total = before + count
        distance = mean - mine["mean"]
        mine["M2"] += squares + distance * distance * before * count / total
        mine["mean"] += distance * count / total
        mine["min"] = min(mine["min"], least) if before else least
        mine["max"] = max(mine["max"], most) if before else most
        mine["total"] = total

    def _aggregate(self) -> None:
        std = math.sqrt(self.M2 / (self.total - 1)) if self.total > 1 else 0.0
        numbers = (self.mean, self.min, self.max, std)
        self.average, self.min, self.max, self.stddev = (rounded(each) if self.total else 0 for each in numbers)

    def as_dict(self) -> dict[str, Any]:
        """As it is written."""
        return (self if self.is_aggregated else self.aggregate()).model_dump(by_alias=True)


class StringMetrics(BaseModel):
    """How many texts there are, and how many different ones."""

    model_config = ConfigDict(defer_build=True)

    unique_count: int
    total_count: int


@dataclass
class Texts:
    """Texts that are being counted."""

    total: int = 0
    digests: set[bytes] = field(default_factory=set)

    def observe(self, text: str, times: int = 1) -> None:
        """Add a text that occurs so many times."""
        self.total += times
        encoded = text.encode("utf-8", "surrogatepass")
        is_short = len(encoded) <= _SHORT_TEXT_BYTES
        self.digests.add(encoded if is_short else blake2b(encoded, digest_size=_SHORT_TEXT_BYTES + 1).digest())

    def add(self, other: "Texts") -> None:
        """Become the counts of both."""
        self.total += other.total
        self.digests |= other.digests

    def metrics(self) -> StringMetrics:
        """How many texts there were, and how many different ones."""
        return StringMetrics(unique_count=len(self.digests), total_count=self.total)


@dataclass
class FieldMetrics:
    """One field of the rows, which may hold numbers in some rows and text in others."""

    numbers: AvgMinMax = field(default_factory=AvgMinMax)
    texts: Texts = field(default_factory=Texts)

    def add(self, other: "FieldMetrics") -> None:
        """Become the statistics of both."""
        self.numbers.add(other.numbers)
        self.texts.add(other.texts)

    def as_dict(self) -> dict[str, Any]:
        """What there is of either kind."""
        return {
            **(self.numbers.as_dict() if self.numbers.total else {}),
            **(self.texts.metrics().model_dump() if self.texts.total else {}),
        }


class DatasetMetrics(Accumulator):
    """What a metrics file says about the rows of a data set; fields of the rows may be attributes of it, too."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    number_of_examples: int = Field(default=0, serialization_alias="Number of examples")
    number_of_tools: AvgMinMax = Field(default_factory=AvgMinMax, serialization_alias="Number of tools")
    json_dumped_number_of_words: AvgMinMax = Field(
        default_factory=AvgMinMax, serialization_alias="Json-dumped number of words (proxy for token count)"
    )
    number_of_turns: AvgMinMax = Field(default_factory=AvgMinMax, serialization_alias="Number of turns")
    temperature: AvgMinMax = Field(default_factory=AvgMinMax, serialization_alias="Temperature")
    _fields: dict[str, FieldMetrics] = PrivateAttr(default_factory=dict)

    def observe(self, row: Mapping[str, Any], times: int = 1) -> None:
        """Add a valid row that is used so many times."""
        self.observe_params(row[RESPONSES_CREATE_PARAMS_KEY_NAME], times)
        fields = self._fields
        for name, value in scalars(row):
            measured = fields.setdefault(name, FieldMetrics())
            if isinstance(value, str):
                measured.texts.observe(value, times)
            else:
                measured.numbers.observe(value, times)

    def observe_params(self, params: Mapping[str, Any], times: int = 1) -> None:
        """Add what a row asks the model, and nothing else of it."""
        self.number_of_examples += times
        if params.get("tools") is not None:
            self.number_of_tools.observe(len(params["tools"]), times)
        self.json_dumped_number_of_words.observe(len(dumps(params).split()), times)
        turns = _user_turns(params.get("input"))
        if turns:
            self.number_of_turns.observe(turns, times)
        if params.get("temperature") is not None:
            self.temperature.observe(params["temperature"], times)

    def after(self, declaration: Mapping[str, Any]) -> dict[str, Any]:
        """The whole content of a metrics file: the data set's declaration, then the metrics.

        A field of the rows whose name is taken by either is marked as a field.
        """
        content: dict[str, Any] = {
            **declaration,
            **(self if self.is_aggregated else self.aggregate()).model_dump(by_alias=True),
        }
        taken = set(content)
        for name, measured in self._fields.items():
            content[f"{name} (field)" if name in taken else name] = measured.as_dict()
        return content

    def _add(self, other: Self) -> None:
        self.number_of_examples += other.number_of_examples
        for name in _ACCUMULATORS:
            getattr(self, name).add(getattr(other, name))
        for name, measured in other._fields.items():
            self._fields.setdefault(name, FieldMetrics()).add(measured)

    def _aggregate(self) -> None:
        for name in _ACCUMULATORS:
            setattr(self, name, getattr(self, name).aggregate())


_ACCUMULATORS = ("number_of_tools", "json_dumped_number_of_words", "number_of_turns", "temperature")


def _user_turns(conversation: Any) -> int:
    if isinstance(conversation, str):
        return 1
    return sum(isinstance(item, Mapping) and item.get("role") == "user" for item in conversation or ())


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, str | float]]:
    """What can be measured of the fields of a row, lists element by element; what it asks the model is left out."""
    for name, value in row.items():
        if name in _NOT_MEASURED:
            continue
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, str) or _is_measurable(item):
                yield name, item


def _is_measurable(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


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
