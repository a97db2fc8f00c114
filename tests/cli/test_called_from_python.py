"""Console-script functions that a program loads and calls: the process stays as the program has set it up."""

import json
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR

SCRIPTS = sorted(
    entry.name for entry in entry_points(group="console_scripts") if entry.value.startswith("nemo_gym.cli.")
)
_PROBE = """
import contextlib, gc, importlib.metadata, io, json, os, resource, signal, sys

def process():
    signals = {number: repr(signal.getsignal(number)) for number in signal.valid_signals()}
    collector = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0
    return {
        "signals": signals, "collector": collector, "excepthook": repr(sys.excepthook), "argv": list(sys.argv),
        "folder": os.getcwd(), "environment": dict(os.environ), "streams": [repr(sys.stdout), repr(sys.stderr)],
    }

def changes(before):
    after = process()
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]

def loaded(name):
    return importlib.metadata.entry_points(group="console_scripts")[name].load()
"""


def run_probe(code: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return what a program says that begins as above; it must come to its end."""
    program = folder / "program.py"
    program.write_text(_PROBE + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_there_are_entry_points_of_every_kind() -> None:
    assert {"gym", "ng", "ng_version", "nemo_gym_version", "ng_run", "nemo_gym_view"} <= set(SCRIPTS)


def test_loading_and_asking_for_help_leave_the_process_as_it_is(tmp_path: Path) -> None:
    code = """
    said = {}
    for name in sys.argv[1:]:
        for argument in ("--help",) if name in ("gym", "ng") else ("+h=true", "--help"):
            sys.argv = [f"/somewhere/bin/{name}", argument]
            before = process()
            function = loaded(name)
            problems = [f"loading: {change}" for change in changes(before)]
            page = io.StringIO()
            try:
                with contextlib.redirect_stdout(page):
                    function()
                problems.append("it did not raise SystemExit")
            except SystemExit as ended:
                if ended.code:
                    problems.append(f"exit code {ended.code}")
            problems += [f"calling: {change}" for change in changes(before)]
            if not page.getvalue().startswith("Usage: "):
                problems.append(f"it printed {page.getvalue()[:80]!r}")
            if problems:
                said[f"{name} {argument}"] = problems
    print(json.dumps(said))
    """
    assert run_probe(code, tmp_path, *SCRIPTS) == {}


_CALLS = [
    ("ng_version", ["+json=true"], None),
    ("ng_version", ["+no_such_option=1"], 2),
    ("ng_dump_config", ["+policy_model_name=a"], None),
    ("ng_status", ["+json=true"], None),
    ("ng_aggregate_rollouts", ["+input_glob=nothing_*.jsonl", "+output_jsonl_fpath=out.jsonl"], 2),
    ("ng_validate", ["+config_paths=[missing.yaml]"], 2),
    ("ng_run", ["+config_paths=[missing.yaml]"], 2),
    ("gym", ["--version"], 0),
    ("gym", ["env", "resolve", "+policy_model_name=a"], None),
    ("gym", ["nonsense"], 2),
    ("ng", ["list", "agents", "--search-dir", "."], None),
    ("ng", [], 2),
]


@pytest.mark.parametrize(("name", "arguments", "code"), _CALLS, ids=lambda each: str(each))
def test_a_call_returns_or_raises_system_exit_and_leaves_the_process_as_it_is(
    name: str, arguments: list[str], code: int | None, tmp_path: Path
) -> None:
    program = """
    name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    before = process()
    ended = None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            loaded(name)()
        except SystemExit as error:
            ended = error.code or 0
    print(json.dumps({"ended": ended, "changes": changes(before)}))
    """
    assert run_probe(program, tmp_path, name, *arguments) == {"ended": code, "changes": []}


def test_an_asynchronous_command_leaves_the_garbage_collector_as_it_is(tmp_path: Path) -> None:
    program = """
    import asyncio
    from pydantic import BaseModel
    from nemo_gym.cli.command import command

    class Options(BaseModel):
        pass

    @command(Options, name="ng_mine", reads_config=False)
    async def mine(config):
        await asyncio.sleep(0)
        said.append(gc.get_threshold()[0])

    said = []
    before = process()
    mine.run([])
    print(json.dumps({"inside": said[0] > gc.get_threshold()[0], "changes": changes(before)}))
    """
    assert run_probe(program, tmp_path) == {"inside": True, "changes": []}


def test_a_script_still_collects_no_garbage_and_ends_at_once_after_its_help_page(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    for script, name in (("ng_version", "version"), ("nemo_gym_run", "run"), ("gym", "gym")):
        own = tmp_path / script  # what an installer writes, and a last word that is never said
        written = (bin_folder / script).read_text()
        assert f"from nemo_gym.cli.entry import {name}" in written
        first, rest = written.split("\n", 1)
        own.write_text(
            f"{first}\nimport atexit, gc\natexit.register(lambda: print('ended in order'))\n"
            + rest.replace("if __name__", "print('collects:', gc.isenabled())\nif __name__", 1)
        )
        own.chmod(0o755)
        done = subprocess.run([own, "--help"], capture_output=True, text=True, cwd=PARENT_DIR, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("collects: False\n")
        assert "Usage: " in done.stdout
        assert ("ended in order" in done.stdout) == (name == "gym")
