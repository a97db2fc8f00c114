"""What the product adds to a rollout whose model takes its time, and what a rollout in flight occupies."""

import asyncio
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import orjson
import psutil
import uvloop

from tests.perf.side_by_side import processes

MODEL_CALLS = 2


def added_ms(folder: Path, endpoint_port: int, delay_s: float, in_flight: int, rollouts: int) -> float:
    """Median time of `/run` beyond that of its calls of the model, made by the same client at the same pace; in ms.

    So many rollouts are in flight on average.
    """
    row = orjson.loads((processes.ROOT / processes.INPUT).read_bytes().splitlines()[0])
    body = orjson.dumps(row)
    per_second = in_flight / (MODEL_CALLS * delay_s)
    model = f"http://127.0.0.1:{endpoint_port}/v1/responses"
    one_call_s = statistics.median(uvloop.run(_drive(model, body, MODEL_CALLS * per_second, in_flight, rollouts)))
    agent = f"http://127.0.0.1:{agent_port(folder)}/run"
    rollout_s = statistics.median(uvloop.run(_drive(agent, body, per_second, in_flight, rollouts)))
    return 1000 * (rollout_s - MODEL_CALLS * one_call_s)


async def _drive(url: str, body: bytes, per_second: float, in_flight: int, rollouts: int) -> list[float]:
    """Begin rollouts at random moments, as independent callers would: none waits for another's end.

    Only when twice as many as meant are in flight (the servers cannot keep up), the next one waits.
    """
    arrivals = random.Random(8)
    room = asyncio.Semaphore(2 * in_flight)
    took: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def play(number: int) -> None:
            began = time.perf_counter()
            headers = {"content-type": "application/json"}
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                response.raise_for_status()
            room.release()
            if number >= rollouts // 5:  # the first ones open connections
                took.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            due_s = time.perf_counter()
            for number in range(rollouts):
                due_s += arrivals.expovariate(per_second)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                await room.acquire()
                group.create_task(play(number))
    return took


def agent_port(folder: Path) -> int:
    """The port of the agent, as the head server knows it."""
    url = f"http://127.0.0.1:{processes.head_port(folder)}/server_instances"
    script = f"import urllib.request; print(urllib.request.urlopen({url!r}).read().decode())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    found = [item for item in orjson.loads(done.stdout) if "agent" in item["process_name"]]
    return int(found[0]["port"])


def kb_per_rollout_in_flight(folder: Path, launcher: psutil.Process, in_flight: int) -> float:
    """Memory of all processes with that many rollouts waiting for a slow model, less idle, per rollout."""
    servers = processes.family(launcher)
    warm = processes.collect(folder, "warm.jsonl", 1, 1)
    subprocess.run(warm, cwd=folder, check=True, capture_output=True, timeout=120)
    alone = _collector_peak_mb(folder, servers, 1)
    many = _collector_peak_mb(folder, servers, in_flight)
    return 1000 * (many - alone) / (in_flight - 1)


def _collector_peak_mb(folder: Path, servers: list[psutil.Process], in_flight: int) -> float:
    repeats = -(-in_flight // processes.ROWS)
    command = processes.collect(folder, f"memory-{in_flight}-{time.monotonic_ns()}.jsonl", in_flight, repeats)
    quiet = subprocess.DEVNULL
    most = 0.0
    with subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet) as process:
        collector = psutil.Process(process.pid)
        while process.poll() is None:
            most = max(most, processes.memory_mb([*servers, collector]))
            time.sleep(0.1)
    return most
