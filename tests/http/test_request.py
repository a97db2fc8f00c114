import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from nemo_gym.http import request as request_module
from nemo_gym.http.errors import (
    MalformedResponseError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
)
from nemo_gym.http.request import Call, call_failure, get_response_json, json_bytes, raise_for_status, request
from nemo_gym.retry import RetryPolicy, Tries

Configure = Callable[..., Any]
Serve = Callable[..., int]
StartPeer = Callable[[Callable[[socket.socket, int], None]], Any]


def echo_app() -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return {"body": (await request.body()).decode(), "type": request.headers.get("content-type")}

    @app.post("/broken")
    async def broken() -> Response:
        return Response(b"\"ValueError('x')\"", 500, {"x-nemo-gym-error-class": "ValueError"})

    return app


def test_a_json_body_goes_out_as_json_even_when_it_is_empty(serve: Serve) -> None:
    url = f"http://127.0.0.1:{serve(echo_app())}/echo"

    async def bodies() -> list[Any]:
        values: list[Any] = [{}, [], {"a": "é"}]
        return [await get_response_json(await request("POST", url, json=value)) for value in values]

    assert asyncio.run(bodies()) == [
        {"body": "{}", "type": "application/json"},
        {"body": "[]", "type": "application/json"},
        {"body": '{"a":"é"}', "type": "application/json"},
    ]


def test_a_content_type_of_ones_own_is_kept(serve: Serve) -> None:
    url = f"http://127.0.0.1:{serve(echo_app())}/echo"

    async def body() -> Any:
        headers = {"content-type": "application/vnd.x+json"}
        return await get_response_json(await request("POST", url, json={"a": 1}, headers=headers))

    assert asyncio.run(body())["type"] == "application/vnd.x+json"


class Point(BaseModel):
    x: int = 0
    y: int = 0


class Renamed(Point):
    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {"dumped": super().model_dump(**options)}


def test_of_models_only_the_fields_that_were_set_are_sent() -> None:
    assert json_bytes(Point(x=1)) == b'{"x":1}'
    assert json_bytes({"point": Point(y=2)}) == b'{"point":{"y":2}}'
    assert json_bytes(Renamed(x=1)) == b'{"dumped":{"x":1}}'


def test_what_cannot_be_sent_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="not JSON serializable: object"):
        asyncio.run(request("POST", "http://127.0.0.1:9/x", json={"a": object()}))


def test_an_error_status_is_raised_with_its_body_and_headers(serve: Serve) -> None:
    url = f"http://127.0.0.1:{serve(echo_app())}/broken"

    async def call() -> None:
        await raise_for_status(await request("POST", url, json={}))

    with pytest.raises(ServerResponseError) as caught:
        asyncio.run(call())

    assert caught.value.status == 500
    assert caught.value.response_content == b"\"ValueError('x')\""
    assert caught.value.error_class == "ValueError"
    assert isinstance(caught.value, aiohttp.ClientResponseError)


