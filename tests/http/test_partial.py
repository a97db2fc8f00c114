"""What was there of a response when a rollout failed travels with the error, and only to those who ask."""

import json
from typing import Any

import orjson
import pytest

from nemo_gym.http.run_answers import (
    HAS_PARTIAL,
    LEFT_OUT,
    WANTS_PARTIAL,
    ErrorBody,
    bounded_response,
    keep_partial,
    partial_of,
    taken_apart,
)
from nemo_gym.servers.failures import Failures


def response(*texts: str) -> dict[str, Any]:
    return {"id": "r", "output": [{"type": "message", "text": text} for text in texts], "usage": None}


def failure(response: Any) -> ValueError:
    error = ValueError("broke")
    keep_partial(error, response)
    return error


def answer(error: ValueError, *headers: tuple[bytes, bytes]) -> Any:
    return Failures("Agent___a", "a").answer(error, {"path": "/run", "headers": list(headers)})


def test_only_who_asks_gets_more_than_the_text_of_the_error() -> None:
    error = failure(response("one"))

    plain = answer(error)
    full = answer(error, (WANTS_PARTIAL.encode(), b"true"))

    assert json.loads(plain.body) == "ValueError('broke')"
    assert HAS_PARTIAL not in plain.headers
    assert taken_apart(full.body, full.headers) == ErrorBody(plain.body, response("one"))
    assert full.status_code == plain.status_code == 500


def test_without_anything_to_keep_the_answer_is_the_text() -> None:
    assert json.loads(answer(failure(None), (WANTS_PARTIAL.encode(), b"true")).body) == "ValueError('broke')"


def test_who_noted_it_first_knows_best() -> None:
    error = failure(response("closest to where it broke"))
    keep_partial(error, response("further away"))

    assert partial_of(error) == response("closest to where it broke")


def test_a_long_response_loses_its_last_items_and_says_how_many() -> None:
    long = response(*("x" * 1_000 for _ in range(100)))

    kept = bounded_response(long, 10_000)

    assert kept is not None
    assert len(orjson.dumps(kept)) <= 10_000
    assert len(kept["output"]) + kept[LEFT_OUT] == 100
    assert 5 < len(kept["output"]) < 10
    assert bounded_response(long) == long


TOO_LONG = "x" * 2_000_000


@pytest.mark.parametrize("odd", ["text", 7, [1], object(), response(TOO_LONG), {"output": 3, "x": TOO_LONG}])
def test_what_is_no_response_or_too_long_is_not_kept(odd: object) -> None:
    assert bounded_response(odd) is None


@pytest.mark.parametrize("body", [b"", b"oops", b"[]", b'{"error": "x"}', b'"x"'])
def test_a_server_that_promises_and_does_not_deliver_is_read_as_before(body: bytes) -> None:
    assert taken_apart(body, {HAS_PARTIAL: "true"}) == ErrorBody(body)
