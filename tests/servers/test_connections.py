"""What callers get over a connection to a server, and what a server notices of its callers."""

import asyncio
import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from nemo_gym.runs.record import without_garbage_collection
from nemo_gym.servers.gateway import Duties, Gateway

DEADLINE_S = 20.0
WENT_ON = threading.Event()


def app() -> FastAPI:
    """Answers of every kind."""
    made = FastAPI()

    @made.post("/whole")
    @made.head("/whole")
    async def whole() -> Response:
        return Response(b"hello", headers={"x-a": "1"})

    @made.post("/nothing")
    async def nothing() -> Response:
        return Response(status_code=204)

    @made.post("/long")
    async def long() -> Response:
        return Response(b"x" * 1_000_000)

    @made.post("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> Any:
            while not WENT_ON.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.005)
            yield b"hello"

        return StreamingResponse(parts())

    @made.post("/breaks_off")
    async def breaks_off() -> StreamingResponse:
        async def parts() -> Any:
            raise RuntimeError("no more")
            yield b""

        return StreamingResponse(parts(), headers={"content-length": "5"})

    return made


@contextmanager
def serving(served: Any, **options: Any) -> Iterator[int]:
    """`served` on a loopback port, in a thread of its own."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        plain: dict[str, Any] = {"access_log": False, "server_header": False, "date_header": False, "lifespan": "off"}
        server = uvicorn.Server(uvicorn.Config(served, log_level="critical", **plain, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


@contextmanager
def line_to(port: int) -> Iterator[socket.socket]:
    """A connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as line:
        yield line


def asking(path: str, method: str = "POST", *headers: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", "Content-Length: 0", *headers, "", ""]).encode()


def received(line: socket.socket, until: bytes, answers: int = 1) -> bytes:
    """What comes over a connection until it has come to `until` after so many answers, or to its end."""
    whole = b""
    while not (whole.endswith(until) and whole.count(b"HTTP/1.1 ") >= answers) and (piece := line.recv(1_000_000)):
        whole += piece
    return whole


def test_answers_of_every_kind_come_over_one_connection_as_they_are() -> None:
    with serving(app()) as port, line_to(port) as line:
        line.sendall(asking("/whole"))
        assert received(line, b"hello").startswith(b"HTTP/1.1 200 OK\r\n")
        line.sendall(asking("/whole", "HEAD"))
        assert b"content-length: 5\r\n" in received(line, b"\r\n\r\n")
        line.sendall(asking("/nothing"))
        assert received(line, b"\r\n\r\n").startswith(b"HTTP/1.1 204")
        line.sendall(asking("/long"))
        assert received(line, b"x" * 900_000).endswith(b"\r\n\r\n" + b"x" * 1_000_000)
        line.sendall(asking("/whole") + asking("/nothing") + asking("/whole"))  # none waits for the one before
        assert received(line, b"hello", 3).count(b"hello") == 2
        line.sendall(asking("/stream"))
        assert b"transfer-encoding: chunked" in received(line, b"\r\n\r\n")  # before there is a body
        WENT_ON.set()
        assert received(line, b"0\r\n\r\n", 0).endswith(b"hello\r\n0\r\n\r\n")
        line.sendall(asking("/whole", "POST", "Connection: close"))
        assert received(line, b"\0").endswith(b"hello")  # and the end


def test_an_answer_that_breaks_off_is_one_without_its_body() -> None:
    with serving(app()) as port, line_to(port) as line:
        line.sendall(asking("/breaks_off"))

        assert b"content-length: 5\r\n" in received(line, b"\0")


@pytest.mark.parametrize("path", ["/run", "/tool"])
def test_who_goes_before_the_answer_takes_its_rollout_along_and_no_tool(path: str) -> None:
    begun, ended = threading.Event(), []

    async def working(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        try:
            for _ in range(20):
                await asyncio.sleep(0.01)
            ended.append("done")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        with contextlib.suppress(RuntimeError):
            await send({"type": "http.response.start", "status": 200, "headers": []})

    with serving(Gateway(working, Duties("tools", cancellable_paths=frozenset({"/run"})))) as port:
        with line_to(port) as line:
            line.sendall(asking(path))
            assert begun.wait(DEADLINE_S)
        deadline_s = time.monotonic() + DEADLINE_S
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.005)

    assert ended == ["cancelled" if path == "/run" else "done"]


def test_a_connection_is_closed_when_nothing_has_come_for_so_long_and_not_before() -> None:
    with serving(app(), timeout_keep_alive=1) as port, line_to(port) as line:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2.5:  # never silent for a second, but open for longer
            line.sendall(asking("/whole"))
            assert received(line, b"hello").endswith(b"hello")
            time.sleep(0.25)
        last_s = time.monotonic() - 0.25
        assert line.recv(1) == b""
        assert 0.9 <= time.monotonic() - last_s < DEADLINE_S


LONG = bytes(range(256)) * 8_000


class Asked:
    """An ASGI app that notes what it receives, and in how many messages, and answers with that."""

    def __init__(self, *, reads: bool = True) -> None:
        self.received: list[Any] = []
        self.reads = reads

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = b"", self.reads
        while more:
            self.received.append(await receive())
            body += self.received[-1].get("body", b"")
            more = self.received[-1].get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": b"%07d" % len(body)})


def posting(body: bytes, *headers: str) -> bytes:
    """A request with a body."""
    lines = ["POST / HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_follows_a_long_body_is_the_next_request(loop: str) -> None:
    asked = Asked()
    with serving(asked, loop=loop) as port, line_to(port) as line:
        for _ in range(3):
            line.sendall(posting(LONG))
            assert received(line, b"2048000").startswith(b"HTTP/1.1 200 OK\r\n")
        line.sendall(posting(LONG) + posting(b"short") + posting(LONG) + posting(b"end"))
        assert received(line, b"0000003", 4).count(b"HTTP/1.1 200 OK") == 4

    bodies = [message["body"] for message in asked.received]
    assert b"".join(bodies) == LONG * 4 + b"short" + LONG + b"end"
    assert all(type(body) is bytes for body in bodies)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_caller_who_goes_before_his_long_body_is_there_has_gone(loop: str) -> None:
    asked = Asked()
    with serving(asked, loop=loop) as port:
        with line_to(port) as line:
            line.sendall(posting(LONG)[:-1])
            time.sleep(0.2)
        deadline_s = time.monotonic() + DEADLINE_S
        while {"type": "http.disconnect"} not in asked.received and time.monotonic() < deadline_s:
            time.sleep(0.01)

    assert asked.received[-1] == {"type": "http.disconnect"}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_of_a_long_body_is_kept_with_its_connection(loop: str) -> None:
    asked = Asked()
    with serving(asked, loop=loop) as port, line_to(port) as line, without_garbage_collection():
        tracemalloc.start()
        try:
            for _ in range(3):
                line.sendall(posting(LONG))
                received(line, b"2048000")
                asked.received.clear()
            deadline_s = time.monotonic() + DEADLINE_S
            while tracemalloc.get_traced_memory()[0] >= len(LONG) // 2:  # the server may be at it still
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        finally:
            tracemalloc.stop()


def test_of_a_long_body_that_nobody_asks_for_little_is_read() -> None:
    asked = Asked(reads=False)
    with serving(asked) as port, line_to(port) as line:
        line.sendall(posting(LONG))

        assert received(line, b"0000000").startswith(b"HTTP/1.1 200 OK\r\n")
