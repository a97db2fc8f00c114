import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_gym.collect.admission import (
    MAX_CONNECTIONS,
    WaitingRows,
    connections_needed,
    prepare_connections,
    warn_of_lower_caps,
)
from nemo_gym.collect.failures import PendingAttempt
from nemo_gym.http.session import get_global_aiohttp_client
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig, describe
from nemo_gym.runs.record import Row


def row_of(task: int, agent: str) -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}}


def rows_of(agents: str) -> Iterator[Row]:
    return (row_of(task, agent) for task, agent in enumerate(agents))


def config_with(caps: Any) -> RolloutCollectionConfig:
    return RolloutCollectionConfig.model_validate(
        {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "num_samples_in_parallel": caps}
    )


def take_all(waiting: WaitingRows) -> list[int]:
    taken: list[int] = []
    while (trial := waiting.take()) is not None:
        taken.append(trial.row["_ng_task_index"])
    return taken


def test_without_caps_of_agents_rows_come_in_input_order() -> None:
    waiting = WaitingRows(rows_of("abcab"), Concurrency(total=None))

    assert take_all(waiting) == [0, 1, 2, 3, 4]
    assert waiting.is_empty


def test_rows_of_an_agent_at_its_cap_wait_while_others_start() -> None:
    waiting = WaitingRows(rows_of("aaabab"), Concurrency(None, {"a": 1}))

    assert take_all(waiting) == [0, 3, 5]
    assert not waiting.is_empty


def test_rows_set_aside_start_in_their_order_when_their_agent_has_room() -> None:
    waiting = WaitingRows(rows_of("aaaab"), Concurrency(None, {"a": 2}))
    assert take_all(waiting) == [0, 1, 4]

    waiting.give_back_room("a")
    assert take_all(waiting) == [2]
    waiting.give_back_room("a")
    assert take_all(waiting) == [3]
    assert waiting.is_empty


def test_only_so_many_rows_are_set_aside_and_then_reading_waits() -> None:
    read = 0

    def rows() -> Iterator[Row]:
        nonlocal read
        for row in rows_of("a" * 100 + "b"):
            read += 1
            yield row

    waiting = WaitingRows(rows(), Concurrency(None, {"a": 1}), max_set_aside=10)

    assert take_all(waiting) == [0]
    assert read == 11
    finished = 1
    while not waiting.is_empty:
        waiting.give_back_room("a")
        finished += len(take_all(waiting))
    assert finished == 101


def test_a_retry_goes_before_rows_that_have_not_started() -> None:
    waiting = WaitingRows(rows_of("aaaa"), Concurrency(total=None))
    first = waiting.take()
    assert first is not None
    waiting.paused += 1
    waiting.give_back_room("a")

    waiting.add_retry(first.next())

    assert take_all(waiting) == [0, 1, 2, 3]


def test_a_retry_waits_for_the_cap_of_its_agent() -> None:
    waiting = WaitingRows(rows_of("aa"), Concurrency(None, {"a": 1}))
    first = waiting.take()
    assert first is not None
    waiting.give_back_room("a")
    waiting.paused += 1
    assert take_all(waiting) == [1]

    waiting.add_retry(first.next())
    assert waiting.take() is None
    waiting.give_back_room("a")

    assert take_all(waiting) == [0]


def test_rollouts_that_wait_for_their_retry_keep_new_rows_waiting_when_there_are_many() -> None:
    waiting = WaitingRows(rows_of("aaaa"), Concurrency(total=None), max_set_aside=2)
    waiting.paused = 2

    assert waiting.take() is None
    waiting.paused = 1
    assert waiting.take() is not None


def test_a_source_that_fails_counts_as_exhausted_and_keeps_its_error() -> None:
    def rows() -> Iterator[Row]:
        yield row_of(0, "a")
        raise OSError("disk on fire")

    waiting = WaitingRows(rows(), Concurrency(total=None))

    assert take_all(waiting) == [0]
    assert waiting.is_empty
    assert isinstance(waiting.error, OSError)


def test_closing_forgets_all_rows() -> None:
    waiting = WaitingRows(rows_of("aaa"), Concurrency(None, {"a": 1}))
    waiting.take()
    waiting.take()

    waiting.close()

    assert waiting.is_empty
    assert waiting.take() is None


def test_a_row_without_an_agent_is_still_handed_out() -> None:
    waiting = WaitingRows([{"x": 1}], Concurrency(None, {"a": 1}, 1))

    trial = waiting.take()

    assert trial is not None
    assert trial.agent == ""


