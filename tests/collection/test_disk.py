"""What a run leaves on disk: all of it synced, and nothing that somebody else did to it passed over."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.runs.store import FileChangedError
from tests.collection.conftest import Collect
from tests.collection.fakes import Answer, FakeRun, Row, keys_in, lines_in, right_away, rows_of, write_rows
from tests.programs import WAIT_S

ROWS = 12
ALL_KEYS = [(task, 0) for task in range(ROWS)]


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"stray bytes\n" * 3)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\x00\xff stray bytes")


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


ATTACKS: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut in a line": lambda path: os.truncate(path, path.stat().st_size - 5),
    "appended to": _append,
    "overwritten": _overwrite,
    "removed": Path.unlink,
    "replaced": _replace,
}


def attacking(attack: str, path: Path, at: int) -> Answer:
    """An agent that works well, and while it answers for the row `at` something happens to a file."""

    def strike() -> None:
        while path.stat().st_size == 0:
            time.sleep(0.01)
        ATTACKS[attack](path)

    async def answer(row: Row, attempt: int) -> Row:
        if row["n"] == at:
            await asyncio.to_thread(strike)
        return await right_away(row, attempt)

    return answer


@pytest.mark.parametrize("options", [[], ["+disable_aggregation=true"]], ids=["with metrics", "without"])
@pytest.mark.parametrize("at", [5, ROWS - 1], ids=["in the middle", "before the last"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_whose_output_is_changed_by_somebody_else_fails_in_one_line_and_can_be_resumed(
    fake_run: FakeRun, collect: Collect, attack: str, at: int, options: list[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(ROWS))
    fake_run.answer = attacking(attack, Path("out.jsonl"), at)

    done = collect("+num_samples_in_parallel=1", *options)

    assert done.exit_code == 1, done.stdout
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: out.jsonl ")], done.stderr
    assert "Traceback" not in done.stderr
    manifest = json.loads(Path("out_manifest.json").read_bytes())
    assert manifest["counts"]["success"] + manifest["counts"]["missing"] == ROWS
    fake_run.answer = right_away
    assert collect("+resume_from_cache=true", *options).exit_code == 0
    assert keys_in(Path("out.jsonl")) == ALL_KEYS


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_output_that_is_changed_while_the_metrics_are_computed_is_noticed(
    fake_run: FakeRun, collect: Collect, attack: str
) -> None:
    write_rows(Path("in.jsonl"), rows_of(ROWS))
    fake_run.when_asked_for_metrics = lambda: ATTACKS[attack](Path("out.jsonl"))

    done = collect()

    assert done.exit_code == 1, done.stdout
    assert "Error: out.jsonl " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("head_config", "quick_retries")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_held_in_memory_notices_it_too(fake_run: FakeRun, collect: Collect, attack: str) -> None:
    write_rows(Path("in.jsonl"), rows_of(ROWS))
    fake_run.answer = attacking(attack, Path("out.jsonl"), ROWS - 1)
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "alpha"}
    config = RolloutCollectionConfig.model_validate({**given, "num_samples_in_parallel": 1})

    with pytest.raises(FileChangedError, match=r"^out\.jsonl "):
        asyncio.run(RolloutCollectionHelper().run_from_config(config))

    fake_run.answer = right_away
    assert collect("+resume_from_cache=true").exit_code == 0
    assert keys_in(Path("out.jsonl")) == ALL_KEYS


@pytest.mark.parametrize("attack", ["emptied", "cut in a line", "appended to", "overwritten"])
def test_rows_that_somebody_else_changes_end_the_run_in_one_line(
    fake_run: FakeRun, collect: Collect, attack: str
) -> None:
    number = 400
    write_rows(Path("in.jsonl"), rows_of(number, padding="x" * 10_000))  # more than is read at once
    rows = Path("out_materialized_inputs.jsonl")

    def strike() -> None:
        if attack == "overwritten":
            with rows.open("r+b") as file:
                file.seek(-1_000_000, os.SEEK_END)
                file.write(b"stray bytes\n" * 3)
        else:
            ATTACKS[attack](rows)

    async def answer(row: Row, attempt: int) -> Row:
        if row["n"] == 5:
            strike()
        return await right_away(row, attempt)

    fake_run.answer = answer

    done = collect("+num_samples_in_parallel=1")

    assert done.exit_code == 1, done.stdout
    assert "Error: out_materialized_inputs.jsonl was changed while the run was reading it" in done.stderr
    fake_run.answer = right_away
    assert collect("+resume_from_cache=true").exit_code == 0
    assert len(keys_in(Path("out.jsonl"))) == number
    assert len(lines_in(rows)) == number


RECORDING = """
import json, os, sys

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(*event):
    os.write(log, (json.dumps(event) + "\\n").encode())

