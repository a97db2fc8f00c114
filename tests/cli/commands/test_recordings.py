import json
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.recording.files import call_files
from tests.recording.test_files import write

main = command_named("recordings")


def exit_code(*arguments: str) -> int:
    try:
        main.run(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def flip_a_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_recording_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(3))
    write(tmp_path, range(2))

    assert exit_code(f"+folder={tmp_path}") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["server", "model", "calls", "superseded", "rollouts", "files", "bytes", "last", "call"]
    assert line.split()[:6] == ["policy", "m", "5", "2", "3", "2"]
    assert exit_code(f"+folder={tmp_path}", "+json=true") == 0
    assert json.loads(capsys.readouterr().out)["servers"][0]["calls"] == 5


def test_a_flipped_byte_is_found_named_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, frames = write(tmp_path, range(3))
    assert exit_code(f"+folder={tmp_path}", "+check=true") == 0
    assert "All 3 calls are as they were written" in capsys.readouterr().out
    flip_a_byte(path, frames[1].offset + 70)

    assert exit_code(f"+folder={tmp_path}", "+check=true") == 1
    assert f"DAMAGED {path}, offset {frames[1].offset}: " in capsys.readouterr().out
    assert exit_code(f"+folder={tmp_path}", "+check=true", "+json=true") == 1
    assert json.loads(capsys.readouterr().out)["damage"][0]["offset"] == frames[1].offset
    assert exit_code(f"+folder={tmp_path}", "+prune=true", "+check=true") == 0
    assert "Dropped 1 calls" in capsys.readouterr().out


def test_the_calls_of_a_rollout_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(3))

    assert exit_code(f"+folder={tmp_path}", "+rollout=1-0") == 0
    assert capsys.readouterr().out.splitlines() == ["1. policy responses, 1 ms", '   "answer 1"']
    assert exit_code(f"+folder={tmp_path}", "+rollout=1-0", "+json=true") == 0
    assert json.loads(capsys.readouterr().out)["response"] == "answer 1"


def test_all_of_it_can_be_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(3))

    assert exit_code(f"+folder={tmp_path}", "+prune=true", "+max_bytes=0", "+json=true") == 0
    assert json.loads(capsys.readouterr().out)["pruned"]["dropped"] == 3
    assert call_files(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+folder=nowhere"], "+folder=nowhere: there is no such folder"),
        ([], "folder"),
        (["+folder=.", "+older_than_days=3"], "only +prune=true does"),
        (["+folder=.", "+rollout=1-0", "+prune=true"], "+rollout lists calls"),
        (["+folder=.", "+rollout=8-0"], "no calls of this rollout"),
        (["+folder=.", "+server=nobody"], "no calls of such a server"),
    ],
)
def test_mistakes_are_the_users_to_mend(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(1))

    assert exit_code(*arguments) == 2
    assert words in capsys.readouterr().err
