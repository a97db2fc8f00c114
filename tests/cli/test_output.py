import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.launch.process import KEPT_LINES, ServerOutput, open_log_folder


def test_every_line_on_the_terminal_has_its_owner_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = ServerOutput("host", {"agent", "model"})
    for line in (b"(agent) hello\n", b"(host) there\n", b"plain\n", b"(stranger) x\r\n", b"\xff\n"):
        output.write(line)
    assert capsys.readouterr().err.splitlines() == [
        "(agent) hello",
        "(host) there",
        "(host) plain",
        "(host) (stranger) x",
        "(host) �",
    ]


def test_what_a_server_prints_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output = ServerOutput("host", {"agent"})
    output.write("(agent) \x1b]52;c;ZXZpbA==\x07 10 %\r(agent) 20 %\x9b2J\n".encode())

    assert capsys.readouterr().err == "(agent) \\x1b]52;c;ZXZpbA==\\x07 10 %\n(agent) 20 %\\x9b2J\n"
    assert output.last_lines == ["(agent) \\x1b]52;c;ZXZpbA==\\x07 10 %", "(agent) 20 %\\x9b2J"]


def test_with_a_log_folder_each_server_has_its_file_and_the_terminal_stays_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_log_folder(str(tmp_path / "deep" / "logs"))
    assert folder is not None
    (folder / "agent_1.log").write_text("earlier run\n")
    output = ServerOutput("host", {"agent/1"}, folder)
    output.write(b"(agent/1) hello\n")
    output.write(b"starting\n")
    output.close()
    assert (folder / "agent_1.log").read_text() == "earlier run\nhello\n"
    assert (folder / "host.log").read_text() == "starting\n"
    assert capsys.readouterr().err == ""


def test_the_last_lines_are_remembered_and_bounded() -> None:
    output = ServerOutput("mine")
    for number in range(KEPT_LINES + 10):
        output.write(f"(mine) {number}\n".encode())
    output.write(b"x" * 10_000)
    assert len(output.last_lines) == KEPT_LINES
    assert output.last_lines[0] == "11"
    assert len(output.last_lines[-1]) == 2_000


def test_a_log_that_cannot_be_written_is_said_once_and_does_not_stop_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.log").mkdir()
    output = ServerOutput("mine", (), tmp_path)
    output.write(b"one\n")
    output.write(b"two\n")
    assert output.last_lines == ["one", "two"]
    assert caplog.text.count("output is lost") == 1


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"nemo_gym_log_dir.*file/logs"):
        open_log_folder(str(tmp_path / "file" / "logs"))
    assert open_log_folder(None) is None


PRINTING = [
    ["ng_run", "--help"],
    ["ng_version"],
    ["ng_help"],
    ["ng_list_models"],
    ["ng_list_agents", "+json=true"],
    ["gym", "--help"],
    ["gym", "eval", "run", "--help"],
]


@pytest.mark.parametrize("command", PRINTING)
def test_a_full_disk_is_told_in_one_line_and_a_reader_that_has_enough_hears_nothing(command: list[str]) -> None:
    program = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(program, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", PRINTING)
@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_without_stdout_or_stderr_does_its_work(command: list[str], closed: int) -> None:
    program = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}>&-', "sh", *program]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == 2)
