import asyncio
import json
import pickle

import aiohttp
import pytest

from nemo_gym.errors import GymError
from nemo_gym.http.errors import (
    ERROR_CLASS_HEADER,
    ERROR_SERVER_HEADER,
    ERROR_STATUS_HEADER,
    MalformedResponseError,
    ServerCallError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
    failure_headers,
)


def wrong_key() -> ServerResponseError:
    return ServerResponseError(
        "http://127.0.0.1:1234/run",
        500,
        b'"Hit an exception"',
        headers=[(ERROR_STATUS_HEADER, "401"), (ERROR_SERVER_HEADER, "policy_model"), (ERROR_CLASS_HEADER, "KeyError")],
        attempts=3,
        elapsed_s=1.5,
    )


def test_an_error_answer_survives_pickling_with_everything_it_knows() -> None:
    error = wrong_key()

    copy: ServerResponseError = pickle.loads(pickle.dumps(error))

    assert issubclass(type(copy), aiohttp.ClientResponseError)
    assert (copy.status, copy.response_content, copy.attempts) == (500, b'"Hit an exception"', 3)
    assert (copy.error_status, copy.error_server, copy.error_class) == (401, "policy_model", "KeyError")
    assert str(copy) == str(error)
    assert "500 Internal Server Error from POST http://127.0.0.1:1234/run" in str(error)
    assert "'policy_model'" in str(error)


def test_an_answer_without_error_headers_is_its_own_innermost_failure() -> None:
    error = ServerResponseError("http://h/x", 404, b"nope")

    assert (error.error_status, error.error_server, error.error_class) == (404, None, None)


def test_a_long_body_is_kept_whole_but_shown_in_part() -> None:
    error = ServerResponseError("http://h/x", 599, b"x" * 5000)

    assert len(error.response_content) == 5000
    assert len(str(error)) < 700


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (ServerUnreachableError, (aiohttp.ClientConnectionError, OSError)),
        (ServerLostError, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)),
        (ServerCallTimeoutError, (asyncio.TimeoutError, aiohttp.ServerTimeoutError)),
    ],
)
def test_a_call_without_an_answer_is_caught_by_existing_handlers_and_survives_pickling(
    kind: type[ServerCallError], parents: tuple[type[BaseException], ...]
) -> None:
    error = kind("it broke", url="http://h/x", method="POST", server_name="tools", attempts=4, elapsed_s=2.5)

    copy = pickle.loads(pickle.dumps(error))

    assert isinstance(copy, GymError)
    assert all(isinstance(copy, parent) for parent in parents)
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == "it broke"
    assert repr(copy) == f"{kind.__name__}('it broke')"


def test_a_malformed_body_is_a_json_error_and_survives_pickling() -> None:
    copy: MalformedResponseError = pickle.loads(pickle.dumps(MalformedResponseError("not JSON", b"<html>", 0)))

    assert issubclass(type(copy), json.JSONDecodeError)
    assert copy.body == b"<html>"
    assert "not JSON" in str(copy)


def test_error_headers_name_where_a_failure_began_and_pass_through_every_hop() -> None:
    assert failure_headers(ValueError("x"), "tools") == {
        ERROR_STATUS_HEADER: "500",
        ERROR_SERVER_HEADER: "tools",
        ERROR_CLASS_HEADER: "ValueError",
    }
    assert failure_headers(wrong_key(), "agent") == {
        ERROR_STATUS_HEADER: "401",
        ERROR_SERVER_HEADER: "policy_model",
        ERROR_CLASS_HEADER: "KeyError",
    }


def test_error_headers_of_an_endpoint_that_sends_none_carry_its_status() -> None:
    headers = failure_headers(ServerResponseError("http://endpoint", 401, b""), "policy_model")

    assert headers[ERROR_STATUS_HEADER] == "401"
    assert headers[ERROR_SERVER_HEADER] == "policy_model"


def test_error_headers_of_a_dead_server_name_that_server() -> None:
    error = ServerUnreachableError("refused", server_name="verifier")

    assert failure_headers(error, "agent")[ERROR_SERVER_HEADER] == "verifier"


def test_error_headers_are_ascii_whatever_a_class_is_called() -> None:
    strange = type("Fähler", (ValueError,), {})

    assert failure_headers(strange(), "a")[ERROR_CLASS_HEADER] == "F?hler"
