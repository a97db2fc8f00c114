"""Numbers about a data set that can be collected row by row and merged data set by data set."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from typing import Any

from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME

_NOT_MEASURED = {RESPONSES_CREATE_PARAMS_KEY_NAME, RESPONSE_KEY_NAME}
_SHORT_TEXT_BYTES = 8


def rounded(value: float) -> float:
    """As metrics files hold it: two decimals from 1 on, three below."""
    return round(value, 2 if abs(value) >= 1 else 3)


@dataclass
class AvgMinMax:
    """Count, mean, extremes and spread of a number."""

    total: int = 0
    average: float = 0.0
    min: float = 0.0
    max: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value that occurs so many times."""
        self.add(AvgMinMax(times, float(value), float(value), float(value)))

    def add(self, other: "AvgMinMax") -> None:
        """Become the statistics of both."""
        if not other.total:
            return
        if not self.total:
            self.min, self.max = other.min, other.max
        total = self.total + other.total
        distance = other.average - self.average
        self.squares += other.squares + distance * distance * self.total * other.total / total
        self.average += distance * other.total / total
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        self.total = total

    @property
    def std(self) -> float:
        """The sample standard deviation; 0 for a single value."""
        return math.sqrt(self.squares / (self.total - 1)) if self.total > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As it is written; without any observation all of it is 0."""
        numbers = (self.average, self.min, self.max, self.std)
        average, least, most, std = (rounded(number) if self.total else 0 for number in numbers)
        return {
            "Total # non-null values": self.total,
            "Average": average,
            "Min": least,
            "Max": most,
            "Standard deviation": std,
        }


@dataclass
class StringMetrics:
    """How many texts there are, and how many different ones."""

    total: int = 0
    digests: set[bytes] = field(default_factory=set)

    def observe(self, text: str, times: int = 1) -> None:
        """Add a text that occurs so many times."""
        self.total += times
        encoded = text.encode("utf-8", "surrogatepass")
        is_short = len(encoded) <= _SHORT_TEXT_BYTES
        self.digests.add(encoded if is_short else blake2b(encoded, digest_size=_SHORT_TEXT_BYTES + 1).digest())

    def add(self, other: "StringMetrics") -> None:
        """Become the statistics of both."""
        self.total += other.total
        self.digests |= other.digests

    def as_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {"unique_count": len(self.digests), "total_count": self.total}


@dataclass
class FieldMetrics:
    """One field of the rows, which may hold numbers in some rows and text in others."""

    numbers: AvgMinMax = field(default_factory=AvgMinMax)
    texts: StringMetrics = field(default_factory=StringMetrics)

    def add(self, other: "FieldMetrics") -> None:
        """Become the statistics of both."""
        self.numbers.add(other.numbers)
        self.texts.add(other.texts)

    def as_dict(self) -> dict[str, Any]:
        """What there is of either kind."""
        return {
            **(self.numbers.as_dict() if self.numbers.total else {}),
            **(self.texts.as_dict() if self.texts.total else {}),
        }


@dataclass
class DatasetMetrics:
    """What a metrics file says about the rows of a data set."""

    number_of_examples: int = 0
    number_of_tools: AvgMinMax = field(default_factory=AvgMinMax)
    json_dumped_number_of_words: AvgMinMax = field(default_factory=AvgMinMax)
    number_of_turns: AvgMinMax = field(default_factory=AvgMinMax)
    temperature: AvgMinMax = field(default_factory=AvgMinMax)
    fields: dict[str, FieldMetrics] = field(default_factory=dict)
    """Every other field of the rows, by name."""

    def observe(self, row: Mapping[str, Any], times: int = 1) -> None:
        """Add a valid row that is used so many times."""
        params = row[RESPONSES_CREATE_PARAMS_KEY_NAME]
        self.number_of_examples += times
        if params.get("tools") is not None:
            self.number_of_tools.observe(len(params["tools"]), times)
        self.json_dumped_number_of_words.observe(len(dumps(params).split()), times)
        turns = _user_turns(params.get("input"))
        if turns:
            self.number_of_turns.observe(turns, times)
        if params.get("temperature") is not None:
            self.temperature.observe(params["temperature"], times)
        for name, value in _scalars(row):
            measured = self.fields.setdefault(name, FieldMetrics())
            if isinstance(value, str):
                measured.texts.observe(value, times)
            else:
                measured.numbers.observe(value, times)

    def add(self, other: "DatasetMetrics") -> None:
        """Become the metrics of both data sets together."""
        self.number_of_examples += other.number_of_examples
        self.number_of_tools.add(other.number_of_tools)
        self.json_dumped_number_of_words.add(other.json_dumped_number_of_words)
        self.number_of_turns.add(other.number_of_turns)
        self.temperature.add(other.temperature)
        for name, measured in other.fields.items():
            self.fields.setdefault(name, FieldMetrics()).add(measured)

    def after(self, declaration: Mapping[str, Any]) -> dict[str, Any]:
        """The whole content of a metrics file: the data set's declaration, then the metrics.

        A field of the rows whose name is taken by either is marked as a field.
        """
        content: dict[str, Any] = {
            **declaration,
            "Number of examples": self.number_of_examples,
            "Number of tools": self.number_of_tools.as_dict(),
            "Json-dumped number of words (proxy for token count)": self.json_dumped_number_of_words.as_dict(),
            "Number of turns": self.number_of_turns.as_dict(),
            "Temperature": self.temperature.as_dict(),
        }
        taken = set(content)
        for name, measured in self.fields.items():
            content[f"{name} (field)" if name in taken else name] = measured.as_dict()
        return content


def _user_turns(conversation: Any) -> int:
    if isinstance(conversation, str):
        return 1
    return sum(isinstance(item, Mapping) and item.get("role") == "user" for item in conversation or ())


def _scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, str | float]]:
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
