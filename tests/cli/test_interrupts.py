"""Ctrl-C at any moment of a command's life: while it loads, while it works, while it ends."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

SCRIPTS = Path(sys.executable).parent
SLOW_MODULE = "import pathlib, time\npathlib.Path('{marker}').touch()\ntime.sleep(60)\n"
OUR_CODE = re.compile(rf"{re.escape(str(PARENT_DIR / 'nemo_gym'))}/(?!(?:cli/)?__init__|_version|cli/entry)\S+")
"""All but what is loaded, in a moment, before our own handler is there; until then Python answers in its own way."""


def test_ctrl_c_during_an_import_is_no_traceback(tmp_path: Path) -> None:
    for module in ("secrets", "pydantic", "omegaconf"):  # what the package, the command, and its configuration need
        folder, marker = tmp_path / module, tmp_path / f"{module}.reached"
        folder.mkdir()
        (folder / f"{module}.py").write_text(SLOW_MODULE.format(marker=marker))
        with _started("ng_dump_config", "+a=1", env={"PYTHONPATH": str(folder)}) as process:
            _wait_for(marker, process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, "\nInterrupted.\n")


@pytest.mark.parametrize("after_ms", range(0, 300, 20))
def test_ctrl_c_at_any_moment_shows_none_of_our_code(after_ms: int) -> None:
    with _started("ng_status", "+json=true") as process:
        time.sleep(after_ms / 1000)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert not OUR_CODE.search(errors), errors
    if "KeyboardInterrupt" not in errors:
        assert process.returncode in (130, -signal.SIGINT, 0, 1)


def test_ctrl_c_is_ignored_by_a_command_that_was_started_to_ignore_it(tmp_path: Path) -> None:
    marker = tmp_path / "reached"
    (tmp_path / "pydantic.py").write_text(SLOW_MODULE.format(marker=marker).replace("60", "1"))
    script = f"trap '' INT; exec {SCRIPTS / 'ng_help'}"
    with _started("/bin/sh", "-c", script, env={"PYTHONPATH": str(tmp_path)}) as process:
        _wait_for(marker, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Interrupted" not in errors
    assert "ImportError" in errors  # the stand-in is no pydantic; until there it came


def test_a_command_that_a_program_calls_leaves_its_signals_alone() -> None:
    program = (
        "import signal\nfrom nemo_gym.cli.command import command_named\ncommand_named('version').run(['+json=true'])\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def _started(program: str, *arguments: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    path = {"PATH": "/usr/bin:/bin", **(env or {})}
    command = [program if program.startswith("/") else str(SCRIPTS / program), *arguments]
    return subprocess.Popen(command, env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(marker: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
