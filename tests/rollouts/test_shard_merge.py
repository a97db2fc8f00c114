import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.combine import merge as shard_merge
from nemo_gym.combine.merge import DuplicateRolloutError, OnDuplicate
from nemo_gym.errors import ConfigError
from nemo_gym.runs import index as record_index
from nemo_gym.runs.index import RecordGoneError, RecordIndex


def record(task: Any, rollout: Any, agent: str = "alpha", **fields: Any) -> bytes:
    return json.dumps(
        {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": agent}, **fields}
    ).encode()


def write(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read(*paths: Path) -> RecordIndex:
    index = RecordIndex(paths)
    index.read()
    return index


def merge(index: RecordIndex, output: Path, on_duplicate: OnDuplicate = "error") -> list[bytes]:
    merged = shard_merge.settle_duplicates(index, on_duplicate)
    shard_merge.write_merged(index, merged.order, output)
    return output.read_bytes().splitlines()


def test_records_come_out_in_key_order_byte_for_byte(tmp_path: Path) -> None:
    lines = [record(task, rollout, text="é" * task) for task in (0, 1, 2, 10) for rollout in range(3)]
    a = write(tmp_path / "a.jsonl", [*lines[6:9], lines[1]])
    b = write(tmp_path / "b.jsonl", [lines[0], *lines[2:6], *lines[:8:-1]])

    assert merge(read(a, b), tmp_path / "out.jsonl") == lines


def test_blank_lines_spaces_a_byte_order_mark_and_foreign_line_ends_are_left_behind(tmp_path: Path) -> None:
    first, second = record(0, 0), record(1, 0)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + second + b"\r\n\n  " + first + b" ")

    assert merge(read(tmp_path / "a.jsonl"), tmp_path / "out.jsonl") == [first, second]


def test_long_stretches_are_copied_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [record(task, 0, text="x" * task) for task in range(50)]
    shard = write(tmp_path / "a.jsonl", lines)
    monkeypatch.setattr(shard_merge, "_STRETCH_BYTES", 200)

    assert merge(read(shard), tmp_path / "out.jsonl") == lines


def test_more_shards_than_may_be_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "_MOST_OPEN_FILES", 2)
    shards = [write(tmp_path / f"{n}.jsonl", [record(n + 5, 0), record(n, 0)]) for n in range(5)]
    before = len(list(Path("/proc/self/fd").iterdir()))

    merged = merge(read(*shards), tmp_path / "out.jsonl")

    assert [json.loads(line)["_ng_task_index"] for line in merged] == list(range(10))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_identical_duplicates_are_dropped_and_counted_however_they_are_written(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [record(0, 0, reward=1.0), record(0, 1)])
    b = write(tmp_path / "b.jsonl", [record(0, 0, reward=1.0)])
    c = write(
        tmp_path / "c.jsonl",
        [b'{"reward": 1.0,  "agent_ref":{"name":"alpha"},"_ng_rollout_index":0,"_ng_task_index":0}'],
    )
    index = read(a, b, c)

    merged = shard_merge.settle_duplicates(index, "error")

    assert (merged.identical, merged.different, len(merged.order)) == (2, 0, 2)
    assert merge(index, tmp_path / "out.jsonl") == [record(0, 0, reward=1.0), record(0, 1)]


def test_different_records_of_one_rollout_are_an_error_that_names_both_files_and_lines(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [record(0, 1), record(3, 2, reward=1.0)])
    b = write(tmp_path / "b.jsonl", [b"", record(3, 2, reward=0.0)])

    with pytest.raises(DuplicateRolloutError) as error:
        merge(read(a, b), tmp_path / "out.jsonl")

    assert isinstance(error.value, ConfigError)
    assert f"rollout (3, 2): {a}, line 2 and {b}, line 2" in str(error.value)
    assert "+on_duplicate=first" in str(error.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_conflict_between_agents_says_so(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [record(0, 0, "alpha"), record(0, 0, "beta")])

    with pytest.raises(DuplicateRolloutError, match="aggregate runs of different agents separately"):
        merge(read(shard), tmp_path / "out.jsonl")


def test_many_conflicts_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [record(task, 0, n=n) for n in range(2) for task in range(25)])

    with pytest.raises(DuplicateRolloutError, match=r"^25 rollouts[\s\S]*\(9, 0\)[\s\S]*and 15 more"):
        merge(read(shard), tmp_path / "out.jsonl")


