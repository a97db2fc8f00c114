"""The connection pool: its limits can be raised while it is in use, and it does not run over a busy server.

A connection counts as open once the server's kernel has queued it, long before the server takes it up. When
thousands are opened at once and the server is busy, that queue overflows; the kernel then lets some
connections look open that are not, and breaks them off half a minute later. So after every so many new
connections to a server one question is asked and its answer awaited: the queue is taken up in order, so the
answer means that all earlier ones have been taken up, too.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import ClientRequest, ClientTimeout, TCPConnector

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

OPENED_UNSEEN = 1_024
"""New connections to one server before it is asked; the usual queues hold 2,048 or 4,096."""
_ANSWER_TIMEOUT_S = 60.0


@dataclass
class _Queue:
    """What may wait in a server's queue."""

    opened: int = 0
    """Connections since it last answered."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class GymConnector(TCPConnector):
    """The pool of one event loop."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._queues: dict[tuple[str, int], _Queue] = {}

    def ensure_capacity(self, connections: int) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""
        if self._limit_per_host:
            self._limit_per_host = max(self._limit_per_host, connections)
        if self._limit:
            self._limit = max(self._limit, connections)

    async def _create_connection(
        self,
        req: ClientRequest,
        traces: "list[Trace]",
        timeout: ClientTimeout,  # noqa: ASYNC109 - aiohttp's own signature
    ) -> "ResponseHandler":
        if req.url.host is not None and req.url.port is not None and req.url.scheme == "http" and req.proxy is None:
            await self._wait_for_the_queue(req.url.host, req.url.port)
        return await super()._create_connection(req, traces, timeout)

    async def _wait_for_the_queue(self, host: str, port: int) -> None:
        queue = self._queues.setdefault((host, port), _Queue())
        if queue.opened >= OPENED_UNSEEN:
            async with queue.turn:
                if queue.opened >= OPENED_UNSEEN:
                    await _wait_for_an_answer(host, port)
                    queue.opened = 0
        queue.opened += 1


async def _wait_for_an_answer(host: str, port: int) -> None:
    """Ask something harmless; what the answer is, or why there is none, is for the real calls to find out."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                name = f"[{host}]" if ":" in host else host
                writer.write(f"GET / HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
                await reader.read(1)
            finally:
                writer.close()
