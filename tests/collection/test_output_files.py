"""What lies where a run wants to write: files of an earlier run make room, everything else stays as it is."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.collection.conftest import Collect

ROWS = '{"responses_create_params": {"input": "a"}}\n{"responses_create_params": {"input": "b"}}\n'
RECORD = '{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "response": {}}\n'
FAILURE = '{"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_failure_class": "timeout"}\n'
SENT = '{"_ng_task_index": 0, "_ng_rollout_index": 0, "responses_create_params": {"input": "a"}}\n'
STRANGERS = {
    "out.jsonl": ["Chapter 1.\nIn the beginning\n", ROWS, "[1, 2]", "\0\1\2", '{"name": "out"}\n'],
    "out_failures.jsonl": ["What I failed at.\n", '{"failures": 3}\n'],
    "out_materialized_inputs.jsonl": ["inputs, typed by hand\n"],
    "out_aggregate_metrics.json": ['{"my": "metrics"}\n', "[1, 2, 3]\n"],
    "out_manifest.json": ['{"short_name": "an app", "icons": []}\n'],
}


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _link_to_a_run(path: Path) -> None:
    Path("results.jsonl").write_text(RECORD)
    path.symlink_to("results.jsonl")


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": _socket,
    "a symbolic link": _link_to_a_run,
}


@pytest.fixture(autouse=True)
def _rows() -> None:
    Path("in.jsonl").write_text(ROWS)


def _names() -> set[str]:
    return {path.name for path in Path().iterdir()}


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, many in STRANGERS.items() for each in many])
def test_what_is_no_file_of_a_run_is_refused_and_untouched(collect: Collect, name: str, content: str) -> None:
    Path(name).write_text(content)
    before = _names()

    done = collect()

    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert name in line
    assert "no file of an earlier run and stays as it is: name another output" in line
    assert Path(name).read_text() == content
    assert _names() == before


@pytest.mark.parametrize("what", ODD_FILES)
@pytest.mark.parametrize("name", ["out.jsonl", "out_manifest.json"])
def test_what_is_no_regular_file_is_refused_and_untouched(collect: Collect, name: str, what: str) -> None:
    ODD_FILES[what](Path(name))
    before, mode = _names(), Path(name).lstat().st_mode

    done = collect()

    assert done.exit_code == 2
    assert f"is {what}" in done.stderr
    assert (_names(), Path(name).lstat().st_mode) == (before, mode)


@pytest.mark.parametrize("option", ["+resume_from_cache=false", "+resume_from_cache=true"])
def test_a_device_is_no_output(collect: Collect, option: str) -> None:
    done = collect("++output_jsonl_fpath=/dev/full", option)

    assert done.exit_code == 2
    assert "/dev/full is a device" in done.stderr
    assert Path("/dev/full").is_char_device()
    assert not Path("/dev/full.lock").exists()


def test_a_run_can_be_resumed_through_a_link(collect: Collect) -> None:
    assert collect("++output_jsonl_fpath=results.jsonl").exit_code == 0
    for path in list(Path().glob("results*")):
        Path(path.name.replace("results", "out")).hardlink_to(path)
    Path("out.jsonl").unlink()
    Path("out.jsonl").symlink_to("results.jsonl")
    Path("in.jsonl").write_text(ROWS)

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0
    assert Path("out.jsonl").is_symlink()


def test_files_of_an_earlier_run_are_recognised_without_its_manifest(collect: Collect) -> None:
    Path("out.jsonl").write_text('{"torn": \n' + RECORD)
    Path("out_failures.jsonl").write_text(FAILURE)
    Path("out_materialized_inputs.jsonl").write_text(SENT)
    Path("out_aggregate_metrics.json").write_text('[\n  {"agent_ref": {"name": "a"}, "agent_metrics": {}}\n]')

    assert collect().exit_code == 0

    (previous,) = Path("out.previous").iterdir()
    assert len(list(previous.iterdir())) == 4
    assert RECORD in (previous / "out.jsonl").read_text()


def test_damaged_files_are_recognised_by_their_manifest(collect: Collect) -> None:
    assert collect().exit_code == 0
    Path("out.jsonl").write_bytes(bytes(1000))

    assert collect().exit_code == 0

    (previous,) = Path("out.previous").iterdir()
    assert (previous / "out.jsonl").read_bytes() == bytes(1000)


def test_an_empty_file_makes_room(collect: Collect) -> None:
    Path("out.jsonl").touch()
    Path("out_manifest.json").touch()

    assert collect().exit_code == 0
    assert len(Path("out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_input_without_rows_is_an_error_and_moves_nothing(collect: Collect, content: str) -> None:
    assert collect().exit_code == 0
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file() and path.name != "in.jsonl"}
    Path("in.jsonl").write_text(content)

    done = collect()

    assert done.exit_code == 2
    assert "in.jsonl has no rows, so there is nothing to roll out" in done.stderr
    assert {path: path.read_bytes() for path in Path().iterdir() if path.name != "in.jsonl"} == before


def test_a_shard_without_rows_says_so(collect: Collect) -> None:
    done = collect("+shard=3/3")

    assert done.exit_code == 0
    assert "Shard 3/3 has none of the 2 rows" in done.stderr


def test_equal_rows_are_announced_with_the_way_to_keep_them_apart(collect: Collect) -> None:
    Path("in.jsonl").write_text(ROWS * 3 + '{"responses_create_params": {"input": "c"}}\n')

    done = collect("+num_repeats=2")

    assert done.exit_code == 0
    (line,) = [line for line in done.stderr.splitlines() if "equal to earlier ones" in line]
    assert "4 of the 7 rows of" in line
    assert "3 tasks" in line
    assert "_ng_task_index" in line
    Path("in.jsonl").write_text(
        "".join(json.dumps(json.loads(row) | {"_ng_task_index": 7}) + "\n" for row in [ROWS.splitlines()[0]] * 2)
    )
    assert "equal to earlier ones" not in collect("+num_repeats=2").stderr


def test_pass_at_k_is_of_the_repeats_asked_for_however_often_a_row_is_there(collect: Collect) -> None:
    Path("in.jsonl").write_text(ROWS + ROWS.splitlines(keepends=True)[0] * 3)

    printed = collect("+num_repeats=2").stdout

    assert "pass@2 " in printed
    assert "pass@1[avg-of-2]" in printed
    assert "pass@8" not in printed
    (entry,) = json.loads(Path("out_aggregate_metrics.json").read_text())
    assert (entry["coverage"]["repeats"], entry["coverage"]["pass_at_k"]["k"]) == (2, 2)
    assert len(entry["coverage"]["tasks_per_k"]) == 8
