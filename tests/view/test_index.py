import os
import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.select import Expression, SelectError
from nemo_gym.view.kept_index import FileIndex
from nemo_gym.view.table import BUILT_IN, RunTable
from tests.view.files import failure, lines, rollout, said, write_run

CALL = {"type": "function_call", "name": "search", "call_id": "1", "arguments": "{}"}
DEEP = b"[" * 100_000 + b"]" * 100_000
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "found"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def opened(paths: RolloutPaths, cache: Path | None) -> RunTable:
    table = RunTable(paths, cache)
    assert table.refresh()
    return table


def ids(table: RunTable, where: str | None = None, sort: str | None = None, **more: Any) -> list[str]:
    return [table.id_of(int(row)) for row in table.choose(where, sort, **more).rows]


def test_what_is_known_of_a_rollout(tmp_path: Path, cache: Path) -> None:
    record = rollout(
        3, 1, 0.5, CALL, OUTPUT, CALL, OUTPUT, said("done"), level="hard", verifier={"score": 2, "deep": {"x": True}}
    )
    record["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    record["_ng_timing"] = {"started_at": "2026-01-01T00:00:00Z", "duration_s": 2.5}
    table = opened(write_run(tmp_path, [b"", record], [failure(3, 1), failure(4, 0, "connect")]), cache)

    fields = ["level", "verifier.score", "verifier.deep.x", "record.level"]
    assert table.shown(0, fields) == {
        "id": "r2",
        "task": 3,
        "repeat": 1,
        "agent": "agent_a",
        "model": "model_a",
        "cost_usd": None,
        "reward": 0.5,
        "outcome": "scored",
        "failure_class": None,
        "attempts": 2,
        "incomplete": True,
        "incomplete_reason": "max_output_tokens",
        "tools": ["search"],
        "tool_calls": 2,
        "steps": 3,
        "input_tokens": 10,
        "output_tokens": 5,
        "total_tokens": 15,
        "duration_s": 2.5,
        "started_at": "2026-01-01T00:00:00.000Z",
        "ended_at": "2026-01-01T00:00:02.500Z",
        "line": 2,
        "fields": {"level": "hard", "verifier.score": 2, "verifier.deep.x": True},
    }
    failed = table.shown(1)
    assert (failed["id"], failed["outcome"], failed["failure_class"], failed["attempts"]) == (
        "f2",
        "failed",
        "connect",
        1,
    )
    assert (failed["duration_s"], failed["reward"], failed["tools"]) == (60, None, [])
    assert len(table) == 2
    assert table.attempts_of(0) == [0]


def test_rows_read_from_columns_are_those_read_from_records(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(write_run(tmp_path, [rollout(1, 0, True, CALL, x=1, y=0.5), rollout("a", 1, None), b"{]"]), cache)
    from_records = [table.shown(row, ["x", "y"]) for row in range(3)]
    monkeypatch.setattr("nemo_gym.view.table._SMALL_BYTES", 0)

    assert [table.shown(row, ["x", "y"]) for row in range(3)] == from_records
    assert [row["outcome"] for row in from_records] == ["scored", "unscored", "damaged"]


def test_only_what_was_appended_is_read(tmp_path: Path, cache: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0), rollout(1, 0)], [failure(2, 0)])
    table = opened(paths, cache)
    assert ids(table) == ["r1", "r2", "f1"]
    table.close()
    third = lines([rollout(2, 0, 0.0, late=1)])
    with paths.rollouts.open("ab") as file:
        file.write(third[:-20])

    table = RunTable(paths, cache)
    assert len(table) == 3
    table.refresh()
    assert ids(table) == ["r1", "r2", "f1"]
    with paths.rollouts.open("ab") as file:
        file.write(third[-20:])
    table.refresh()
    assert ids(table) == ["r1", "r2", "r3"]
    assert ids(table, "late == 1 and attempts == 2") == ["r3"]
    assert table.rollouts.replaced == 0


def test_a_file_that_no_longer_begins_as_it_did_is_read_anew(tmp_path: Path, cache: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0), rollout(1, 0)])
    table = opened(paths, cache)
    with paths.rollouts.open("r+b") as file:
        file.write(b"#")
        file.seek(0, os.SEEK_END)
        file.write(lines([rollout(2, 0)])[:-1])
    table.refresh()

    assert table.rollouts.replaced == 1
    assert [table.shown(row)["outcome"] for row in range(3)] == ["damaged", "scored", "scored"]


