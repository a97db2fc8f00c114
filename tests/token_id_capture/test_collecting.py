"""What a run does about the tokens of its rollouts, with real files: whose they are, and when they are forgotten."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.store import RolloutStore
from nemo_gym.runs.token_ids import TokenDelivery
from nemo_gym.token_id_capture.store import TokenCaptureStore
from tests.token_id_capture.calls import call

ROW = {"_ng_task_index": 7, "_ng_rollout_index": 0, "agent_ref": {"name": "cli"}}


def delivery(tmp_path: Path, **settings: Any) -> TokenDelivery:
    block = {"enabled": True, "all_agents": True, "dir": str(tmp_path / "tokens"), **settings}
    made = TokenDelivery.of({"token_id_capture": block}, None)
    assert made is not None
    return made


def result() -> dict[str, Any]:
    return {"reward": 1.0, "response": {"output": [{"type": "message", "content": []}]}}


async def made_by(tokens: TokenDelivery, row: dict[str, Any], kept: TokenCaptureStore, rollout_id: str) -> None:
    """One attempt at a row, with one model call."""

    async def post(row: dict[str, Any]) -> None:
        kept.append(call("call", [1, 2], [3], rollout_id=rollout_id))

    await tokens.begin(post)(row)


def test_what_was_kept_is_forgotten_when_its_line_is_on_the_disk_and_not_before(tmp_path: Path) -> None:
    may_sync = threading.Event()

    def sync(descriptor: int) -> None:
        assert may_sync.wait(60)
        os.fsync(descriptor)

    async def run() -> None:
        tokens, kept = delivery(tmp_path), TokenCaptureStore(tmp_path / "tokens")
        paths = RolloutPaths(tmp_path / "out.jsonl")
        async with tokens:
            with RolloutStore(paths, sync=sync, sync_after_s=0.01) as store:
                await made_by(tokens, ROW, kept, "7-0")
                record = result()
                await tokens.put_onto(ROW, record)
                store.append(ROW, record)
                assert await tokens.appended(ROW, store) is None
                assert (store.num_written, store.num_synced) == (1, 0)
                assert kept.path_for("7-0").exists()
                may_sync.set()
            assert store.num_synced == 1
            assert kept.path_for("7-0").exists()
        assert not kept.path_for("7-0").exists()
        assert record["response"]["output"][0]["generation_token_ids"] == [3]

    asyncio.run(run())


def test_an_attempt_begins_with_nothing_and_has_files_of_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        tokens, kept = delivery(tmp_path), TokenCaptureStore(tmp_path / "tokens")
        again = {**ROW, "_ng_attempt_index": 2}
        kept.append(call("old", [9], [9], rollout_id="7-0-a2"))
        kept.append(call("first", [8], [8], rollout_id="7-0"))
        await made_by(tokens, again, kept, "7-0-a2")
        record = result()
        await tokens.put_onto(again, record)
        assert record["_ng_token_capture"]["n_calls"] == 1
        assert "mask_sample" not in record
        assert [each.model_call_id for each in kept.read_entries("7-0")] == ["first"]

    asyncio.run(run())


def test_rollouts_under_one_id_at_the_same_time_are_masked_and_one_after_another_are_not(tmp_path: Path) -> None:
    async def run() -> None:
        tokens, kept = delivery(tmp_path), TokenCaptureStore(tmp_path / "tokens")
        rows = [{**ROW, "_ng_rollout_index": index, "_ng_rollout_id": "mine"} for index in range(2)]
        for row in rows:
            await made_by(tokens, row, kept, "mine")
        for row in rows:
            record = result()
            with pytest.warns(UserWarning, match="marked for masking"):
                await tokens.put_onto(row, record)
            assert record["mask_sample"] is True
            assert "under the same id" in record["_ng_token_capture"]["error"]
        for row in ({**row, "_ng_rollout_id": "other"} for row in rows):
            await made_by(tokens, row, kept, "other")
            record = result()
            await tokens.put_onto(row, record)
            assert "mask_sample" not in record

    asyncio.run(run())


def test_failures_are_left_alone_and_masked_rollouts_are_a_reason_to_stop(tmp_path: Path) -> None:
    async def run() -> None:
        tokens = delivery(tmp_path, max_mask_fraction=0.0, mask_fraction_min_samples=1)
        paths = RolloutPaths(tmp_path / "out.jsonl")
        with RolloutStore(paths) as store:
            failed = {"_ng_failure_class": "timeout"}
            await tokens.put_onto(ROW, failed)
            assert failed == {"_ng_failure_class": "timeout"}
            assert await tokens.appended(ROW, store) is None
            with pytest.warns(UserWarning, match="no token records"):
                await tokens.put_onto(ROW, result())
            why = await tokens.appended(ROW, store)
        assert why is not None
        assert "1 of 1 rollouts are masked" in why

    asyncio.run(run())


def test_a_run_that_only_keeps_tokens_delivers_none_and_one_without_a_source_is_refused(tmp_path: Path) -> None:
    block = {"enabled": True, "dir": str(tmp_path), "rebuild_response": False}
    assert TokenDelivery.of({"token_id_capture": block}, None) is None
    with pytest.raises(ConfigError, match="no token source in the rollout-collector process"):
        TokenDelivery.of({"token_id_capture": {"enabled": True, "sink": "some:Sink"}}, None)
