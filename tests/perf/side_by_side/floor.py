"""The floor: three JSON round trips over HTTP, aiohttp to uvicorn, with the bodies of one rollout.

`serve` answers each path with its canned body after reading what was asked; `drive` plays rollouts against
it, three requests one after another each, and prints how long that took and what CPU it cost the client.
"""

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
import uvloop

Exchange = tuple[Any, Any]


def exchanges(path: Path) -> list[Exchange]:
    """What is asked and answered in one rollout: `/run`, then the two calls of the model."""
    found: list[Exchange] = orjson.loads(path.read_bytes())
    return found


def echo_app(answers: list[Any], delay_s: float) -> Any:
    """An ASGI app that parses each request and writes the answer of its path, the model's after a while."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        orjson.loads(body)
        if delay_s and scope["path"] != "/0":
            await asyncio.sleep(delay_s)
        answer = orjson.dumps(answers[int(scope["path"][1:])])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


async def serve(bodies: Path, delay_s: float) -> None:
    """Print the port, and answer until standard input closes."""
    config = uvicorn.Config(
        echo_app([answer for _, answer in exchanges(bodies)], delay_s),
        port=0,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http="httptools",
        backlog=4096,
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{server.servers[0].sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.should_exit = True
    await task


async def drive(port: int, bodies: Path, rollouts: int, in_flight: int) -> None:
    """Play `rollouts`, `in_flight` at a time, and print seconds and CPU seconds."""
    asked = [request for request, _ in exchanges(bodies)]
    waiting = iter(range(rollouts))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def play() -> None:
            for _ in waiting:
                for number, request in enumerate(asked):
                    url = f"http://127.0.0.1:{port}/{number}"
                    headers = {"content-type": "application/json"}
                    async with session.post(url, data=orjson.dumps(request), headers=headers) as response:
                        orjson.loads(await response.read())

        began, cpu = time.perf_counter(), _cpu_s()
        await asyncio.gather(*(play() for _ in range(in_flight)))
        sys.stdout.write(f"{time.perf_counter() - began} {_cpu_s() - cpu}\n")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("serve", "drive"))
    parser.add_argument("bodies", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--rollouts", type=int)
    parser.add_argument("--in-flight", type=int)
    given = parser.parse_args()
    if given.what == "serve":
        uvloop.run(serve(given.bodies, given.delay))
    else:
        uvloop.run(drive(given.port, given.bodies, given.rollouts, given.in_flight))