def test_with_debugging_on_the_error_answer_is_logged(
    serve: Serve, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure(global_aiohttp_client_request_debug=True)
    caplog.set_level(logging.INFO, request_module.__name__)
    url = f"http://127.0.0.1:{serve(echo_app())}/broken"

    async def call() -> None:
        await raise_for_status(await request("POST", url, json={}))

    with pytest.raises(ServerResponseError):
        asyncio.run(call())
    assert "ValueError('x')" in caplog.text


def test_a_server_that_comes_up_late_is_reached(
    serve: Serve, free_port: int, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    configure()
    caplog.set_level(logging.WARNING)
    refused = threading.Event()

    class SaysWhenRefused(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            refused.set()

    handler = SaysWhenRefused()
    logging.getLogger("nemo_gym.retry").addHandler(handler)

    def start_late() -> None:
        assert refused.wait(10)
        serve(echo_app(), free_port)

    starter = threading.Thread(target=start_late)
    starter.start()

    async def call() -> int:
        async with await request("POST", f"http://127.0.0.1:{free_port}/echo", _internal=True, json={}) as response:
            return response.status

    try:
        assert asyncio.run(call()) == 200
    finally:
        starter.join()
        logging.getLogger("nemo_gym.retry").removeHandler(handler)
    assert len([record for record in caplog.records if "Cannot connect" in record.getMessage()]) == 1


def test_a_server_that_never_comes_up_is_given_up_after_the_allowed_tries(free_port: int, configure: Configure) -> None:
    configure(http_retry_max_tries=3)
    url = f"http://127.0.0.1:{free_port}/run"

    with pytest.raises(ServerUnreachableError) as caught:
        asyncio.run(request("POST", url, _internal=True, json={}))

    assert caught.value.attempts == 3
    assert caught.value.elapsed_s > 0
    assert url in str(caught.value)
    assert "tries: 3" in str(caught.value)
    assert "ng_status" in str(caught.value)


def test_a_server_that_never_comes_up_is_given_up_after_the_allowed_time(free_port: int, configure: Configure) -> None:
    configure(http_retry_max_elapsed_s=0.2, http_retry_max_tries=10_000)

    with pytest.raises(ServerUnreachableError) as caught:
        asyncio.run(request("POST", f"http://127.0.0.1:{free_port}/run", json={}))

    assert 1 < caught.value.attempts < 10_000
    assert "Check the address" in str(caught.value)


def test_a_name_that_does_not_resolve_is_tried_again_within_bounds(configure: Configure) -> None:
    configure(http_retry_max_tries=2)

    with pytest.raises(ServerUnreachableError, match=r"no-such-host\.invalid") as caught:
        asyncio.run(request("POST", "http://no-such-host.invalid:80/run", json={}))

    assert caught.value.attempts == 2


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE"])
def test_a_request_that_was_sent_is_never_sent_again(method: str, peer: StartPeer, configure: Configure) -> None:
    configure()
    hangs_up = peer(lambda connection, number: connection.close())

    with pytest.raises(ServerLostError, match="may have been carried out") as caught:
        asyncio.run(request(method, f"http://127.0.0.1:{hangs_up.port}/tool", _internal=True, json={"a": 1}))

    assert len(hangs_up.received) == 1
    assert caught.value.attempts == 1


def test_a_process_without_file_descriptors_is_told_so() -> None:
    nothing_left = aiohttp.ClientConnectorError(MagicMock(), OSError(errno.EMFILE, "Too many open files"))

    failure = call_failure(nothing_left, Call("POST", "http://h/x"), Tries(RetryPolicy(), failures=1))

    assert "ulimit -n" in str(failure)


def test_an_error_whose_body_breaks_off_is_still_that_error(peer: StartPeer) -> None:
    def break_off(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nhalf")
        connection.close()

    port = peer(break_off).port

    async def call() -> None:
        await raise_for_status(await request("GET", f"http://127.0.0.1:{port}/x"))

    with pytest.raises(ServerResponseError) as caught:
        asyncio.run(call())
    assert (caught.value.status, caught.value.response_content) == (503, b"")


def keep_alive_answer() -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_request_on_a_reused_connection_is_not_sent_again_either(peer: StartPeer, configure: Configure) -> None:
    configure()
    second_requests: list[bytes] = []

    def answer_once(connection: socket.socket, number: int) -> None:
        connection.sendall(keep_alive_answer())
        second_requests.append(connection.recv(65536))
        connection.close()

    tool = peer(answer_once)
    url = f"http://127.0.0.1:{tool.port}/tool"

    async def twice() -> None:
        await (await request("POST", url, json={})).read()
        with pytest.raises(ServerLostError):
            await request("POST", url, json={})

    asyncio.run(twice())
    assert len(tool.received) == len(second_requests) == 1


def test_a_connection_the_server_closed_in_time_is_replaced(peer: StartPeer, configure: Configure) -> None:
    configure()

    def answer_and_close(connection: socket.socket, number: int) -> None:
        connection.sendall(keep_alive_answer())
        connection.close()

    tool = peer(answer_and_close)
    url = f"http://127.0.0.1:{tool.port}/tool"

    async def twice() -> None:
        for _ in range(2):
            await (await request("POST", url, json={})).read()
            await asyncio.sleep(0.1)

    asyncio.run(twice())
    assert len(tool.received) == 2


def test_a_broken_body_names_the_server_it_came_from(peer: StartPeer, configure: Configure) -> None:
    configure()

    def break_off(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        connection.close()

    port = peer(break_off).port

    async def call() -> None:
        await get_response_json(await request("GET", f"http://127.0.0.1:{port}/x"))

    with pytest.raises(ServerLostError, match=f"http://127.0.0.1:{port}/x"):
        asyncio.run(call())


def test_a_server_that_never_answers_is_not_waited_for_for_ever(peer: StartPeer, configure: Configure) -> None:
    configure(http_total_timeout_s=0.2)
    black_hole = peer(lambda connection, number: None)

    with pytest.raises(ServerCallTimeoutError, match="http_total_timeout_s"):
        asyncio.run(request("POST", f"http://127.0.0.1:{black_hole.port}/x", _internal=True, json={}))

    assert len(black_hole.received) == 1


def test_a_call_may_have_a_timeout_of_its_own(peer: StartPeer) -> None:
    black_hole = peer(lambda connection, number: None)

    with pytest.raises(TimeoutError):
        asyncio.run(request("POST", f"http://127.0.0.1:{black_hole.port}/x", timeout=aiohttp.ClientTimeout(total=0.1)))


def test_a_wrong_url_is_an_error_at_once() -> None:
    with pytest.raises(aiohttp.InvalidURL):
        asyncio.run(request("GET", "http://"))


def test_a_body_that_is_not_json_is_quoted_with_its_address(peer: StartPeer, http_answer: Any) -> None:
    page = http_answer("200 OK", b"<html>Welcome</html>")
    port = peer(lambda connection, number: connection.sendall(page)).port

    async def call() -> None:
        await get_response_json(await request("GET", f"http://127.0.0.1:{port}/v1/models"))

    with pytest.raises(MalformedResponseError, match=r"/v1/models answered 200.*<html>Welcome"):
        asyncio.run(call())


def test_json_that_only_python_writes_is_read_too(peer: StartPeer, http_answer: Any) -> None:
    body = http_answer("200 OK", b'{"x": NaN, "y": "\\ud83d"}')
    port = peer(lambda connection, number: connection.sendall(body)).port

    async def call() -> Any:
        return await get_response_json(await request("GET", f"http://127.0.0.1:{port}/"))

    value = asyncio.run(call())
    assert value["x"] != value["x"]
    assert value["y"] == "\ud83d"
