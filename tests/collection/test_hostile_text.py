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


def test_rows_that_no_server_reads_are_refused_with_their_lines_before_any_is_sent(
    collect: Collect, fake_run: FakeRun
) -> None:
    def nested(levels: int) -> str:
        return f'{{"responses_create_params": {{"input": "q"}}, "deep": {"[" * levels}{"]" * levels}}}'

    params = '{"responses_create_params": {"input": "q \\ud83d\\ude00"}'
    good = [nested(199), params + "}", params + ', "path": "C:\\\\ud83d"}']
    bad = [nested(201), nested(900), params + ', "note": "\\ud83d!"}', params + ', "\\ude00": 1}']
    Path("in.jsonl").write_text("\n".join([*good, *bad]))

    done = collect()

    assert done.exit_code == 2
    assert "in.jsonl has 2 problems" in done.stderr
    assert "rows [4, 5]: nested in more than 200 levels, which no server reads" in done.stderr
    assert "rows [6, 7]: half of a surrogate pair (such as \\ud83d), which no server reads" in done.stderr
    assert not fake_run.asked
    assert not Path("out_materialized_inputs.jsonl").exists()
    Path("in.jsonl").write_text("\n".join(good))
    assert collect().exit_code == 0
