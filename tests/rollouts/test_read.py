from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import MalformedLineError
from nemo_gym.runs.read import keys_in, records


def _line(task: int) -> bytes:
    return b'{"_ng_task_index":%d,"_ng_rollout_index":0}' % task


class _File:
    def __init__(self, folder: Path, content: bytes) -> None:
        self.path, self.corrupt = folder / "out.jsonl", folder / "out.jsonl.corrupt"
        self.path.write_bytes(content)

    def tasks(self, *, may_lack_key: bool = False) -> list[object]:
        found = records(self.path, "repair", may_lack_key=may_lack_key)
        return [None if key is None else key.task_index for key, _, _ in found]


def test_a_sound_file_is_left_alone(tmp_path: Path) -> None:
    content = _line(0) + b"\n\n" + _line(1) + b"\n  \n"
    file = _File(tmp_path, content)
    assert file.tasks() == [0, 1]
    assert file.path.read_bytes() == content
    assert not file.corrupt.exists()


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(records(tmp_path / "none.jsonl", "repair")) == []


@pytest.mark.parametrize("cut", range(1, len(_line(1)), 7))
def test_a_torn_last_line_is_moved_away_wherever_it_was_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    file = _File(tmp_path, _line(0) + b"\n" + _line(1)[:cut])
    assert file.tasks() == [0]
    assert file.path.read_bytes() == _line(0) + b"\n"
    assert file.corrupt.read_bytes() == _line(1)[:cut] + b"\n"
    assert str(file.corrupt) in caplog.text
    assert "[2]" in caplog.text


def test_a_whole_last_line_only_gets_its_newline(tmp_path: Path) -> None:
    file = _File(tmp_path, _line(0) + b"\n" + _line(1))
    assert file.tasks() == [0, 1]
    assert file.path.read_bytes() == _line(0) + b"\n" + _line(1) + b"\n"
    assert not file.corrupt.exists()


@pytest.mark.parametrize("foreign", [b"hello", b"[1]", b'{"a":1}', b"null", b"\0\0\0\0", b'{"_ng_task_index":{}}'])
def test_a_foreign_last_line_is_moved_away(tmp_path: Path, foreign: bytes) -> None:
    file = _File(tmp_path, _line(0) + b"\n" + foreign + b"\n")
    assert file.tasks() == [0]
    assert file.path.read_bytes() == _line(0) + b"\n"
    assert file.corrupt.read_bytes() == foreign + b"\n"


def test_damage_in_the_middle_is_moved_away_too(tmp_path: Path) -> None:
    torn = _line(9)[:12] + _line(1)
    file = _File(tmp_path, b"\n".join([_line(0), torn, _line(2), b"\0\0", _line(3), b""]))
    assert file.tasks() == [0, 2, 3]
    assert file.path.read_bytes() == b"\n".join([_line(0), _line(2), _line(3), b""])
    assert file.corrupt.read_bytes() == torn + b"\n\0\0\n"


def test_damage_is_collected_over_time(tmp_path: Path) -> None:
    for number in range(3):
        assert _File(tmp_path, _line(0) + b"\n{%d" % number).tasks() == [0]
    assert (tmp_path / "out.jsonl.corrupt").read_bytes() == b"{0\n{1\n{2\n"


def test_a_single_torn_line_leaves_an_empty_file(tmp_path: Path) -> None:
    file = _File(tmp_path, b'{"_ng_ta')
    assert file.tasks() == []
    assert file.path.read_bytes() == b""


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path) -> None:
    content = b"# title\n\nsome text\n" + _line(0) + b"\n"
    file = _File(tmp_path, content)
    with pytest.raises(ConfigError, match=r"out\.jsonl: 2 of 3 lines, the first of them line 1"):
        file.tasks()
    assert file.path.read_bytes() == content
    assert not file.corrupt.exists()


def test_a_long_tail_of_garbage_is_moved_away(tmp_path: Path) -> None:
    garbage = b"\xff\x00{\n" * 9
    file = _File(tmp_path, _line(0) + b"\n" + garbage)
    assert file.tasks() == [0]
    assert file.path.read_bytes() == _line(0) + b"\n"
    assert file.corrupt.read_bytes() == garbage


def test_records_that_may_lack_a_key_are_no_damage(tmp_path: Path) -> None:
    content = b'{"_ng_failure_class":"orphan"}\n' * 3
    file = _File(tmp_path, content)
    assert file.tasks(may_lack_key=True) == [None] * 3
    assert file.path.read_bytes() == content


def test_who_only_looks_changes_nothing_and_refuses_the_same_files(tmp_path: Path) -> None:
    content = _line(0) + b"\n{torn\n" + _line(1)
    file = _File(tmp_path, content)
    assert [key.task_index for key, _, _ in records(file.path, "leave")] == [0, 1]
    assert file.path.read_bytes() == content
    assert not file.corrupt.exists()
    file.path.write_bytes(b"# title\nsome text\n" + _line(0))
    with pytest.raises(ConfigError, match="2 of 3 lines"):
        list(records(file.path, "leave"))


def test_damage_of_any_extent_can_be_passed_over(tmp_path: Path) -> None:
    content = b"# title\nsome text\n" + _line(0) + b'\n{"a":1}\n[1]\n{to'
    file = _File(tmp_path, content)
    skipped: list[int] = []
    found = list(records(file.path, "skip", on_skipped=lambda line: skipped.append(line.number)))
    assert [value for _, _, value in found] == [{"_ng_task_index": 0, "_ng_rollout_index": 0}]
    assert skipped == [1, 2, 4, 5, 6]
    assert [line.number for _, line, _ in records(file.path, "skip", may_lack_key=True)] == [3, 4]
    assert file.path.read_bytes() == content
    assert len(keys_in(file.path)) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"[1]", "expected a JSON object, found an array"),
        (b'{"a":1}', "no _ng_task_index and _ng_rollout_index"),
    ],
)
def test_a_damaged_line_can_be_an_error_naming_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    file = _File(tmp_path, _line(0) + b"\n\n" + line + b"\n")
    with pytest.raises(MalformedLineError, match=rf"out\.jsonl, line 3: {problem}"):
        list(records(file.path, "raise"))
    with pytest.raises(FileNotFoundError):
        list(records(tmp_path / "none.jsonl", "raise"))


def test_a_torn_end_is_no_error_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = _File(tmp_path, _line(0) + b"\n" + _line(1)[:9])
    assert [key.task_index for key, _, _ in records(file.path, "raise")] == [0]
    assert "ends in the middle of line 2, which is left out" in caplog.text
    caplog.clear()
    torn: list[bytes] = []
    assert len(list(records(file.path, "raise", on_skipped=lambda line: torn.append(line.content)))) == 1
    assert torn == [_line(1)[:9]]
    assert not caplog.text
