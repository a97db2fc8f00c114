import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.token_id_capture.config import TokenIdCaptureSettings
from nemo_gym.token_id_capture.consumer import (
    clear_token_captures_for_rollouts,
    collector_token_source,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
)
from nemo_gym.token_id_capture.delivery import (
    MaskedFraction,
    capture_build_can_retire,
    finalize_rollout_token_capture,
    retire_rollout_token_capture,
    rollout_carries_token_ids,
)
from nemo_gym.token_id_capture.protocols import install_token_source
from nemo_gym.token_id_capture.store import TokenCaptureStore
from tests.token_id_capture.calls import call, message


@pytest.fixture
def store(tmp_path: Path) -> TokenCaptureStore:
    return TokenCaptureStore(tmp_path)


def result(**more: Any) -> dict[str, Any]:
    return {
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
        "reward": 0.5,
        "response": {"id": "r", "output": [message("text only")]},
        **more,
    }


def finalized(given: dict[str, Any], source: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return asyncio.run(finalize_rollout_token_capture(given, source))


def masked(given: dict[str, Any], source: Any, words: str) -> Any:
    with pytest.warns(UserWarning, match="marked for masking"):
        built: Any = asyncio.run(finalize_rollout_token_capture(given, source))
    assert given["mask_sample"] is True
    assert words in given["_ng_token_capture"]["error"]
    assert built["mask_sample"]
    assert not capture_build_can_retire(built)
    return built


def test_a_result_without_tokens_gets_those_that_were_kept_and_nothing_else_changes(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    store.append(call("b", [1, 2, 3], [4]))
    given = result()

    built = finalized(given, store)

    assert [item["generation_token_ids"] for item in given["response"]["output"]] == [[2], [4]]
    assert (given["reward"], given["response"]["id"]) == (0.5, "r")
    assert "mask_sample" not in given
    assert given["_ng_token_capture"] == {
        "n_calls": 2,
        "chains": 1,
        "roots": 1,
        "delivered_fraction": 1.0,
        "generated_tokens_captured": 2,
        "generated_tokens_delivered": 2,
        "quarantined_calls": 0,
        "quarantined_fraction": 0.0,
        "empty_generation_calls": 0,
    }
    assert store.path_for("3-1").exists(), "kept until the record is on the disk"
    before = [dict(item) for item in given["response"]["output"]]
    assert finalized(given, store)["_capture_snapshot"] == built["_capture_snapshot"]
    assert given["response"]["output"] == before
    assert asyncio.run(retire_rollout_token_capture("3-1", store, built))
    assert not store.path_for("3-1").exists()


def test_a_result_with_tokens_is_left_alone_and_what_was_kept_can_be_retired(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    item = message("hi", prompt_token_ids=[7], generation_token_ids=[8], generation_log_probs=[-1.0])
    given = result(response={"output": [item]})

    built = finalized(given, store)

    assert given == result(response={"output": [item]})
    assert asyncio.run(retire_rollout_token_capture("3-1", store, built))


def test_retiring_spares_a_newer_attempt_under_the_same_id(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    built = finalized(result(), store)
    clear_token_captures_for_rollouts([result()], [store.root])
    store.append(call("a", [1], [9]))
    assert not asyncio.run(retire_rollout_token_capture("3-1", store, built))
    assert store.read_entries("3-1")[0].generation_token_ids == [9]


def test_without_a_source_nothing_is_done() -> None:
    given = result()
    assert finalized(given, None) is None
    assert given == result()
    assert not asyncio.run(retire_rollout_token_capture("3-1", None, None))


def test_a_call_that_is_missing_masks_the_result_which_has_what_there_is(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    asyncio.run(store.mark_incomplete("3-1", "b"))
    given = result()
    built = masked(given, store, "a call of the rollout was not kept")
    assert given["_ng_token_capture"]["capture_incomplete"] is True
    assert given["response"]["output"][0]["generation_token_ids"] == [2]
    assert not asyncio.run(retire_rollout_token_capture("3-1", store, built))
    assert store.path_for("3-1").exists()


def test_several_conversations_and_unresolved_retries_mask_the_result(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    store.append(call("b", [9], [8]))
    masked(result(), store, "the calls make 2 conversations with 2 beginnings")
    for call_id in ("a", "b"):
        store.append(call(call_id, [1], [2 if call_id == "a" else 3], rollout_id="4-0"))
    masked(result(_ng_rollout_id="4-0"), store, "it is not known which answer counted")


def test_a_conversation_beside_a_call_in_quarantine_masks_the_result(store: TokenCaptureStore) -> None:
    tries = [call("b", [1, 2, 3], [4]), call("c", [1, 2, 3], [4])]
    for entry in (call("a", [1], [2]), *tries, call("d", [1, 2, 3, 4, 5], [6]), call("e", [1, 2, 9], [7])):
        store.append(entry)
    given = result()
    masked(given, store, "a call could go on from several others")
    told = given["_ng_token_capture"]
    assert (told["chains"], told["roots"], told["quarantined_calls"]) == (1, 1, 1)


def test_no_records_no_id_a_bad_file_and_a_failing_source_mask_the_result(store: TokenCaptureStore) -> None:
    masked(result(), store, "capture contains no token records")
    nameless = result()
    del nameless["_ng_task_index"]
    masked(nameless, store, "carries no id")
    store.path_for("5-0").write_text('{"model_call_id": "a"}\n')
    masked(result(_ng_rollout_id="5-0"), store, "ValueError")
    assert store.path_for("5-0").exists()

    class Failing(TokenCaptureStore):
        async def freeze(self, rollout_id: str) -> Any:
            raise ConnectionError("gone")

    masked(result(), Failing(store.root), "ConnectionError: gone")


@pytest.mark.parametrize(
    ("response", "carries"),
    [
        ({"output": [message("a"), message("b", generation_token_ids=[1])]}, True),
        ({"output": [message("a", generation_token_ids=[])]}, False),
        ({"output": []}, False),
        ({}, False),
        (None, False),
    ],
)
def test_what_counts_as_carrying_token_ids(response: Any, carries: bool) -> None:
    assert rollout_carries_token_ids({"response": response}) is carries


def test_clearing_passes_over_rows_that_name_no_rollout(store: TokenCaptureStore) -> None:
    store.append(call("a", [1], [2]))
    asyncio.run(store.mark_incomplete("3-1"))
    clear_token_captures_for_rollouts([{"other": 1}, None], [store.root])
    clear_token_captures_for_rollouts([result()], [])
    assert store.is_incomplete("3-1")
    clear_token_captures_for_rollouts([{"other": 1}, result()], [store.root])
    assert not store.is_incomplete("3-1")
    assert store.read_entries("3-1") == []


def test_what_files_amount_to(store: TokenCaptureStore, tmp_path: Path) -> None:
    assert trajectories_for_rollout("3-1", [tmp_path]) is None
    asyncio.run(store.begin_call("8-8", "never-ended"))
    lost = trajectories_for_rollout("8-8", [tmp_path])
    assert lost is not None
    assert (lost["mask_sample"], lost["metrics"]["capture_incomplete"]) == (True, True)
    store.append(call("a", [1], [2]))
    built = trajectories_for_rollout("3-1", [tmp_path / "empty", tmp_path], model="other")
    assert built is not None
    assert (built["mask_sample"], built["rebuilt_response"]["model"], built["builder"]) == (
        False,
        "other",
        "prefix_merging",
    )
    refused = trajectories_for_rollout("3-1", [tmp_path], builder="per_request")
    assert refused is not None
    assert refused["mask_sample"]


def test_the_collector_finds_its_source_or_says_that_it_has_none(tmp_path: Path, store: TokenCaptureStore) -> None:
    block: dict[str, Any] = {"enabled": True, "dir": str(tmp_path)}
    assert token_id_capture_dirs_from_config({"token_id_capture": block}) == [tmp_path]
    assert token_id_capture_dirs_from_config({}) == []
    found = collector_token_source({"token_id_capture": block})
    assert found is not None
    assert found.is_own
    assert collector_token_source({"token_id_capture": {**block, "rebuild_response": False}}) is None
    elsewhere = {"token_id_capture": {"enabled": True, "sink": "a:B"}}
    with pytest.raises(ValueError, match="no token source in the rollout-collector process"):
        collector_token_source(elsewhere)
    install_token_source(store)
    try:
        found = collector_token_source(elsewhere)
        assert found is not None
        assert found.source is store
        assert not found.is_own
    finally:
        install_token_source(None)


def test_too_many_masked_rollouts_end_the_run_with_the_reasons() -> None:
    limit = MaskedFraction(TokenIdCaptureSettings(max_mask_fraction=0.5, mask_fraction_min_samples=4))
    bad = {"mask_sample": True, "error": "no records"}
    for built in (bad, bad, None, {"mask_sample": False}):
        limit.note(built)
    with pytest.raises(RuntimeError, match=r"3 of 4 rollouts are masked.*max_mask_fraction=0.5: 3 x no records"):
        limit.note(bad)
    endless = MaskedFraction(TokenIdCaptureSettings())
    for _ in range(100):
        endless.note(bad)
