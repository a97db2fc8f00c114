"""Tests elsewhere hand over answers of their own making, with no more to them than a caller needs."""

import asyncio
import json
import pickle
import traceback
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import aiohttp
import pytest

from nemo_gym.judge import reraise_judge_errors
from nemo_gym.server_utils import MalformedResponseError, ServerResponseError, get_response_json, raise_for_status


class Answer:
    """All that such a stand-in has."""

    def __init__(self, status: int, body: Any) -> None:
        self.status = status
        self.ok = status < 400
        self._body = body

    async def read(self) -> Any:
        return self._body

    async def json(self) -> Any:
        return json.loads(self._body)


def raised_by(answer: Any) -> ServerResponseError:
    with pytest.raises(aiohttp.ClientResponseError) as caught:
        asyncio.run(raise_for_status(answer))
    assert isinstance(caught.value, ServerResponseError)
    return caught.value


@pytest.mark.parametrize("body", [b'{"a": 1}', '{"a": 1}'])
def test_a_stand_in_is_read(body: Any) -> None:
    asyncio.run(raise_for_status(Answer(200, body)))  # type: ignore[arg-type]

    assert asyncio.run(get_response_json(Answer(200, body))) == {"a": 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b"no such tool", "no such tool"])
def test_a_stand_in_with_an_error_status_raises_with_its_body(body: Any) -> None:
    error = raised_by(Answer(404, body))

    assert (error.status, error.response_content) == (404, b"no such tool")
    assert "404 Not Found" in str(error)
    assert pickle.loads(pickle.dumps(error)).status == 404


@pytest.mark.parametrize("kind", [MagicMock, AsyncMock])
def test_a_mock_with_an_error_status_raises(kind: Any) -> None:
    error = raised_by(kind(status=500, ok=False, read=AsyncMock(return_value=b"boom")))

    assert (error.status, error.response_content) == (500, b"boom")


def test_a_stand_in_whose_body_is_no_json_says_so() -> None:
    with pytest.raises(MalformedResponseError, match="not JSON: 'oops'"):
        asyncio.run(get_response_json(Answer(200, "oops")))  # type: ignore[arg-type]


def test_an_error_goes_by_the_name_that_programs_look_for_in_texts() -> None:
    error = raised_by(Answer(500, b"boom"))

    async def judging() -> None:
        raise error

    with pytest.raises(RuntimeError, match="ClientResponseError: 500") as caught:
        asyncio.run(reraise_judge_errors(judging()))
    assert repr(error).startswith("ClientResponseError(")
    assert "ClientResponseError: 500" in "".join(traceback.format_exception(caught.value))
