"""A head server and agents that answer as a test says, on one loopback port and in a thread of their own."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from nemo_gym.reward_profile import compute_aggregate_metrics

Row = dict[str, Any]
Answer = Callable[[Row, int], Awaitable[Any]]
"""(row, how often this rollout was asked for, from 1) -> the result, or a response of its own."""

START_TIMEOUT_S = 20.0


async def right_away(row: Row, attempt: int) -> Row:
    """What an agent does unless told otherwise: a success that echoes the row."""
    return {**row, "reward": 1.0, "response": {"usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}}}


class FakeRun:
    """Everything a collector talks to. All agents listen on the head server's port; rows say which one is meant."""

    def __init__(self, *agents: str) -> None:
        self.agents = agents or ("alpha",)
        self.answer: Answer = right_away
        self.port = 0
        self.config: Row = {}
        """What else the head server hands out."""
        self.rows: list[Row] = []
        """Every row that arrived, in that order."""
        self.keep_rows = True
        self.instances: list[Row] = []
        self.asked: Counter[str] = Counter()
        """How often each path was asked for."""
        self.metric_requests: list[Row] = []
        self.metrics_status = 200
        self.metrics_delay_s = 0.0
        self.metrics: Row | None = None
        """What agents answer about metrics; by default what they are."""
        self.when_asked_for_metrics: Callable[[], object] = lambda: None
        self.in_flight = self.most_in_flight = 0

    def keys(self) -> list[tuple[int, int]]:
        """Which rollouts were asked for, in order."""
        return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in self.rows]

    def settings(self) -> Row:
        """The config that the head server hands out."""
        block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        agents = {name: {"responses_api_agents": {"fake_agent": block}} for name in self.agents}
        model = {"policy_model": {"responses_api_models": {"fake_model": {**block, "openai_model": "a-model"}}}}
        return {**agents, **model, **self.config}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._count])
        app.router.add_get("/global_config_dict_yaml", self._config_yaml)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_instances", self._instances)
        app.router.add_post("/run", self._run)
        app.router.add_post("/aggregate_metrics", self._metrics)
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked[request.path] += 1
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _config_yaml(self, request: web.Request) -> web.Response:
        return web.json_response(json.dumps(self.settings()))  # JSON is YAML

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "run_id": "fake-run", "folder": "/somewhere"})

    async def _instances(self, request: web.Request) -> web.Response:
        return web.json_response(self.instances)

    async def _run(self, request: web.Request) -> web.StreamResponse:
        row = await request.json()
        key = (row["_ng_task_index"], row["_ng_rollout_index"])
        if self.keep_rows:
            self.rows.append(row)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await self.answer(row, self.keys().count(key))
        finally:
            self.in_flight -= 1
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def _metrics(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.metric_requests.append(body)
        self.when_asked_for_metrics()
        await asyncio.sleep(self.metrics_delay_s)
        if self.metrics_status != 200:
            return web.json_response({"detail": "the verifier is out of order"}, status=self.metrics_status)
        return web.json_response(self.metrics or compute_aggregate_metrics(body["verify_responses"]).model_dump())


@contextmanager
def serve(run: FakeRun) -> Iterator[FakeRun]:
    """Have `run` listen while inside."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def main() -> None:
        runner = web.AppRunner(run.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        run.port = runner.addresses[0][1]
        ready.set()
        await over.wait()
        await runner.cleanup()

    def run_until_over() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run_until_over)
    thread.start()
    try:
        assert ready.wait(START_TIMEOUT_S), "the fake servers did not start"
        yield run
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(START_TIMEOUT_S)


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(number: int, agent: str | None = None, **fields: Any) -> list[Row]:
    """So many different rows."""
    ref = {} if agent is None else {"agent_ref": {"name": agent}}
    return [{**ref, "responses_create_params": {"input": f"task {n}"}, "n": n, **fields} for n in range(number)]


def lines_in(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys_in(path: Path) -> list[tuple[int, int]]:
    return sorted((line["_ng_task_index"], line["_ng_rollout_index"]) for line in lines_in(path))


def failing_with(status: int, when: Callable[[Row], bool] = lambda row: True) -> Answer:
    """An agent that refuses some rows for good."""

    async def answer(row: Row, attempt: int) -> Any:
        if when(row):
            return web.json_response({"detail": f"no {status}"}, status=status)
        return await right_away(row, attempt)

    return answer
