"""What every server does, whichever way it runs: hosted with others, in its own process, with several workers."""

import socket
import time
from pathlib import Path
from typing import Any

from tests.servers.conftest import Running, Start, write_server

COOKIE = "ProbeServer___probe_one"
RESPONSE: dict[str, Any] = {"id": "resp_1", "created_at": 1.0, "model": "m", "object": "response", "output": []}


def test_root_and_health_say_that_the_server_is_up(probe: Running) -> None:
    for path in ("/", "/health"):
        answer = probe.call(path, method="GET")
        assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_a_session_begins_on_first_contact_and_comes_back_with_its_cookie(probe: Running) -> None:
    first = probe.call("/echo", {"a": 1})
    again = probe.call("/echo", {}, cookies=first.cookies)
    stranger = probe.call("/echo", {})

    assert list(first.cookies) == [COOKIE]
    assert first.json["body"] == {"a": 1}
    assert again.json["session"] == first.json["session"]
    assert stranger.json["session"] != first.json["session"]
    assert "httponly" in first.headers["set-cookie"].lower()
    assert "samesite=lax" in first.headers["set-cookie"].lower()


def test_a_made_up_cookie_starts_a_new_session(probe: Running) -> None:
    first = probe.call("/echo")
    forged = {COOKIE: first.cookies[COOKIE][:-4] + "AAAA"}

    assert probe.call("/echo", cookies=forged).json["session"] != first.json["session"]


def test_a_failing_tool_answers_500_with_the_exception_and_keeps_the_session(probe: Running) -> None:
    first = probe.call("/echo")
    failed = probe.call("/boom", cookies=first.cookies)

    assert (failed.status, failed.json) == (500, "ValueError('x')")
    assert probe.call("/echo", cookies=failed.cookies).json["session"] == first.json["session"]
    assert failed.headers["x-nemo-gym-error-status"] == "500"
    assert failed.headers["x-nemo-gym-error-server"] == "probe_one"
    assert failed.headers["x-nemo-gym-error-class"] == "ValueError"


def test_an_error_of_an_inner_server_keeps_its_text_and_its_origin(probe: Running) -> None:
    failed = probe.call("/relay")

    assert failed.status == 500
    inner = b"\"ValueError('x')\""
    assert failed.json == f"Hit an exception in {COOKIE} calling an inner server: {inner!r}"
    assert failed.headers["x-nemo-gym-error-class"] == "ValueError"


def test_what_a_server_refuses_is_logged_once_when_it_makes_a_caller_fail(probe: Running) -> None:
    assert probe.call("/teapot").status == 418
    assert "short and stout" not in probe.log.read_text()

    failed = probe.call("/relay?to=/relay%3Fto=/teapot")

    assert failed.status == 500
    assert failed.headers["x-nemo-gym-error-status"] == "418"
    wait_until(lambda: "short and stout" in probe.log.read_text())
    log = probe.log.read_text().replace("(probe_one) ", "")
    assert [line for line in log.splitlines() if "short and stout" in line] == [
        f"Warning: probe_one: /relay failed: 418 I'm a Teapot from POST {probe.url}/teapot "
        "[failed in 'probe_one': HTTPException, status 418]: short and stout"
    ]


def test_a_handler_that_exits_does_not_take_the_server_with_it(probe: Running) -> None:
    left = probe.call("/leave")

    assert (left.status, left.json) == (500, "An unknown error occurred")
    assert probe.call("/echo").status == 200


def test_http_exceptions_and_unknown_paths_keep_status_and_session(probe: Running) -> None:
    first = probe.call("/echo")
    for path, status in (("/teapot", 418), ("/nowhere", 404)):
        answer = probe.call(path, cookies=first.cookies)
        assert answer.status == status
        assert "detail" in answer.json
        assert answer.headers["x-nemo-gym-error-server"] == "probe_one"
        assert answer.headers["x-nemo-gym-error-status"] == str(status)
        assert COOKIE in answer.cookies


def test_whatever_a_validator_raises_is_a_422(probe: Running) -> None:
    for body, words in (
        ({"value": 13}, "thirteen is not allowed"),
        ({"value": 14}, "KeyError"),
        ({"value": "many"}, "int"),
        ({}, "required"),
        (b"not json", "JSON"),
    ):
        answer = probe.call("/picky", body)
        assert answer.status == 422, body
        assert answer.json["detail"][0]["loc"][0] == "body"
        assert words in str(answer.json)
    assert probe.call("/picky", {"value": 12}).json == {"value": 12}


def test_a_refused_body_is_not_printed(probe: Running) -> None:
    probe.call("/picky", {"value": "the private text of a user"})

    assert "the private text of a user" not in probe.log.read_text()


def test_endpoints_that_use_more_of_fastapi_still_work(probe: Running) -> None:
    assert probe.call("/question?q=7", method="GET").json == {"q": 7}
    assert probe.call("/question?q=x", method="GET").status == 422


def test_verify_echoes_the_row_and_ends_the_session_when_the_agent_says_so(probe: Running) -> None:
    row = {"responses_create_params": {"input": "hi"}, "response": RESPONSE, "extra": {"deep": [1]}}
    first = probe.call("/seed_session", {"start": 3, "anything": "else"})
    assert first.status == 200
    kept = probe.call("/verify", row, cookies=first.cookies)
    assert f"ended {kept.json['session']}" not in probe.marks.read_text()
    ended = probe.call("/verify", row, cookies=first.cookies, headers={"x-nemo-gym-end-session": "true"})

    assert kept.json["reward"] == 1.0
    assert kept.json["extra"] == {"deep": [1]}
    assert kept.json["session"] == ended.json["session"]
    wait_until(lambda: f"ended {ended.json['session']}" in probe.marks.read_text())


def test_aggregate_metrics_answers_with_statistics(probe: Running) -> None:
    records = [{"_ng_task_index": 0, "_ng_rollout_index": n, "reward": float(n)} for n in (0, 1)]
    answer = probe.call("/aggregate_metrics", {"verify_responses": records})

    assert answer.json["key_metrics"] == {"mean/reward": 0.5}
    assert probe.call("/aggregate_metrics", {"verify_responses": []}).json["group_level_metrics"] == []


def test_what_a_handler_prints_carries_the_name_of_its_server(probe: Running) -> None:
    probe.call("/echo")

    assert "(probe_one) echo was called" in probe.log.read_text()


def test_a_tool_is_carried_out_to_the_end_when_its_caller_vanishes(probe: Running) -> None:
    host, port = probe.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"POST /slow HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        wait_until(lambda: "tool began" in probe.marks.read_text())
    wait_until(lambda: "tool ended" in probe.marks.read_text())


def test_openapi_describes_the_tools(probe: Running) -> None:
    paths = probe.call("/openapi.json", method="GET").json["paths"]

    assert {"/verify", "/seed_session", "/aggregate_metrics", "/picky"} <= set(paths)


def test_a_server_with_modules_and_files_of_its_own_runs_unchanged_in_its_own_process(
    start: Start, tmp_path: Path
) -> None:
    folder = write_server(tmp_path / "elsewhere")
    text = (
        (folder / "app.py")
        .read_text()
        .replace("# IMPORT UTILS", 'import utils\n\nprint(utils.WORD, open("word.txt").read())')
    )
    (folder / "app.py").write_text(text)
    (folder / "utils.py").write_text('WORD = "from utils"\n')
    (folder / "word.txt").write_text("from a file")

    assert "from utils from a file" in start("process", folder).log.read_text()


def wait_until(happened: Any) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