def test_a_file_that_grows_is_followed_across_processes(tmp_path: Path, cache: Path) -> None:
    paths = write_run(tmp_path, [])
    one, other = RunTable(paths, cache), RunTable(paths, cache)
    for task in range(30):
        with paths.rollouts.open("ab") as file:
            file.write(lines([rollout(task, 0, task / 30, **{f"only_{task % 3}": task})]))
        table = (one, other)[task % 2]
        table.refresh()
        assert ids(table, f"only_{task % 3} == {task}") == [f"r{task + 1}"]
        if task % 5 == 0:
            table.rollouts._store()
    for table in (one, other):
        table.refresh()
        assert ids(table) == [f"r{line}" for line in range(1, 31)]
        assert table.rollouts.replaced == 0
        table.close()
    assert ids(opened(paths, cache)) == [f"r{line}" for line in range(1, 31)]


def test_many_readers_and_writers_at_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.view.kept_index._PIECE_ROWS", 50)
    monkeypatch.setattr("nemo_gym.view.kept_index._SMALL_ROWS", 20)
    paths = write_run(tmp_path, [rollout(task, 0, task % 2) for task in range(1000)])
    problems: list[BaseException] = []

    def read() -> None:
        try:
            table = opened(paths, cache)
            assert len(ids(table, "reward == 1")) == 500
            table.close()
        except BaseException as error:  # noqa: BLE001 -- shown by the test
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_another_file_under_the_same_name_is_read_anew(tmp_path: Path, cache: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0), rollout(1, 0)])
    opened(paths, cache).close()
    paths.rollouts.unlink()
    write_run(tmp_path, [rollout(7, 0), rollout(8, 0), rollout(9, 0)])
    table = opened(paths, cache)

    assert [table.shown(row)["task"] for row in range(len(table))] == [7, 8, 9]
    paths.rollouts.write_bytes(lines([rollout(5, 0)]))
    table.refresh()
    assert [table.shown(row)["task"] for row in range(len(table))] == [5]
    paths.rollouts.unlink()
    table.refresh()
    assert len(table) == 0


def test_a_database_that_is_none_is_made_anew(tmp_path: Path, cache: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0)])
    opened(paths, cache).close()
    (database,) = [file for file in cache.iterdir() if sqlite3.connect(file).execute("SELECT * FROM piece").fetchall()]
    database.write_bytes(b"no database" * 1000)

    assert len(opened(paths, cache)) == 1
    table = opened(paths, cache)
    with paths.rollouts.open("ab") as file:
        file.write(lines([rollout(1, 0)]))
    database.write_bytes(b"no database" * 1000)  # while it is in use
    table.refresh()
    assert ids(table) == ["r1", "r2"]
    paths.rollouts.write_bytes(lines([rollout(0, 0)]))
    assert len(opened(paths, tmp_path / "rollouts.jsonl" / "no folder")) == 1
    assert len(opened(paths, None)) == 1


