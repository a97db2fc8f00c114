import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import (
    count_lines,
    cut_levels,
    ends_torn,
    is_deeper,
    iter_lines,
    parse,
    parse_line,
    to_line,
)


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"a":1}\n  \n\n {"b":2} \r\n')
    assert [(line.number, line.content) for line in iter_lines(path)] == [(2, b'{"a":1}'), (5, b'{"b":2}')]


def test_a_line_knows_where_it_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    content = '{"a":"é"}\n\n{"b":2}'.encode()
    path.write_bytes(content)
    assert [content[line.start : line.end].strip() for line in iter_lines(path)] == ['{"a":"é"}'.encode(), b'{"b":2}']


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n')
    assert [(line.content, line.offset) for line in iter_lines(path)] == [(b'{"a":1}', 3)]


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert list(iter_lines(path)) == []
    assert not ends_torn(path)
    assert count_lines(path) == 0


@pytest.mark.parametrize("line", ['{"a": 1}', b' {"a": 1}\n'])
def test_a_line_is_parsed(line: str | bytes) -> None:
    assert parse_line(line, "rows.jsonl", 1) == {"a": 1}


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity, "b": "\\ud800"}', "{'a': 1}", "", "{} {}"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text.encode())


def test_bytes_that_are_no_text_are_a_malformed_line() -> None:
    with pytest.raises(ConfigError, match="line 7"):
        parse_line(b'{"a": "\xff\\u0041"}', "rows.jsonl", 7)


def test_lines_are_compact_utf8() -> None:
    assert to_line({"question": "Größe?", "n": [1, 2.5, None]}) == '{"question":"Größe?","n":[1,2.5,null]}\n'.encode()


def test_half_an_emoji_survives_a_round_trip() -> None:
    record = {"text": "\ud83d", "other": "ü"}
    line = to_line(record)
    assert line.isascii()
    assert parse(line) == record


def test_an_integer_beyond_64_bits_is_written_in_full() -> None:
    assert to_line({"n": 2**70}) == b'{"n":%d}\n' % 2**70


@pytest.mark.parametrize(("content", "torn"), [(b'{"a":1}\n', False), (b'{"a":1}', True), (b'{"a":1}\n{"b', True)])
def test_a_missing_last_newline_is_noticed(tmp_path: Path, content: bytes, torn: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert ends_torn(path) is torn
    assert count_lines(path) == content.count(b"\n")


def _nested(levels: int, innermost: object = 1) -> object:
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize("levels", [1, 254, 255, 900, 999, 1_000])
def test_a_record_is_written_and_read_however_deeply_it_is_nested(levels: int) -> None:
    line = to_line(_nested(levels))
    value: Any = parse(line)
    for level in reversed(range(levels)):
        value = value[0] if level % 2 else value["k"]
    assert value == 1


def test_what_nobody_could_read_again_is_not_written() -> None:
    value: Any = parse(to_line({"reward": 1.0, "deep": _nested(5_000), "after": [1, 2]}))
    assert (value["reward"], value["after"]) == (1.0, [1, 2])


@pytest.mark.parametrize("odd", ["\ud83d", "\ud83d" * 3, 2.0**70])
def test_numbers_that_are_none_become_null_whatever_else_a_record_holds(odd: object) -> None:
    others = {"odd": odd, "t": [1, True, None], "e": {}, "s": 'q"\\\n'}
    line = to_line({"a": [math.nan, {"b": -math.inf}, ()], **others})
    assert parse(line) == {"a": [None, {"b": None}, []], **others}


@pytest.mark.parametrize(
    ("content", "levels", "cut"),
    [
        ('{"a":[1,[2]],"b":3}', 3, '{"a":[1,[2]],"b":3}'),
        ('{"a":[1,[2]],"b":3}', 2, '{"a":[1,null],"b":3}'),
        ('{"a":[1,[2]],"b":{"c":[]}}', 1, '{"a":null,"b":null}'),
        (r'{"a":"[[[\"[","b":["{\\"]}', 2, r'{"a":"[[[\"[","b":["{\\"]}'),
        (r'{"a":"[[[\"[","b":["{\\"]}', 1, r'{"a":"[[[\"[","b":null}'),
        ('[[[["]', 2, '[[[["]'),
        ("]]]", 0, "]]]"),
    ],
)
def test_what_is_nested_too_deeply_is_cut_out_without_reading_it(content: str, levels: int, cut: str) -> None:
    assert cut_levels(content.encode(), levels).decode() == cut


def test_however_deep_it_is_what_is_cut_can_be_read() -> None:
    deep = b'{"before":1,"deep":' + b'[{"a":' * 200_000 + b"1" + b"}]" * 200_000 + b',"after":2}'

    value = parse(cut_levels(deep, 100))

    assert (value["before"], value["after"]) == (1, 2)


@pytest.mark.parametrize(
    ("text", "levels", "is_deep"),
    [
        ("[[1]]", 2, False),
        ("[[[1]]]", 2, True),
        ('["[[[[[[["]', 2, False),
        ('{"a": [], "b": {"c": {}}}', 3, False),
        ('{"a": [], "b": {"c": {}}}', 2, True),
        ("", 0, False),
    ],
)
def test_how_deep_json_is_can_be_told_without_reading_it(text: str, levels: int, is_deep: bool) -> None:
    assert is_deeper(text, levels) == is_deep


LONG_LINE = 1 << 18


@pytest.mark.parametrize("seed", range(60))
def test_long_lines_are_those_of_the_file(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [0, 3, LONG_LINE - 2, LONG_LINE - 1, LONG_LINE, LONG_LINE, LONG_LINE, LONG_LINE + 1, 5 * LONG_LINE]
    spaces = [b"", b"", b"", b" ", b"\r", b" \t\r"]
    lines = [
        chance.choice(spaces) + b"y" * chance.choice(sizes) + chance.choice(spaces) for _ in range(chance.randrange(9))
    ]
    content = b"\n".join(lines) + chance.choice([b"", b"\n", b"\n\n"])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)

    found = list(iter_lines(path))
    wanted = [(number, raw.strip()) for number, raw in enumerate(content.split(b"\n"), 1) if raw.strip()]
    assert [(line.number, line.content) for line in found] == wanted
    assert all(content[line.start : line.end].strip() == line.content for line in found)
    assert all(content[line.offset :].startswith(line.content) for line in found)


def test_long_lines_of_one_length_are_read_without_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b"%d%b\n" % (number, b"y" * LONG_LINE) for number in range(5)))
    read: list[bytes] = []
    pread = os.pread

    def noted(descriptor: int, length: int, start: int) -> bytes:
        read.append(pread(descriptor, length, start))
        return read[-1]

    monkeypatch.setattr(os, "pread", noted)

    found = [line.content for line in iter_lines(path)]

    assert [content for content in read if len(content) > 1] == found[1:]
    assert all(any(content is each for each in read) for content in found[1:])
