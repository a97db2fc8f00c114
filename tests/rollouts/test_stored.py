"""The finished rollouts by agent: read as they are needed, sent as one JSON body."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest
from fastapi.testclient import TestClient

from nemo_gym.jsonl import to_line
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import Room, StoredRollouts, sendable, stored_by_agent
from nemo_gym.runs.store import FileChangedError
from nemo_gym.schemas.aggregate_metrics import AggregateMetricsRequest
from nemo_gym.server_utils import ServerClient
from resources_servers.string_match.app import StringMatchResourcesServer, StringMatchResourcesServerConfig

PATHS = RolloutPaths(Path("out.jsonl"))


def record(task: int, rollout: int = 0, agent: str = "alpha", **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": agent}, "reward": 1.0, **fields}


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def body_of(stored: StoredRollouts) -> bytes:
    async def read() -> bytes:
        return b"".join([piece async for piece in stored.body()])

    return asyncio.run(read())


def test_rollouts_come_by_agent_and_in_task_order() -> None:
    write(PATHS.rollouts, record(2), record(0, 1), record(1, agent="beta"), record(0, 0))

    groups = stored_by_agent(PATHS, 4)

    assert {
        agent: [(it["_ng_task_index"], it["_ng_rollout_index"]) for it in group] for agent, group in groups.items()
    } == {
        "alpha": [(0, 0), (0, 1), (2, 0)],
        "beta": [(1, 0)],
    }
    assert record(2) in groups["alpha"]
    assert len(groups["alpha"]) == 3


def test_the_body_is_the_request_for_metrics_and_as_long_as_announced() -> None:
    bulky: dict[str, Any] = {
        "response": {"output": ["x"] * 10_000, "usage": {"total_tokens": 3}},
        "responses_create_params": {},
    }
    write(PATHS.rollouts, *(record(n, note="ü" * 1_000, **bulky) for n in range(200)))
    (stored,) = stored_by_agent(PATHS, 200).values()

    body = body_of(stored)

    assert len(body) == stored.body_bytes
    sent = json.loads(body)["verify_responses"]
    assert sent == list(stored)
    assert sent[7] == record(7, note="ü" * 1_000, response={"usage": {"total_tokens": 3}})


def test_each_record_is_read_once_for_what_is_sent_and_again_only_if_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(PATHS.rollouts, *(record(n % 7, n, agent="ab"[n % 2], note="x" * n) for n in reversed(range(60))))
    read = MagicMock(side_effect=orjson.loads)
    monkeypatch.setattr(orjson, "loads", read)

    kept = stored_by_agent(PATHS, 60)
    bodies = {agent: body_of(stored) for agent, stored in kept.items()}

    assert read.call_count == 60
    assert {agent: body_of(stored) for agent, stored in kept.items()} == bodies  # from the file, as nothing is left
    assert read.call_count == 120
    monkeypatch.setattr(Room, "__init__", lambda room: setattr(room, "bytes_left", 3_000))
    groups = stored_by_agent(PATHS, 60)
    assert {agent: body_of(stored) for agent, stored in groups.items()} == bodies
    assert read.call_count == 240


def test_text_that_cannot_be_encoded_is_sent_with_question_marks() -> None:
    PATHS.rollouts.write_bytes(
        b'{"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"a"},"reward":1,"note":"\\ud83d!"}\n'
    )
    (stored,) = stored_by_agent(PATHS, 1).values()

    body = body_of(stored)

    assert len(body) == stored.body_bytes
    assert json.loads(body)["verify_responses"][0]["note"] == "?!"


def test_a_rollout_that_is_there_twice_counts_once() -> None:
    write(PATHS.rollouts, record(0, reward=0.0), record(0, reward=1.0), record(1))

    (stored,) = stored_by_agent(PATHS, 2).values()

    assert [it["reward"] for it in stored] == [0.0, 1.0]


def test_rollouts_of_no_row_and_of_no_agent_are_left_out() -> None:
    write(PATHS.materialized_inputs, record(0), record(1))
    write(PATHS.rollouts, record(0), record(9), {**record(1), "agent_ref": None})

    (stored,) = stored_by_agent(PATHS, 1).values()

    assert [it["_ng_task_index"] for it in stored] == [0]


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("odd", [None, "\ud83d", float("nan"), 10**30])
@pytest.mark.parametrize("levels", [1, 99, 150, 199, 253, 900, 1_000, 3_000])
def test_what_is_sent_is_taken_by_every_parser_however_deeply_it_is_nested(levels: int, odd: object) -> None:
    sent = sendable(record(3, detail=_deep(levels), odd=odd))
    for parsed in (
        orjson.loads(sent),
        json.loads(sent),
        AggregateMetricsRequest.model_validate_json(b'{"verify_responses":[' + sent + b"]}").verify_responses[0],
    ):
        assert (parsed["_ng_task_index"], parsed["reward"]) == (3, 1.0)
        assert levels > 99 or parsed["detail"] == _deep(levels)


def test_one_record_nested_deeply_costs_an_agent_none_of_its_metrics() -> None:
    records = [record(0), record(1, detail=_deep(900)), record(2, detail={"many": [{"n": [n]} for n in range(500)]})]
    PATHS.rollouts.write_bytes(b"".join(map(to_line, records)))
    stored = stored_by_agent(PATHS, 3)["alpha"]
    body = body_of(stored)
    assert len(body) == stored.body_bytes
    assert json.loads(body)["verify_responses"][2] == records[2]

    answer = TestClient(_environment().complete_app()).post(
        "/aggregate_metrics", content=body, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 200, answer.text
    assert answer.json()["agent_metrics"]["mean/reward"] == 1.0
    assert len(answer.json()["group_level_metrics"]) == 3


def _environment() -> StringMatchResourcesServer:
    block = {"name": "string_match", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "domain": "other"}
    config = StringMatchResourcesServerConfig.model_validate(block)
    return StringMatchResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def test_a_file_that_holds_fewer_rollouts_than_were_finished_is_no_base_for_metrics() -> None:
    write(PATHS.rollouts, record(0), record(1))
    with PATHS.rollouts.open("ab") as file:
        file.write(b"\x00\xff stray bytes\n[1]\n")
    assert len(stored_by_agent(PATHS, 2)["alpha"]) == 2
    with pytest.raises(FileChangedError, match=r"out\.jsonl holds 2 of the 3 finished rollouts"):
        stored_by_agent(PATHS, 3)


def test_indices_of_any_kind_have_their_place() -> None:
    odd: list[Any] = [record(1), {**record(0), "_ng_task_index": "a"}, {**record(0), "_ng_task_index": 0.5}, record(0)]
    write(PATHS.rollouts, *odd)

    (stored,) = stored_by_agent(PATHS, 4).values()

    assert [it["_ng_task_index"] for it in stored] == [0, 0.5, 1, "a"]
