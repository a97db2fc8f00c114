"""The bundled verifiers, running, and for how long an answer keeps another session of theirs waiting."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import nemo_gym
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient
from tests.hostile.answers import MARKDOWN, MOST_MADE, ROWS, Answer, Call

ONLY_JUDGED = "equivalence_llm_judge"
"""Attacked in test_judges.py."""
ATTACKED = {path.parent.name for path in (PARENT_DIR / "resources_servers").glob("*/app.py")} - {ONLY_JUDGED}
BYSTANDER = "example_single_tool_call"
SETTINGS: dict[str, dict[str, Any]] = {
    "code_gen": {"num_processes": 2, "unit_test_timeout_secs": 1},
    "math_with_judge": {"should_use_judge": False, "library_verifier_timeout_seconds": 1.0},
    "mcqa": {"pattern_timeout_s": 0.5},
    "reasoning_gym": {"scoring_cpu_limit_s": 2},
    "string_match": {"pattern_timeout_s": 0.5},
    "structured_outputs": {"pattern_timeout_s": 2.0},
}
MOST_BLOCKED_S = 0.5
_PATIENCE_S = 120.0
_TRIES = 4
"""On a busy machine a moment's wait is nobody's fault; the best of these counts."""


@contextmanager
def verifiers() -> Iterator[ServerClient]:
    """Every bundled environment on ports of its own, and a client of them."""
    blocks = {name: {"entrypoint": "app.py", "domain": "other", **SETTINGS.get(name, {})} for name in ATTACKED}
    config: dict[str, Any] = {name: {"resources_servers": {name: block}} for name, block in blocks.items()}
    config[MARKDOWN] = {"resources_servers": {"mcqa": {**blocks["mcqa"], "grading_mode": "lenient_answer_colon_md"}}}
    with nemo_gym.servers_of([], **config) as servers:
        yield servers.client


def response_of(answer: Answer) -> dict[str, Any]:
    """The response of a model that gave this answer."""
    output: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"c{number}", "name": call.tool, "arguments": call.arguments}
        for number, call in enumerate(answer.calls)
    ]
    if answer.says:
        said = [{"type": "output_text", "text": answer.says, "annotations": []}]
        output.append({"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": said})
    return {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": output}


async def scored(client: ServerClient, answer: Answer) -> dict[str, Any]:
    """The verdict on an answer, whose calls are made before, in its own session."""
    instance, fields = ROWS[answer.row]
    row = {"responses_create_params": {"input": "go"}, **fields}
    seeded = await client.post(instance, "/seed_session", json=row)
    said = await seeded.text()
    assert seeded.status == HTTPStatus.OK, said
    for call in answer.calls[:MOST_MADE] if len(answer.calls) <= MOST_MADE else ():
        await made(client, instance, call, seeded.cookies)
    verdict = await client.post(
        instance, "/verify", data=json.dumps({**row, "response": response_of(answer)}), cookies=seeded.cookies,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert verdict.status == HTTPStatus.OK, (verdict.status, (await verdict.text())[:500])
    return dict(json.loads(await verdict.read()))


async def made(client: ServerClient, instance: str, call: Call, cookies: Any) -> None:
    """Make a call as agents do; what the tool does not take is its caller's mistake."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return
    answer = await client.post(
        instance, f"/{call.tool}", data=json.dumps(arguments), cookies=cookies,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    said = await answer.text(errors="replace")
    assert answer.status < HTTPStatus.INTERNAL_SERVER_ERROR, said[:500]


async def blocked_s(client: ServerClient, answer: Answer) -> tuple[dict[str, Any], float]:
    """The verdict, and the longest time for which another session waited for its own meanwhile."""
    longest_s = 0.0
    verdict = asyncio.create_task(scored(client, answer))
    row = {"responses_create_params": {"input": "go"}, "response": response_of(Answer("weather", "It is cold."))}
    ends_s = time.monotonic() + _PATIENCE_S
    while not verdict.done():
        assert time.monotonic() < ends_s, f"it has no score after {_PATIENCE_S:g} s"
        began_s = time.monotonic()
        bystander = await client.post(BYSTANDER, "/verify", json=row)
        await bystander.read()
        assert bystander.status == HTTPStatus.OK
        longest_s = max(longest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.005)
    return await verdict, longest_s


def problem_with(client: ServerClient, answer: Answer) -> str | None:
    """In words, what an answer has done to its verifier; None when it got what it deserves and kept nobody waiting."""
    waited_s = []
    for _ in range(_TRIES):
        try:
            verdict, longest_s = nemo_gym.run_sync(blocked_s(client, answer))
        except AssertionError as error:
            return str(error)
        reward = verdict.get("reward")
        if "_ng_failure_class" in verdict or not isinstance(reward, float):
            return f"it has no score: {verdict.get('_ng_failure_message', reward)}"
        if answer.reward is not None and (reward > answer.reward or reward < answer.reward == 1.0):
            return f"it got {reward} and deserves {answer.reward}"
        waited_s.append(longest_s)
        if longest_s <= MOST_BLOCKED_S:
            return None
    return f"another session waited for {min(waited_s):.2f} s"
