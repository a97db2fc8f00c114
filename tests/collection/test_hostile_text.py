"""Agents, models and data sets cannot write to the terminal of whoever collects from them."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from nemo_gym.terminal import harmless
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, serve, write_rows

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\r"
AGENT = f"agent{HOSTILE}"


async def hostile(row: Row, attempt: int) -> object:
    task = row["_ng_task_index"]
    if task == 0:
        return {**row, "reward": 1.0, HOSTILE: 0.5, "response": {}}
    if task == 1:
        return web.Response(status=500, body=HOSTILE.encode(), reason="also evil", content_type="text/html")
    if task == 2:
        return web.Response(
            status=500,
            text=json.dumps(HOSTILE),
            headers={"x-nemo-gym-error-server": "\x9b31m\u202e", "x-nemo-gym-error-class": "\u202eX"},
        )
    return web.json_response([HOSTILE])


@pytest.mark.parametrize(
    "options", [(), ("+json=true",), ("+verbose=true", "+global_aiohttp_client_request_debug=true")]
)
def test_no_escape_reaches_the_terminal(collect: Collect, fake_run: FakeRun, options: tuple[str, ...]) -> None:
    with serve(FakeRun(AGENT, "alpha")) as run:
        run.answer = hostile
        row = {"agent_ref": {"name": AGENT}, "id": HOSTILE, "responses_create_params": {"input": HOSTILE}}
        write_rows(Path("in.jsonl"), [{**row, "n": number} for number in range(4)])
        done = collect(f"+head_server.port={run.port}", "+max_attempts=2", *options)

    printed = done.stdout + done.stderr
    assert done.exit_code == 1
    assert "\\x1b" in printed or "\\u001b" in printed
    assert harmless(printed) == printed


def test_an_unreadable_row_is_named_without_its_escapes(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), [{"agent_ref": {"name": AGENT}, "responses_create_params": {"input": "x"}}])
    done = collect()

    assert done.exit_code == 2
    assert "\\x1b" in done.stderr
    assert harmless(done.stderr) == done.stderr
