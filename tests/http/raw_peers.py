"""Servers that answer with the very bytes a test says."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 30.0


@dataclass
class Line:
    """A server's side of one connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self) -> bytes:
        """The next request; empty at the end of the connection."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            body = await self.reader.readexactly(int(sizes[0])) if sizes else b""
        except (asyncio.IncompleteReadError, OSError):
            self.is_over.set()
            return b""
        self.requests += 1
        return head + body

    async def say(self, data: bytes, size: int = 0) -> None:
        """Send bytes, in pieces of `size` if that is not 0."""
        size = size or len(data) or 1
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """End the connection the hard way."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Line], Awaitable[None]]


@dataclass
class RawPeer:
    """A server and its connections so far."""

    port: int = 0
    lines: list[Line] = field(default_factory=list)


def plain(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """An answer after which the connection stays open."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def numbering(line: Line) -> None:
    """Answer each request with the numbers of its connection and of itself on that."""
    while await line.request():
        await line.say(plain(b"%d.%d" % (line.number, line.requests)))


def once(data: bytes, size: int = 0) -> Behaviour:
    """Answer the first request with `data`, then end the connection."""

    async def behave(line: Line) -> None:
        await line.request()
        await line.say(data, size)

    return behave


async def silence(line: Line) -> None:
    """Read requests, never answer."""
    while await line.request():
        pass


@asynccontextmanager
async def peer_on(
    behave: Behaviour, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RawPeer]:
    """A server in the running event loop."""
    peer = RawPeer()
    under_way: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.add(asyncio.current_task())
        peer.lines.append(line := Line(len(peer.lines) + 1, reader, writer))
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await behave(line)
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, host, port, ssl=tls)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for task in under_way:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in under_way if task is not None), return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that is bound to happen."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - what happens elsewhere has no event
            await asyncio.sleep(0.002)
