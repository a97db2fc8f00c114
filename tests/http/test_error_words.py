"""The message of an error is found however it is wrapped, and stays readable on its way."""

import json
from typing import Any

import pytest

from nemo_gym.http.errors import as_header, from_header, own_words, raised_in, unwrapped

OPENAI = b'{"error": {"message": "Incorrect API key: \\"sk-x\\"", "type": "invalid_request_error", "code": "x"}}'


def hop(server: str, body: bytes) -> bytes:
    """What a server answers that was told `body`."""
    return json.dumps(f"Hit an exception in {server} calling an inner server: {body!r}").encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (OPENAI, 'Incorrect API key: "sk-x"'),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body", "input"], "msg": "missing"}, {"loc": ["x"], "msg": "y"}]}', None),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"errors": [1, 2]}', '{"errors": [1, 2]}'),
        (b"\"ValueError('x')\"", "ValueError('x')"),
        (b"<html>\n<head><title>502 Bad Gateway</title></head><body>nginx</body></html>", "502 Bad Gateway"),
        (b"upstream\n  timed out", "upstream timed out"),
        (b"\xff\x00", "\ufffd\x00"),
        (b"", ""),
        (b"x" * 10_000, "x" * 299 + "…"),
    ],
)
def test_the_message_is_found_in_any_body(body: bytes, words: str | None) -> None:
    assert own_words(body) == ("body.input: missing; x: y" if words is None else words)


def test_what_servers_wrapped_is_unwrapped_whatever_their_number() -> None:
    body = OPENAI
    for server in ("OpenAIModel___policy", "Agent___a", "Outer___b"):
        body = hop(server, body)

    assert unwrapped(body) == OPENAI
    assert own_words(body) == 'Incorrect API key: "sk-x"'


@pytest.mark.parametrize(
    "odd",
    [
        hop("x", b"y")[:-4],
        json.dumps("Hit an exception in x calling an inner server: b'open").encode(),
        json.dumps("Hit an exception in x calling an inner server: 'text'").encode(),
        json.dumps("Hit an exception in x calling an inner server: b'a' + b'b'").encode(),
    ],
)
def test_what_only_looks_wrapped_is_left_alone(odd: bytes) -> None:
    assert unwrapped(odd) == odd


@pytest.mark.parametrize("line", ["plain (status 401): 50 % \"quoted\" 'x' \\n", "Schlüssel 键 \U0001f511", "x" * 999])
def test_a_line_survives_a_header(line: str) -> None:
    value = as_header(line)

    assert value.isascii()
    assert value.isprintable()
    assert from_header(value) == line


def test_a_long_line_is_cut_to_what_a_header_may_hold() -> None:
    value = as_header("键" * 5_000)

    assert len(value) <= 6_000
    assert from_header(value).startswith("键" * 600)


def test_an_exception_says_what_and_where() -> None:
    try:
        raise KeyError("missing")
    except KeyError as error:
        said = raised_in(error, "/verify")

    assert said.startswith("/verify raised KeyError: 'missing', http/test_error_words.py line ")
    assert raised_in(ValueError(), "/run") == "/run raised ValueError; its log has the traceback"


AUTHORS = "from json import loads\n\ndef verify(text):\n    return loads(text)\n"


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/srv/resources_servers/quiz/app.py", "resources_servers/quiz/app.py line 4"),
        ("/srv/resources_servers/quiz/lib/scores.py", "resources_servers/quiz/lib/scores.py line 4"),
        ("/venv/lib/python3.12/site-packages/resources_servers/quiz/app.py", "resources_servers/quiz/app.py line 4"),
        ("/home/me/tools/agent.py", "tools/agent.py line 4"),
        ("/srv/resources_servers/quiz/.venv/lib/python3.12/site-packages/pydantic/main.py", "json/decoder.py line"),
    ],
)
def test_the_place_of_an_exception_is_the_innermost_line_that_an_author_wrote(file: str, place: str) -> None:
    code: dict[str, Any] = {}
    exec(compile(AUTHORS, file, "exec"), code)

    with pytest.raises(json.JSONDecodeError) as error:
        code["verify"]("{")
    trace = error.value.__traceback__
    assert trace is not None
    outside = error.value.with_traceback(trace.tb_next)  # without this file, which is an author's, too

    assert place in raised_in(outside, "/verify", "logs/quiz.log")
    assert raised_in(outside, "/verify", "logs/quiz.log").endswith("; logs/quiz.log has the traceback")
