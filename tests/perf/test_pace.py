"""What caps that adapt, and a tail that is not waited for, bring: real servers, an endpoint with limits of its own."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.perf.side_by_side.endpoint import message
from tests.perf.side_by_side.estimates import Target, hold
from tests.ports import free_port

BIN = Path(sys.executable).parent
CONFIGS = (
    "+config_paths=[resources_servers/string_match/configs/string_match.yaml,"
    "responses_api_models/openai_model/configs/openai_model.yaml]"
)
LATENCY_S = 0.6
MEASURED_S = 30.0
FIRST, LATER = 50, 20
FIXED = (1, 8, 64, 512, 4096)
TAIL_TASKS, TAIL_LONG = 1_000, 6
TAIL_LATENCY_S = 0.4
_WAITS = re.compile(r"wait ([0-9.]+)")


class Endpoint:
    """Serves so many at once, half of the time fewer; what is above is turned away with 429."""

    def __init__(self) -> None:
        self.limits: tuple[int, int] | None = None
        self.began_s = 0.0
        self.busy = self.refused = self.served = 0
        self.port = 0

    def begin(self, limits: tuple[int, int] | None) -> None:
        self.limits, self.began_s, self.refused, self.served = limits, 0.0, 0, 0

    def _capacity(self) -> int:
        if self.limits is None:
            return 1_000_000
        self.began_s = self.began_s or time.monotonic()
        return self.limits[time.monotonic() - self.began_s > MEASURED_S / 2]

    async def answer(self, request: web.Request) -> web.Response:
        text = json.dumps(await request.json())
        if self.busy >= self._capacity():
            self.refused += 1
            return web.json_response({"error": {"message": "slow down"}}, status=429)
        self.busy += 1
        try:
            found = _WAITS.search(text)
            await asyncio.sleep(float(found[1]) if found else LATENCY_S * random.uniform(0.8, 1.2))
        finally:
            self.busy -= 1
        self.served += 1
        return web.Response(body=message(), content_type="application/json")


@contextmanager
def listening() -> Iterator[Endpoint]:
    endpoint, loop, ready = Endpoint(), asyncio.new_event_loop(), threading.Event()
    over = asyncio.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/responses", endpoint.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", endpoint.port, backlog=4096)
        await site.start()
        ready.set()
        await over.wait()
        await runner.cleanup()

    endpoint.port = free_port()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoint, Path, int]]:
    folder, head = tmp_path_factory.mktemp("pace"), free_port()
    with listening() as endpoint, (folder / "servers.log").open("w") as log:
        model = [f"+policy_base_url=http://127.0.0.1:{endpoint.port}/v1", "+policy_api_key=k", "+policy_model_name=m"]
        command = [str(BIN / "ng_run"), CONFIGS, *model, f"+head_server.port={head}"]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + 120
            while "servers ready!" not in (folder / "servers.log").read_text():
                assert process.poll() is None, (folder / "servers.log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            yield endpoint, folder, head
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def collect(folder: Path, head: int, name: str, *options: str) -> dict[str, Any]:
    command = [
        str(BIN / "ng_collect_rollouts"),
        "+agent_name=string_match_simple_agent",
        "+input_jsonl_fpath=rows.jsonl",
        f"+output_jsonl_fpath={name}.jsonl",
        f"+head_server.port={head}",
        "+json=true",
        "+disable_aggregation=true",
        *options,
    ]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, timeout=600)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def write_rows(folder: Path, prompts: list[str]) -> None:
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": prompt}]}, "expected_answer": "gloves"}
        for prompt in prompts
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_adaptive_against_fixed(servers: tuple[Endpoint, Path, int]) -> None:
    endpoint, folder, head = servers
    write_rows(folder, [f"Is it cold? {number}" for number in range(8_000)])
    collect(folder, head, "warm_up", "+limit=20")

    def against_fixed() -> list[float]:
        served: dict[str, float] = {}
        refused: dict[str, int] = {}
        for cap in (*map(str, FIXED), "auto"):
            lasts_s = 6.0 if cap in ("1", "8") else MEASURED_S  # these never meet a limit
            endpoint.begin((FIRST, LATER))
            collect(folder, head, f"cap_{cap}", f"+num_samples_in_parallel={cap}", f"+run_timeout_s={lasts_s}")
            served[cap], refused[cap] = endpoint.served * MEASURED_S / lasts_s, endpoint.refused
        best = max(served[str(cap)] for cap in FIXED)
        print(f"\n| `num_samples_in_parallel` | rollouts in {MEASURED_S:g} s | of the best fixed one | 429s |")
        print("|---|---|---|---|")
        for cap, count in served.items():
            print(f"| {cap} | {count:.0f} | {count / best:.0%} | {refused[cap]} |")
        return [served["auto"] / best, served["auto"] / served["8"], refused["auto"] / refused["512"]]

    targets = (
        Target("served, of the best fixed cap", least=0.9),
        Target("served, over a cap of 8", least=2),
        Target("refused, over a cap of 512", most=0.5),
    )
    hold(against_fixed, *targets, rounds=1, more=2)


def test_the_tail_with_and_without(servers: tuple[Endpoint, Path, int]) -> None:
    endpoint, folder, head = servers
    endpoint.begin(None)
    last = [f"Is it cold? wait {30 * TAIL_LATENCY_S} {number}" for number in range(TAIL_LONG)]
    others = [f"Is it cold? wait {TAIL_LATENCY_S} {number}" for number in range(TAIL_TASKS - TAIL_LONG)]
    write_rows(folder, [*others, *last])

    def over_before() -> list[float]:
        took: dict[str, float] = {}
        finished: dict[str, int] = {}
        for name, options in {
            "as before": [],
            "longest first": ["+order=longest_first", "+durations_from=tail_0.jsonl"],
            "finish at 0.99": ["+finish_at=0.99", "+straggler_grace_s=1"],
        }.items():
            said = collect(folder, head, f"tail_{len(took)}", "+num_samples_in_parallel=50", *options)
            took[name], finished[name] = said["wall_time_s"], said["finished"]
        print(f"\n| {TAIL_TASKS} rollouts, {TAIL_LONG} of them 30 times as long, 50 at once | wall time | finished |")
        print("|---|---|---|")
        for name, seconds in took.items():
            print(f"| {name} | {seconds:.1f} s | {finished[name]} |")
        assert finished["longest first"] == TAIL_TASKS
        assert finished["finish at 0.99"] == TAIL_TASKS - TAIL_LONG
        return [took[name] / took["as before"] for name in ("longest first", "finish at 0.99")]

    hold(over_before, Target("longest first", most=0.85), Target("finish at 0.99", most=0.75), rounds=1, more=2)
