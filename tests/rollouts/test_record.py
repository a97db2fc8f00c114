from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from nemo_gym.runs.record import (
    Failure,
    FailureClass,
    Outcome,
    RolloutKey,
    agent_name_of,
    failure_record,
    key_or_none,
    outcome_of,
    stamp,
    task_order,
)

ROW: dict[str, Any] = {"_ng_task_index": 4, "_ng_rollout_index": 1, "agent_ref": {"name": "a"}, "x": 1}


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"reward": 1.0}, Outcome.SUCCESS),
        ({"reward": 0.0}, Outcome.SUCCESS),
        ({"_ng_failure_class": None, "_ng_no_persist": False}, Outcome.SUCCESS),
        ({"_ng_failure_class": "transient"}, Outcome.FAILURE),
        ({"_ng_failure_class": ""}, Outcome.FAILURE),
        ({"_ng_failure_class": "kill_shaped", "_ng_no_persist": True}, Outcome.DISCARDED),
        ({"_ng_no_persist": 1}, Outcome.DISCARDED),
    ],
)
def test_what_becomes_of_a_result(result: dict[str, Any], outcome: Outcome) -> None:
    assert outcome_of(result) is outcome


def test_a_stamp_overwrites_what_the_agent_returned() -> None:
    result = {"_ng_task_index": 99, "reward": 1.0, "agent_ref": {"name": "liar"}}
    assert stamp(ROW, result) is result
    assert result == {"_ng_task_index": 4, "_ng_rollout_index": 1, "agent_ref": {"name": "a"}, "reward": 1.0}


def test_attempt_and_explicit_id_travel_with_the_result() -> None:
    stamped = stamp(ROW | {"_ng_attempt_index": 2, "_ng_rollout_id": "s7"}, {"reward": 0.5})
    assert list(stamped) == [
        "reward",
        "_ng_task_index",
        "_ng_rollout_index",
        "agent_ref",
        "_ng_attempt_index",
        "_ng_rollout_id",
    ]


def test_keys_are_read_from_rows() -> None:
    assert RolloutKey.of(ROW) == (4, 1)
    with pytest.raises(KeyError):
        RolloutKey.of({"_ng_task_index": 4})


@pytest.mark.parametrize("value", [None, 5, "text", [1], {}, {"_ng_task_index": 1}])
def test_what_has_no_key(value: Any) -> None:
    assert key_or_none(value) is None


def test_an_unusable_index_is_no_key() -> None:
    assert key_or_none({"_ng_task_index": [1], "_ng_rollout_index": 0}) is None
    assert key_or_none({"_ng_task_index": None, "_ng_rollout_index": 0}) == (None, 0)


def test_records_sort_by_task_then_repeat_whatever_the_indices_are() -> None:
    keys: list[tuple[Any, Any]] = [(None, 0), ("b", 0), (2, 1), (10, 0), ("a", 1), (2, 0), ("a", 0)]
    records = [{"_ng_task_index": task, "_ng_rollout_index": rollout} for task, rollout in keys]
    records.append({})
    ordered = sorted(records, key=task_order)
    assert [key_or_none(record) for record in ordered] == [
        (2, 0),
        (2, 1),
        (10, 0),
        ("a", 0),
        ("a", 1),
        ("b", 0),
        (None, 0),
        None,
    ]


@pytest.mark.parametrize(
    ("record", "name"), [(ROW, "a"), ({}, None), ({"agent_ref": None}, None), ({"agent_ref": "a"}, None)]
)
def test_the_agent_of_a_record(record: dict[str, Any], name: str | None) -> None:
    assert agent_name_of(record) == name


def test_infrastructure_failures_do_not_count_as_attempts() -> None:
    excused = {failure_class.value for failure_class in FailureClass if failure_class.is_infrastructure}
    assert excused == {"connect", "timeout", "rate_limited", "server_gone", "cancelled", "straggler"}


def test_what_somebody_put_an_end_to_says_nothing_about_the_run() -> None:
    assert {failure_class.value for failure_class in FailureClass if not failure_class.tells_of_run} == {
        "cancelled",
        "straggler",
    }


def test_a_wrong_key_or_model_dooms_its_agent() -> None:
    assert {failure_class.value for failure_class in FailureClass if failure_class.dooms_agent} == {
        "auth",
        "model_not_found",
    }


def test_every_failure_class_of_the_sidecar_exists() -> None:
    assert {failure_class.value for failure_class in FailureClass} == {
        "connect",
        "timeout",
        "rate_limited",
        "auth",
        "model_not_found",
        "http_4xx",
        "agent_error",
        "invalid_response",
        "invalid_reward",
        "server_gone",
        "judge_failed",
        "cancelled",
        "not_recorded",
        "straggler",
    }


STARTED = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=timezone(timedelta(hours=2)))


def test_a_detected_failure_says_what_when_and_where_but_never_a_reward() -> None:
    failure = Failure(FailureClass.AGENT_ERROR, "x" * 3_000, status=500, server="my_agent")
    record = failure_record(ROW | {"_ng_attempt_index": 1}, failure, STARTED, datetime(2026, 1, 2, tzinfo=UTC))
    assert record == {
        "_ng_failure_class": "agent_error",
        "_ng_failure_message": "x" * 2_000,
        "_ng_failure_status": 500,
        "_ng_failure_server": "my_agent",
        "_ng_started_at": "2026-01-02T01:04:05.678Z",
        "_ng_ended_at": "2026-01-02T00:00:00.000Z",
        "_ng_task_index": 4,
        "_ng_rollout_index": 1,
        "agent_ref": {"name": "a"},
        "_ng_attempt_index": 1,
    }
    assert outcome_of(record) is Outcome.FAILURE


def test_an_infrastructure_failure_says_that_it_does_not_count() -> None:
    record = failure_record(ROW, Failure(FailureClass.TIMEOUT, "too slow"), STARTED, STARTED)
    assert record["_ng_counts_as_attempt"] is False
    assert "_ng_attempt_index" not in record
