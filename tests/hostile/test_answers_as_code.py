"""No answer to a puzzle runs as a program, takes its rollout out of the score, or gets more than it deserves."""

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nemo_gym
from nemo_gym.notebooks import run_sync
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient, get_response_json
from tests.hostile.answers_as_code import ENTRIES, MOST, VARIABLE, Answer, programs, too_much

NAME = "reasoning_gym"
_AT_A_TIME = 8
_SCORE = """
import json, sys
from resources_servers.reasoning_gym.scoring import run
for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
"""
"""Scores jobs as the isolated processes do, without isolation."""


def row_of(answer: Answer) -> dict[str, Any]:
    entry = ENTRIES[answer.task]
    metadata = {**entry["metadata"], "source_dataset": answer.task}
    return {"question": "?", "answer": entry["answer"], "metadata": metadata}


def request_of(answer: Answer) -> dict[str, Any]:
    content = [{"type": "output_text", "text": f"<answer>{answer.text}</answer>", "annotations": []}]
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    return {"responses_create_params": {"input": "?"}, "response": response, **row_of(answer)}


def verified(requests: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    """Status and body of the answers of a server that runs on a port of its own."""

    async def ask_all(client: ServerClient) -> list[tuple[int, Any]]:
        turns = asyncio.Semaphore(_AT_A_TIME)

        async def ask(request: dict[str, Any]) -> tuple[int, Any]:
            async with turns:
                response = await asyncio.wait_for(client.post(NAME, "/verify", json=request), 120)
                return response.status, await get_response_json(response)

        return list(await asyncio.gather(*map(ask, requests)))

    settings = {"entrypoint": "app.py", "domain": "knowledge", "scoring_cpu_limit_s": 2}
    with nemo_gym.servers_of([], **{NAME: {"resources_servers": {NAME: settings}}}) as servers:
        return run_sync(ask_all(servers.client))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "trace"


def test_a_server_scores_every_answer_and_none_above_what_it_deserves(trace: Path) -> None:
    given = [*programs(trace), *too_much()]
    right = [Answer(task, "right", entry["answer"]) for task, entry in ENTRIES.items()]

    verdicts = verified([request_of(answer) for answer in [*given, *right]])

    of_given, of_right = verdicts[: len(given)], verdicts[len(given) :]
    wrong = [
        (answer.task, answer.name, status, body.get("reward"), body.get("scoring_error"))
        for answer, (status, body) in zip(given, of_given, strict=True)
        if status != 200 or not math.isfinite(body["reward"]) or not 0 <= body["reward"] <= MOST
    ]
    assert wrong == []
    assert {answer.task: body["reward"] for answer, (_, body) in zip(right, of_right, strict=True)} == dict.fromkeys(
        ENTRIES, 1.0
    )
    assert len(given) > 400
    assert not trace.exists()
    assert VARIABLE not in os.environ


def test_no_answer_runs_where_nothing_isolates_the_scorer(trace: Path) -> None:
    given = list(programs(trace))
    jobs = [{"task": answer.task, "entry": row_of(answer), "given": answer.text} for answer in given]
    report = f"import os\nprint(json.dumps(os.environ.get({VARIABLE!r})))\n"

    done = subprocess.run(
        [sys.executable, "-c", _SCORE + report],
        input="\n".join(json.dumps(job) for job in jobs),
        capture_output=True,
        text=True,
        cwd=PARENT_DIR,
        env={**os.environ, "PYTHONPATH": str(PARENT_DIR)},
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    *results, variable = [json.loads(line) for line in done.stdout.splitlines()]
    assert not trace.exists()
    assert variable is None
    assert [
        (answer.task, answer.name, result)
        for answer, result in zip(given, results, strict=True)
        if not 0 <= result.get("score", 2) <= MOST
    ] == []
