import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from nemo_gym.token_id_capture.store import TokenCaptureStore, make_token_store, validate_rollout_id
from tests.token_id_capture.calls import call


@pytest.fixture
def store(tmp_path: Path) -> TokenCaptureStore:
    return TokenCaptureStore(tmp_path / "tokens")


def test_entries_are_kept_in_order_and_the_same_one_only_once(store: TokenCaptureStore) -> None:
    first, second = call("a", [1], [2]), call("b", [1, 2, 3], [4])
    for entry in (first, second, first):
        asyncio.run(store.put(entry))

    assert store.read_entries("3-1") == [first, second]
    assert [json.loads(line)["model_call_id"] for line in store.path_for("3-1").read_text().splitlines()] == ["a", "b"]
    assert not store.is_incomplete("3-1")


def test_another_entry_of_the_same_call_is_refused_and_makes_the_rollout_incomplete(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    with pytest.raises(ValueError, match="has another entry of call a already"):
        store.append(call("a", [1], [9]))

    assert store.is_incomplete("3-1")
    assert store.freeze_now("3-1").incomplete
    assert len(store.read_entries("3-1")) == 1


def test_a_frozen_rollout_takes_nothing_more_and_freezing_again_gives_the_same(store: TokenCaptureStore) -> None:
    entry = call("a", [1], [2])
    store.append(entry)
    snapshot = asyncio.run(store.freeze("3-1"))

    assert snapshot.entries == (entry,)
    assert not snapshot.incomplete
    assert asyncio.run(store.freeze("3-1")) == snapshot
    store.append(entry)  # the same again is no change
    with pytest.raises(RuntimeError, match="came too late"):
        store.append(call("b", [1], [2]))
    with pytest.raises(RuntimeError, match="came too late"):
        asyncio.run(store.begin_call("3-1", "b"))


def test_a_call_that_began_and_left_no_entry_makes_the_rollout_incomplete(store: TokenCaptureStore) -> None:
    asyncio.run(store.begin_call("3-1", "a"))
    asyncio.run(store.begin_call("3-1", "b"))
    store.append(call("a", [1], [2]))
    assert store.freeze_now("3-1").incomplete
    other = call("a", [1], [2], rollout_id="4-0")
    asyncio.run(store.begin_call("4-0", "a"))
    store.append(other)
    assert not store.freeze_now("4-0").incomplete


def test_a_line_torn_by_a_crash_is_cut_off_and_an_earlier_bad_one_is_an_error(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    with store.path_for("3-1").open("ab") as file:
        file.write(b'{"model_call_id": "b", "prom')
    store.append(call("c", [1], [2]))
    assert [entry.model_call_id for entry in store.read_entries("3-1")] == ["a", "c"]

    with store.path_for("3-1").open("ab") as file:
        file.write(b'{"model_call_id": "d"}\n')
    with pytest.raises(ValueError, match=r"tokens.jsonl has a line that is no entry"):
        store.freeze_now("3-1")


def test_a_line_whose_index_was_lost_in_a_crash_still_counts(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    known = store.state_path_for("3-1").read_bytes()
    store.append(call("b", [1], [2, 3]))
    store.state_path_for("3-1").write_bytes(known)

    store.append(call("b", [1], [2, 3]))
    assert [entry.model_call_id for entry in store.read_entries("3-1")] == ["a", "b"]
    with pytest.raises(ValueError, match="another entry of call b"):
        store.append(call("b", [1], [9]))


def test_dropping_wants_the_latest_snapshot_and_leaves_a_tombstone(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    snapshot = store.freeze_now("3-1")

    def drop(**changed: object) -> bool:
        identity = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version, **changed}
        return asyncio.run(store.drop("3-1", **identity))  # type: ignore[arg-type]

    assert not drop(snapshot_id="other")
    assert not drop(version=snapshot.version + 1)
    assert store.path_for("3-1").exists()
    assert drop()
    assert drop()
    assert not store.path_for("3-1").exists()
    with pytest.raises(RuntimeError, match="is retired"):
        store.append(call("b", [1], [2]))
    with pytest.raises(RuntimeError, match="is retired"):
        asyncio.run(store.mark_incomplete("3-1", "b"))


def test_a_call_missed_after_freezing_keeps_the_snapshot_from_being_dropped(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    snapshot = store.freeze_now("3-1")
    asyncio.run(store.mark_incomplete("3-1", "late"))

    assert not asyncio.run(store.drop("3-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version))
    assert store.freeze_now("3-1").incomplete
    assert store.incomplete_path_for("3-1").read_text() == "late\n"


def test_a_rollout_that_is_made_again_begins_anew(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    old = store.freeze_now("3-1")
    store.delete("3-1")
    store.append(call("a", [1], [7]))
    new = store.freeze_now("3-1")

    assert new.entries[0].generation_token_ids == [7]
    assert not asyncio.run(store.drop("3-1", snapshot_id=old.snapshot_id, version=old.version))
    assert sorted(path.name for path in store.root.iterdir()) == [
        "3-1.tokens.jsonl",
        "3-1.tokens.lock",
        "3-1.tokens.state.json",
    ]


def test_tombstones_are_swept_when_they_are_old(store: TokenCaptureStore) -> None:
    for rollout_id in ("1-0", "2-0"):
        store.append(call("a", [1], [2], rollout_id=rollout_id))
    snapshot = store.freeze_now("1-0")
    store.freeze_now("2-0")
    assert asyncio.run(store.drop("1-0", snapshot_id=snapshot.snapshot_id, version=snapshot.version))

    assert store.sweep_retired(3600) == 0
    past = time.time() - 7200
    for path in store.root.iterdir():
        os.utime(path, (past, past))
    assert store.sweep_retired(3600) == 1
    assert not [path for path in store.root.iterdir() if path.name.startswith("1-0")]
    assert store.path_for("2-0").exists()


@pytest.mark.parametrize("rollout_id", ["", "a/b", "a b", "a\n", "ä"])
def test_ids_that_name_no_file_are_refused(store: TokenCaptureStore, rollout_id: str) -> None:
    with pytest.raises(ValueError, match="Invalid rollout id"):
        validate_rollout_id(rollout_id)
    with pytest.raises(ValueError, match="Invalid rollout id"):
        store.path_for(rollout_id)


def test_a_store_is_made_where_the_configuration_says(tmp_path: Path) -> None:
    block = {"enabled": True, "dir": str(tmp_path / "a")}
    made = make_token_store({"token_id_capture": block})
    assert made is not None
    assert made.root == tmp_path / "a"
    fallen_back = make_token_store({"token_id_capture": {"enabled": True}, "model_call_capture_dir": str(tmp_path)})
    assert fallen_back is not None
    assert fallen_back.root == tmp_path
    assert make_token_store({"token_id_capture": {**block, "enabled": False}}) is None
    assert make_token_store({}) is None


def _append_many(root: Path, worker: int) -> None:
    store = TokenCaptureStore(root)
    for number in range(20):
        store.append(call(f"{worker}-{number}", [worker], [number]))
        store.append(call("shared", [0], [0]))


def test_several_processes_write_to_one_rollout(store: TokenCaptureStore) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(store.root, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0

    ids = [entry.model_call_id for entry in store.read_entries("3-1")]
    assert sorted(ids) == sorted(["shared", *(f"{worker}-{number}" for worker in range(3) for number in range(20))])
