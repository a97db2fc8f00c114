"""Which files belong to an output, and which keys to its rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, lines_in, rows_of, write_rows

aggregate = command_named("aggregate_rollouts")
export = command_named("export")
reward_profile = command_named("reward_profile")


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.jsonl", "a.json"),
        ("a.json", "a.jsonl"),
        ("a", "a.jsonl"),
        ("a.txt", "a"),
        ("a.jsonl", "a_failures.jsonl"),
        ("a.jsonl", "a_materialized_inputs.jsonl"),
        ("a.v1.json", "a.v1_failures.jsonl"),
        ("a_failures.jsonl", "a.jsonl"),
        ("a_materialized_inputs.jsonl", "a.txt"),
    ],
)
@pytest.mark.parametrize("options", [[], ["+resume_from_cache=true"]], ids=["fresh", "resumed"])
def test_two_outputs_never_share_files(
    fake_run: FakeRun, collect: Collect, first: str, second: str, options: list[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    assert collect(f"+output_jsonl_fpath={first}").exit_code == 0
    before = contents()

    done = collect(f"+output_jsonl_fpath={second}", *options)

    assert done.exit_code == 2
    assert f"+output_jsonl_fpath={second} would share " in done.stderr
    assert first in done.stderr
    assert contents() == before
    assert collect(f"+output_jsonl_fpath={first}", "+resume_from_cache=true").exit_code == 0


def test_files_of_an_output_that_is_gone_or_was_renamed_are_free(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    assert collect("+output_jsonl_fpath=a.json").exit_code == 0
    Path("a.json").rename("a.jsonl")

    assert collect("+output_jsonl_fpath=a.jsonl", "+resume_from_cache=true").exit_code == 0
    assert len(fake_run.rows) == 3
    assert collect("+output_jsonl_fpath=a.jsonl").exit_code == 0
    assert len(fake_run.rows) == 6


def run(main: Any, *options: str) -> int:
    try:
        main.run(list(options))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_neither_an_aggregation_nor_a_profile_takes_the_files_of_another_output(
    fake_run: FakeRun, collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    assert collect("+output_jsonl_fpath=a.jsonl").exit_code == 0
    Path("a.json").write_bytes(Path("a.jsonl").read_bytes())
    before = contents()

    head = f"+head_server.port={fake_run.port}"
    assert run(aggregate, head, "+input_glob=a.jsonl", "+output_jsonl_fpath=a.txt") == 2
    assert "would share a_manifest.json with a.jsonl" in capsys.readouterr().err
    inputs = "+materialized_inputs_jsonl_fpath=a_materialized_inputs.jsonl"
    assert run(reward_profile, "+rollouts_jsonl_fpath=a.json", inputs) == 2
    assert "would share a_manifest.json with a.jsonl" in capsys.readouterr().err
    assert contents() == before

    assert run(aggregate, head, "+input_glob=a.jsonl", "+output_jsonl_fpath=all.jsonl") == 0
    before = contents()
    assert run(aggregate, head, "+input_glob=a.jsonl", "+output_jsonl_fpath=all.json") == 2
    assert "would share all_" in capsys.readouterr().err
    assert contents() == before


@pytest.mark.parametrize(
    "name", ["n" * 224 + ".jsonl", "ö" * 112 + ".jsonl", "n" * 300 + ".jsonl", "f" * 300 + "/out.jsonl"]
)
@pytest.mark.parametrize(
    "options", [[], ["+resume_from_cache=true"], ["+shard=1/2"]], ids=["fresh", "resumed", "shard"]
)
def test_names_that_are_too_long_are_refused_before_anything_is_written(
    fake_run: FakeRun, collect: Collect, name: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    before = contents()

    done = collect(f"+output_jsonl_fpath={name}", *options)

    assert done.exit_code == 2
    assert "+output_jsonl_fpath is too long by" in done.stderr
    assert "255" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(aggregate, "+input_glob=in.jsonl", f"+output_jsonl_fpath={name}") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert contents() == before


def test_the_longest_name_that_is_taken_works_throughout(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(3))
    name = "n" * 221 + ".jsonl"
    for options in ([], [], ["+resume_from_cache=true"]):
        assert collect(f"+output_jsonl_fpath={name}", *options).exit_code == 0
    for ending in ("_failures.jsonl", "_materialized_inputs.jsonl"):
        with Path("n" * 221 + ending).open("ab") as file:
            file.write(b"garbage")
    assert collect(f"+output_jsonl_fpath={name}", "+resume_from_cache=true", "+limit=2").exit_code in (0, 2)
    assert keys_in(Path(name)) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("length", [256, 300])
def test_a_data_set_with_a_name_that_is_too_long_is_refused(
    fake_run: FakeRun, collect: Collect, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))
    collect()
    capsys.readouterr()
    assert run(export, "+rollouts_jsonl_fpath=out.jsonl", f"+output_fpath={'n' * length}", "+format=sft") == 2
    assert f"+output_fpath is too long by {length - 255}" in capsys.readouterr().err


def test_keys_of_results_in_rows_are_dropped_with_one_warning(fake_run: FakeRun, collect: Collect) -> None:
    hiding = {"_ng_failure_class": "x", "_ng_no_persist": True, "_ng_failure_terminal": True, "_ng_made_up": 1}
    kept = {"_ng_task_index": 7, "_ng_rollout_id": "mine", "_ng_attempt_index": 4}
    rows = rows_of(5)
    rows[1] |= hiding
    rows[3] |= {**kept, "_ng_failure_class": None, "_ng_rollout_index": 9}
    write_rows(Path("in.jsonl"), rows)

    done = collect()

    assert done.exit_code == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "only results may have" in line]
    assert "2 rows of " in warning
    assert "(_ng_failure_class, _ng_failure_terminal, _ng_made_up, _ng_no_persist)" in warning
    sent = {row["n"]: row for row in fake_run.rows}
    assert not hiding.keys() & sent[1].keys()
    assert {key: sent[3][key] for key in kept} == kept
    assert "_ng_failure_class" not in sent[3]
    assert sent[3]["_ng_rollout_index"] == 0
    assert len(lines_in(Path("out.jsonl"))) == 5
    assert json.loads(Path("out_manifest.json").read_bytes())["counts"]["missing"] == 0
    assert not any(set(row) & set(hiding) for row in lines_in(Path("out_materialized_inputs.jsonl")))