def random_record(chance: random.Random, number: int) -> Any:
    if chance.random() < 0.05:
        return chance.choice([b"[1, 2]", b"{broken", b'"text"', b"5"])
    values: list[Any] = [None, True, False, 0, 1, 2.5, -3, "a", "b", "hard", 10**20, {"x": 1}, [1]]
    more = {name: chance.choice(values) for name in ("level", "mixed") if chance.random() < 0.8}
    record = rollout(number // 3, number % 3, chance.choice([0.0, 1.0, 0.5, None, "bad", True]), **more)
    record["text"] = chance.choice(["a", "b", f"unique {number}"])
    record["number"] = chance.choice([1, 2.5, -number, number])
    return record


EXPRESSIONS = [
    "reward > 0.5",
    "0 < reward < 1",
    "not reward == 1",
    "level == 'hard' or mixed == 2.5",
    "mixed == true",
    "mixed",
    "not mixed",
    "mixed != null and level == null",
    "mixed in [1, 'a', null]",
    "mixed not in [1, 'a']",
    "'a' in level",
    "text > 'b'",
    "'b' < text",
    "text == 'a' and number >= 2",
    "-number < -100",
    "number == reward",
    "number < task or text == level",
    "outcome == 'damaged'",
    "outcome in ['scored', 'failed'] and not incomplete",
    "'search' in tools",
    "mixed > 1",
    "mixed == 100000000000000000000",
    "true and level != 3",
]


@pytest.mark.parametrize("seed", range(3))
def test_conditions_on_columns_are_conditions_on_rows(
    tmp_path: Path, cache: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.view.kept_index._PIECE_ROWS", 40)
    monkeypatch.setattr("nemo_gym.view.kept_index._SMALL_ROWS", 10)
    chance = random.Random(seed)
    records = [random_record(chance, number) for number in range(150)]
    failures = [failure(number // 3, number % 3) for number in range(100, 200, 7)]
    table = opened(write_run(tmp_path, records, failures), cache)
    names = [*BUILT_IN, "level", "mixed", "text", "number"]
    shown = [{name: table.column(name).at(row) for name in names} for row in range(len(table))]
    for text in EXPRESSIONS:
        expected = [row for row in range(len(table)) if Expression.parse(text).holds(shown[row].get)]
        assert table.matching(table.understand(text)).tolist() == expected, text


@pytest.mark.parametrize("sort", ["-reward", "text", "-text", "mixed,-number", "level,reward,-task", "task", "-line"])
def test_a_page_is_a_part_of_the_whole_order(tmp_path: Path, cache: Path, sort: str) -> None:
    chance = random.Random(5)
    table = opened(write_run(tmp_path, [random_record(chance, number) for number in range(200)]), cache)
    whole = ids(table, None, sort)

    pages = [name for offset in range(0, 200, 30) for name in ids(table, None, sort, limit=30, offset=offset)]
    assert pages == whole
    names = [name.removeprefix("-") for name in sort.split(",")]
    rows = [
        {name: table.column(name).at(table.row_of(each) or 0) for name in (*names, "task", "repeat")} for each in whole
    ]
    nulls = [row[names[0]] is None for row in rows]
    assert nulls == sorted(nulls)
    first = [row[names[0]] for row in rows if isinstance(row[names[0]], str)]
    assert first == sorted(first, reverse=sort.startswith("-"))
    if sort == "-reward":
        ties = [(row["task"] is None, row["task"] or 0, row["repeat"] or 0) for row in rows if row["reward"] == 1]
        assert len(ties) > 20
        assert ties == sorted(ties)


def test_names_that_nobody_has_are_refused(tmp_path: Path, cache: Path) -> None:
    table = opened(write_run(tmp_path, [rollout(0, 0, task_level=3, steps=9)]), cache)
    with pytest.raises(SelectError, match=r"position 15: there is no 'leve'"):
        table.choose("reward > 0 or leve == 1")
    with pytest.raises(SelectError, match=r"sort: there is no 'rewrd' \(did you mean 'reward'\?\)"):
        table.choose(None, "-rewrd")
    assert ids(table, "record.steps == 9 and steps == 1") == ["r1"]


def test_times_are_compared_with_texts(tmp_path: Path, cache: Path) -> None:
    table = opened(write_run(tmp_path, [rollout(0, 0)], [failure(1, 0)]), cache)
    assert ids(table, "started_at < '2026-01-02' and ended_at >= '2026-01-01T00:01:00Z'") == ["f1"]
    assert ids(table, "started_at == null") == ["r1"]


def test_hostile_lines_are_rows_all_the_same(tmp_path: Path, cache: Path) -> None:
    records = [
        b'{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": NaN, "x": Infinity}',
        b'{"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 1, "x": "\\ud800 half", "deep": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}",
        b'{"_ng_task_index": {"a": [1]}, "_ng_rollout_index": [2], "reward": 1e999}',
        b'{"_ng_task_index": 123456789012345678901234567890, "_ng_rollout_index": -1, "reward": true}',
        b"\xff\xfe not text",
        rollout(2, 0, 1, {"type": "unknown thing"}, {"type": 5}, {"no": "type"}, big="x" * 1_000_000),
        {
            "response": [],
            "agent_ref": "me",
            "_ng_task_index": None,
            "_ng_timing": "soon",
            "a": {str(i): i for i in range(2000)},
        },
    ]
    table = opened(write_run(tmp_path, records), cache)

    assert len(table) == 7
    shown = [table.shown(row) for row in range(7)]
    assert [row["outcome"] for row in shown] == [
        "unscored",
        "scored",
        "unscored",
        "scored",
        "damaged",
        "scored",
        "unscored",
    ]
    assert ids(table, "x == null or 'half' in x", "x")
    assert len(table.fields()) <= 500
    again = opened(write_run(tmp_path, records), cache)
    assert ids(again, None, "-task") == ids(table, None, "-task")


def test_an_index_reads_as_much_as_it_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.view.kept_index._PIECE_ROWS", 10)
    paths = write_run(tmp_path, [rollout(task, 0) for task in range(100)])
    index = FileIndex(paths.rollouts, cache)
    assert not index.refresh(most_bytes=1)
    assert index.rows == 10
    assert index.refresh()
    assert index.rows == 100
