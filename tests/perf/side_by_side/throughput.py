"""Rollouts per second and CPU per rollout: the floor's and the product's, at several numbers in flight."""

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from tests.perf.side_by_side import processes


@dataclass
class Reading:
    """One measurement of `rollouts` rollouts."""

    rollouts: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    endpoint_cpu_s: float = 0.0

    def minus(self, other: "Reading") -> "Reading":
        """What the additional rollouts took: start-up falls out."""
        return Reading(
            *(mine - theirs for mine, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    @property
    def per_second(self) -> float:
        """Rollouts per second."""
        return self.rollouts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU of both sides per rollout, without the endpoint."""
        return 1000 * (self.client_cpu_s + self.server_cpu_s) / self.rollouts


def measure_floor(bodies: Path, rollouts: int, in_flight: int, delay_s: float = 0.0) -> Reading:
    """Three echoes per rollout, the two of the model after a while."""
    with processes.helper("floor.py", "serve", str(bodies), "--delay", str(delay_s)) as (server, port):
        command = [sys.executable, str(processes.HERE / "floor.py"), "drive", str(bodies)]
        command += ["--port", str(port), "--in-flight", str(in_flight)]
        subprocess.run([*command, "--rollouts", str(min(rollouts, 4 * in_flight))], check=True, capture_output=True)
        before = processes.cpu_s([server])
        done = subprocess.run([*command, "--rollouts", str(rollouts)], check=True, capture_output=True, text=True)
        seconds, client_cpu_s = map(float, done.stdout.split())
        return Reading(rollouts, seconds, client_cpu_s, processes.cpu_s([server]) - before)


def run_collector(
    folder: Path,
    launcher: psutil.Process,
    endpoint: psutil.Process,
    in_flight: int,
    repeats: int,
    rows: Path | None = None,
) -> Reading:
    """One whole `ng_collect_rollouts`, start-up included."""
    output = f"rollouts-{time.monotonic_ns()}.jsonl"
    servers = processes.family(launcher)
    servers_before, endpoint_before = processes.cpu_s(servers), processes.cpu_s([endpoint])
    began, own_before = time.perf_counter(), os.times()
    command = processes.collect(folder, output, in_flight, repeats, rows=rows)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
    seconds, own = time.perf_counter() - began, os.times()
    found = (folder / output).read_bytes().count(b"\n")
    if found != processes.ROWS * repeats:
        raise RuntimeError(f"{found} rollouts instead of {processes.ROWS * repeats}: the measurement is worthless")
    return Reading(
        found,
        seconds,
        own.children_user + own.children_system - own_before.children_user - own_before.children_system,
        processes.cpu_s(servers) - servers_before,
        processes.cpu_s([endpoint]) - endpoint_before,
    )


def measure_product(
    folder: Path, launcher: psutil.Process, endpoint: psutil.Process, in_flight: int, rollouts: int
) -> Reading:
    """What `rollouts` more cost the real commands: a longer run less a shorter one."""
    repeats = max(2, rollouts // processes.ROWS)
    short = max(1, repeats // 6)
    run_collector(folder, launcher, endpoint, in_flight, short)
    before = run_collector(folder, launcher, endpoint, in_flight, short)
    return run_collector(folder, launcher, endpoint, in_flight, repeats).minus(before)


def bodies_of_one_rollout(folder: Path, extra_bytes: int = 0) -> Path:
    """Collect one rollout and keep what was asked and answered, for the floor to echo."""
    from tests.perf.side_by_side import endpoint

    with (
        processes.helper("endpoint.py", "--extra-bytes", str(extra_bytes)) as (_, port),
        processes.servers(folder, port),
    ):
        command = processes.collect(folder, "one.jsonl", 1, 1)
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    record = orjson.loads((folder / "one.jsonl").read_bytes().splitlines()[0])
    asked = orjson.loads((folder / "one_materialized_inputs.jsonl").read_bytes().splitlines()[0])
    params = record["responses_create_params"]
    second = {**params, "input": [*params["input"], *record["response"]["output"][:2]]}
    exchanges = [
        [asked, record],
        [{**params, "model": "canned"}, orjson.loads(endpoint.CALL)],
        [{**second, "model": "canned"}, orjson.loads(endpoint.message(extra_bytes))],
    ]
    path = folder / f"bodies-{extra_bytes}.json"
    path.write_bytes(orjson.dumps(exchanges))
    return path


def endpoint_capacity(requests: int = 20_000) -> float:
    """Requests per second that the endpoint answers when asked over bare sockets, one core for it alone."""
    import asyncio

    import uvloop

    body = b'{"input":"go"}'
    request = b"POST /v1/responses HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests // 16):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.close()

    async def all_at_once(port: int) -> None:
        await asyncio.gather(*(ask(port) for _ in range(16)))

    with processes.helper("endpoint.py") as (process, port):
        before = processes.cpu_s([process])
        uvloop.run(all_at_once(port))
        return requests / (processes.cpu_s([process]) - before)
