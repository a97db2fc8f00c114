"""The finished rollouts by agent: read as they are needed, sent as one JSON body."""

import asyncio
import json
from pathlib import Path
from typing import Any

from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.stored import StoredRollouts, stored_by_agent

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
