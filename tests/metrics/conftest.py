"""Golden data, and how numbers are compared with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str], Any]:
    """Read a file of golden data: parsed, one list entry per line for JSONL."""

    def read(name: str) -> Any:
        content = (GOLDEN / name).read_bytes()
        return [orjson.loads(line) for line in content.splitlines()] if name.endswith("l") else orjson.loads(content)

    return read


@pytest.fixture
def golden_bytes() -> Callable[[str], bytes]:
    return lambda name: (GOLDEN / name).read_bytes()


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """Same keys in the same order, same types, numbers within 1e-9."""
    return _assert_same


def _assert_same(actual: Any, expected: Any, place: str = "") -> None:
    assert type(actual) is type(expected), place
    if isinstance(expected, dict):
        assert list(actual) == list(expected), place
        for key, value in expected.items():
            _assert_same(actual[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), place
        for number, value in enumerate(expected):
            _assert_same(actual[number], value, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-9, rel=0), place
    else:
        assert actual == expected, place