def test_the_next_attempt_counts_those_before() -> None:
    trial = PendingAttempt({**row_of(0, "a"), "_ng_attempt_index": 4}, "a")

    assert trial.next().row["_ng_attempt_index"] == 5
    assert trial.next().next().number == 3
    assert trial.row["_ng_attempt_index"] == 4


@pytest.mark.parametrize(
    ("caps", "owed", "expected"),
    [
        (Concurrency(total=256), {"a": 1_000}, 256),
        (Concurrency(total=256), {"a": 10, "b": 5}, 15),
        (Concurrency(total=None), {"a": 1_000_000}, MAX_CONNECTIONS),
        (Concurrency(total=None), {"a": 5_000}, 5_000),
        (Concurrency(None, {"a": 10, "b": None}, 100), {"a": 50, "b": 20, "c": 1_000}, 130),
        (Concurrency(total=256), {}, 0),
    ],
)
def test_as_many_connections_are_needed_as_rollouts_may_be_in_flight(
    caps: Concurrency, owed: dict[str, int], expected: int
) -> None:
    assert connections_needed(caps, owed) == expected


@pytest.mark.parametrize(
    ("caps", "words"),
    [
        (None, ["256", "default", "num_samples_in_parallel"]),
        (17, ["17"]),
        (0, ["Any number"]),
        ({"a": 3, "_default": 5}, ["a 3", "each other agent 5"]),
        ({"a": 0}, ["a any number", "each other agent 256"]),
        ({"_default": 0}, ["Any number"]),
    ],
)
def test_the_caps_are_said_in_words(caps: Any, words: list[str]) -> None:
    text = describe(config_with(caps))

    assert [word for word in words if word not in text] == []


def test_the_limits_of_the_http_client_are_raised_to_the_cap(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nemo_gym")

    async def scenario() -> int:
        prepare_connections(config_with(3_000), {"a": 10_000})
        connector = get_global_aiohttp_client().connector
        assert connector is not None
        return connector.limit_per_host

    assert asyncio.run(scenario()) >= 3_000
    assert "3000" in caplog.text


def test_more_rollouts_than_open_files_are_cut_down_with_a_word_about_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (2_000, 4_000))

    fitting = prepare_connections(config_with(5_000), {"a": 10_000})
    few = prepare_connections(config_with(5_000), {"a": 100})

    assert fitting.total is not None
    assert 1_500 < fitting.total < 1_900
    assert few.total == 5_000
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "this process may have only 2000 files open" in warning
    assert f": {fitting.total} fit" in warning
    assert "`ulimit -Hn`, here 4000" in warning


CAPS_OF_SERVERS = {
    "global_aiohttp_connector_limit_per_host": 512,
    "global_aiohttp_connector_limit": 0,
    "policy_model": {"responses_api_models": {"openai_model": {"max_concurrent_requests": 64}}},
    "judge": {"resources_servers": {"equivalence_llm_judge": {"judge_endpoint_max_concurrency": 5_000}}},
}


def test_limits_of_the_servers_below_what_was_asked_for_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (2_000, 8_000))

    warn_of_lower_caps(CAPS_OF_SERVERS, Concurrency(total=4_096), {"a": 10_000})
    warn_of_lower_caps(CAPS_OF_SERVERS, Concurrency(total=4_096), {"a": 50})

    (warning,) = [record.getMessage() for record in caplog.records]
    assert "Up to 4096 rollouts in parallel" in warning
    assert "global_aiohttp_connector_limit_per_host=512" in warning
    assert "policy_model.responses_api_models.openai_model.max_concurrent_requests=64" in warning
    assert "the 8000 files" in warning
    assert "judge" not in warning


def test_changed_caps_of_agents_hold_for_the_rows_set_aside() -> None:
    waiting = WaitingRows(rows_of("aaaabbbb"), Concurrency(total=None, per_agent={"a": 1, "b": 1}))
    assert take_all(waiting) == [0, 4]
    waiting.set_concurrency(Concurrency(total=None, per_agent={"a": 3, "b": 1}))
    assert take_all(waiting) == [1, 2]
    assert waiting.running_by_agent == {"a": 3, "b": 1}
    waiting.set_concurrency(Concurrency(total=None, per_agent={"a": 0, "b": 1}))
    waiting.give_back_room("a")
    waiting.give_back_room("b")
    assert 3 not in take_all(waiting)