def hook(name, arguments):
    if name == "open" and isinstance(arguments[0], (str, os.PathLike)) and arguments[2] & os.O_CREAT:
        note("create", os.path.abspath(arguments[0]))
    elif name == "os.rename":
        note("rename", *map(os.path.abspath, arguments[:2]))
    elif name == "os.mkdir":
        note("create", os.path.abspath(arguments[0]))

def sync(descriptor, fsync=os.fsync):
    fsync(descriptor)
    note("sync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size)

os.fsync = sync
from nemo_gym.cli.command import command_named
program = sys.argv.pop(1)
main = command_named(program)
sys.argv[0] = program
sys.addaudithook(hook)
main()
"""
"""Runs a command, and notes what it creates, renames and brings to the disk, in that order."""


def events(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def recorded(log: Path, *command: str) -> list[list[Any]]:
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", RECORDING, str(log), *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return events(log)


def unsynced(noted: list[list[Any]], folder: Path) -> Iterator[str]:
    """What a power failure at the end could take back: names made or changed, content written, below `folder`."""
    last_sync = {event[1]: number for number, event in enumerate(noted) if event[0] == "sync"}
    synced_length: dict[str, int | None] = {}
    for number, (kind, path, *rest) in enumerate(noted):
        if kind == "sync":
            synced_length[path] = rest[0]
            continue
        if kind == "rename":
            synced_length[rest[0]] = synced_length.pop(path, None)
        for changed in map(Path, [path, *rest]):
            passing = changed.suffix in (".lock", ".tmp") or not changed.is_relative_to(folder)
            if not passing and last_sync.get(str(changed.parent), -1) < number:
                yield f"{changed}: its folder was not synced after event {number}, {kind}"
    written = {
        paths[-1] for kind, *paths in noted if kind == "create" or (kind == "rename" and paths[0].endswith(".tmp"))
    }
    for path, size in [(str(each), each.stat().st_size) for each in folder.rglob("*") if each.is_file()]:
        if path in written and synced_length.get(path) != size:
            yield f"{path}: {synced_length.get(path)} of its {size} bytes were synced"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files come from /proc")
def test_everything_that_commands_write_and_rename_is_on_disk_when_they_end(fake_run: FakeRun, tmp_path: Path) -> None:
    place = tmp_path / "results" / "of" / "today"
    write_rows(Path("in.jsonl"), rows_of(4))
    output = place / "out.jsonl"
    collecting = [
        "ng_collect_rollouts",
        f"+head_server.port={fake_run.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        f"+output_jsonl_fpath={output}",
    ]
    log = tmp_path / "events"
    for what in ("fresh", "again", "damaged"):
        if what == "damaged":
            for name in ("out.jsonl", "out_failures.jsonl", "out_materialized_inputs.jsonl", "out_manifest.json"):
                _append(place / name)
        more = ["+resume_from_cache=true"] if what == "damaged" else []
        assert list(unsynced(recorded(log, *collecting, *more), tmp_path / "results")) == [], what
    assert len(list(place.glob("*.corrupt"))) == 4
    others = [
        [
            "ng_aggregate_rollouts",
            f"+head_server.port={fake_run.port}",
            f"+input_glob={output}",
            f"+output_jsonl_fpath={place}/all/all.jsonl",
        ],
        [
            "ng_reward_profile",
            f"+rollouts_jsonl_fpath={output}",
            f"+materialized_inputs_jsonl_fpath={place}/out_materialized_inputs.jsonl",
            "+select=mean > 0",
            f"+select_output_jsonl_fpath={place}/selected/tasks.jsonl",
        ],
    ]
    for command in others:
        assert list(unsynced(recorded(log, *command), tmp_path / "results")) == [], command[0]
    assert (place / "all" / "all.jsonl").exists()
    assert (place / "selected" / "tasks.jsonl").exists()


def test_a_rollout_is_brought_to_the_disk_while_the_run_waits_for_the_next(fake_run: FakeRun, tmp_path: Path) -> None:
    async def answer(row: Row, attempt: int) -> Row:
        if row["n"]:
            await asyncio.sleep(3600)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(2))
    log, output = tmp_path / "events", tmp_path / "out.jsonl"
    options = [f"+head_server.port={fake_run.port}", "+agent_name=alpha", "+input_jsonl_fpath=in.jsonl"]
    command = [sys.executable, "-c", RECORDING, str(log), "ng_collect_rollouts", *options]
    with subprocess.Popen([*command, f"+output_jsonl_fpath={output}"], stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + WAIT_S
            while not any(event[:2] == ["sync", str(output)] and event[2] for event in events(log)):
                assert process.poll() is None, "the collector ended early"
                assert time.monotonic() < deadline_s, "it was never synced"
                time.sleep(0.05)
            assert len(lines_in(output)) == 1
        finally:
            process.kill()
