"""Numbers about a data set that can be collected row by row and merged data set by data set."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME

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