@pytest.mark.parametrize(("policy", "kept"), [("first", 1), ("last", 3)])
def test_the_first_or_the_last_of_different_records_can_be_kept(tmp_path: Path, policy: OnDuplicate, kept: int) -> None:
    shards = [write(tmp_path / f"{n}.jsonl", [record(0, 0, n=n), record(1, n)]) for n in (1, 2, 3)]
    index = read(*shards)

    lines = [json.loads(line) for line in merge(index, tmp_path / "out.jsonl", policy)]

    assert [line.get("n") for line in lines] == [kept, None, None, None]
    assert shard_merge.settle_duplicates(index, policy).different == 2


def test_a_torn_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    shard = tmp_path / "a.jsonl"
    shard.write_bytes(record(1, 0) + b"\n" + record(0, 0) + b"\n" + record(2, 0)[:-5])
    index = read(shard)

    assert merge(index, tmp_path / "out.jsonl") == [record(0, 0), record(1, 0)]
    assert [str(tail) for tail in index.torn] == [f"{shard} ends in the middle of line 3; its 72 bytes are left out"]


def test_a_last_line_without_its_newline_is_used_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(record(1, 0) + b"\n" + record(0, 0))

    assert merge(read(tmp_path / "a.jsonl"), tmp_path / "out.jsonl") == [record(0, 0), record(1, 0)]


@pytest.mark.parametrize(
    ("line", "problem"), [(b"{nonsense}", "not valid JSON"), (b"[1]", "expected a JSON object, found an array")]
)
def test_any_other_line_that_is_no_record_is_an_error_that_names_it(tmp_path: Path, line: bytes, problem: str) -> None:
    shard = write(tmp_path / "a.jsonl", [record(0, 0), line, record(1, 0)])

    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 2: {problem}"):
        read(shard)


def test_indices_that_are_no_numbers_and_records_without_any_come_last(tmp_path: Path) -> None:
    lines = [record(5, 0), record("b", 0), record("a", 1), record("a", 0), b'{"reward": 1.0}', record(2, 0), b"{}"]
    index = read(write(tmp_path / "a.jsonl", lines))

    expected = [lines[place] for place in (5, 0, 3, 2, 1, 4, 6)]
    assert merge(index, tmp_path / "out.jsonl") == expected
    assert index.without_key == 2


def test_duplicates_are_found_among_text_indices_too(tmp_path: Path) -> None:
    index = read(write(tmp_path / "a.jsonl", [record("x", 0), record("x", 0), record("x", 1)]))

    assert shard_merge.settle_duplicates(index, "error").identical == 1


def test_half_characters_survive(tmp_path: Path) -> None:
    line = b'{"_ng_task_index":0,"_ng_rollout_index":0,"text":"\\ud83d"}'
    shards = [write(tmp_path / f"{n}.jsonl", [line]) for n in range(2)]

    assert merge(read(*shards), tmp_path / "out.jsonl") == [line]


def test_a_shard_that_shrinks_while_it_is_read_is_an_error_and_leaves_the_output_alone(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [record(0, 0), record(1, 0)])
    index = read(shard)
    (tmp_path / "out.jsonl").write_text("before\n")
    os.truncate(shard, 10)

    with pytest.raises(RecordGoneError, match=r"a\.jsonl became shorter"):
        merge(index, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "before\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_each_record_is_handed_over_once_with_its_agent(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.jsonl", [record(1, 0, "beta"), record(0, 0), b'{"_ng_task_index":3}'])
    seen: list[tuple[int, str | None, Any]] = []

    RecordIndex([shard]).read(lambda number, agent, value: seen.append((number, agent, value["_ng_task_index"])))

    assert seen == [(0, "beta", 1), (1, "alpha", 0), (2, None, 3)]


def test_records_that_differ_in_their_times_alone_are_the_same(tmp_path: Path) -> None:
    first, again = (record(0, 0, reward=1.0, _ng_timing={"duration_s": duration}) for duration in (1.5, 2.5))
    a, b = write(tmp_path / "a.jsonl", [first]), write(tmp_path / "b.jsonl", [again])

    assert shard_merge.settle_duplicates(read(a, b), "error").identical == 1
    assert merge(read(a, b), tmp_path / "out.jsonl") == [first]
