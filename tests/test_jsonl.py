from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import count_lines, ends_torn, iter_lines, parse, parse_line, read_objects, to_line, write_aside


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
    assert [value for _, value in read_objects(path)] == [{"a": 1}]


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert list(iter_lines(path)) == []
    assert not ends_torn(path)
    assert count_lines(path) == 0


@pytest.mark.parametrize("line", ['{"a": 1}', b' {"a": 1}\n'])
def test_a_line_is_parsed(line: str | bytes) -> None:
    assert parse_line(line, "rows.jsonl", 1) == {"a": 1}


def test_a_malformed_line_is_one_error_naming_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 3: not valid JSON"):
        list(read_objects(path))


def test_a_line_that_is_not_an_object_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(ConfigError, match="line 2: expected a JSON object, found an array"):
        list(read_objects(path))


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


def test_a_file_written_aside_replaces_the_old_one_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with write_aside(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_file_written_aside_vanishes_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(TypeError), write_aside(path) as file:
        file.writelines([b"new", "no bytes"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
