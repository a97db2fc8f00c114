from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.repair import sound_records


def _line(task: int) -> bytes:
    return b'{"_ng_task_index":%d,"_ng_rollout_index":0}' % task


class _File:
    def __init__(self, folder: Path, content: bytes) -> None:
        self.path, self.corrupt = folder / "out.jsonl", folder / "out.jsonl.corrupt"
        self.path.write_bytes(content)

    def tasks(self, *, may_lack_key: bool = False) -> list[object]:
        records = sound_records(self.path, self.corrupt, may_lack_key=may_lack_key)
        return [record.key.task_index for record in records]


def test_a_sound_file_is_left_alone(tmp_path: Path) -> None:
    content = _line(0) + b"\n\n" + _line(1) + b"\n  \n"
    file = _File(tmp_path, content)
    assert file.tasks() == [0, 1]
    assert file.path.read_bytes() == content
    assert not file.corrupt.exists()


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(sound_records(tmp_path / "none.jsonl", tmp_path / "none.jsonl.corrupt")) == []


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


def test_records_that_may_lack_a_key_are_passed_over(tmp_path: Path) -> None:
    content = b'{"_ng_failure_class":"orphan"}\n' * 3
    file = _File(tmp_path, content)
    assert file.tasks(may_lack_key=True) == []
    assert file.path.read_bytes() == content
