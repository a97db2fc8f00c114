"""Whole rollouts in one process, with or without a recording: real servers, a real endpoint that answers at random."""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from nemo_gym.collect.failures import failure_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import register_local_app, unregister_local_app
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.session import close_global_aiohttp_client
from nemo_gym.keys import AGENTS_TYPE
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.record import failure_record, stamp
from nemo_gym.testing import build_server
from tests.collection.fakes import Row

ENVIRONMENT = "resources_servers/example_multi_step"
GONE = 1
"""A port on which nothing listens."""
_TIMEOUT_S = 60


class Endpoint:
    """A noisy endpoint in a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def asked(self) -> int:
        """How often a model was asked."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/count", timeout=_TIMEOUT_S) as answer:
            return int(answer.read())


@contextmanager
def noisy_endpoint(*arguments: str) -> Iterator[Endpoint]:
    """Serve one until the end."""
    command = [sys.executable, str(Path(__file__).parent / "noisy_endpoint.py"), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Endpoint(int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(_TIMEOUT_S)


def rows_of_example(repeats: int) -> list[Row]:
    lines = (PARENT_DIR / ENVIRONMENT / "data/example.jsonl").read_bytes().splitlines()
    return [
        {**orjson.loads(line), "_ng_task_index": task, "_ng_rollout_index": repeat}
        for task, line in enumerate(lines)
        for repeat in range(repeats)
    ]


class Stage:
    """The servers of a run in an event loop of its own, which runs while rollouts are made."""

    def __init__(self, port: int, *, model: str = "openai_model", **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._up = AsyncExitStack()
        given = {
            "config_paths": [
                f"{ENVIRONMENT}/configs/example_multi_step.yaml",
                f"responses_api_models/{model}/configs/{model}.yaml",
            ],
            "policy_base_url": f"http://127.0.0.1:{port}/v1",
            "policy_api_key": "key-that-nobody-may-see",
            "policy_model_name": "noisy",
            **settings,
        }
        self._config = GlobalConfigDictParser().parse_no_environment(OmegaConf.create(given))
        head = BaseServerConfig(host="127.0.0.1", port=1)
        self._client = ServerClient(head_server_config=head, global_config_dict=self._config)
        self._agent = ""

    def __enter__(self) -> "Stage":
        try:
            self._runner.run(self._start())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._up.aclose())
        self._runner.close()

    async def _start(self) -> None:
        self._up.push_async_callback(close_global_aiohttp_client)
        for instance in GlobalConfigDictParser().filter_for_server_instance_configs(self._config):
            if instance.SERVER_TYPE == AGENTS_TYPE:
                self._agent = instance.name
            server = build_server(instance, self._client, {})
            app = server.complete_app()
            await self._up.enter_async_context(app.router.lifespan_context(app))
            address = Address(server.config.host, server.config.port)
            paths = server.CANCELLABLE_PATHS
            register_local_app(instance.name, app, [address], cancellable_paths=paths)
            self._up.callback(unregister_local_app, instance.name)

    def roll_out(
        self, rows: Sequence[Row], *, told: Callable[[Row], object] = lambda record: None, at_once: int = 1000
    ) -> list[Row]:
        """Make a rollout of every row: what the agent answers, or the line of the failure.

        `told` gets each of them when it has come.
        """

        async def all_of_them() -> list[Row]:
            slots = asyncio.Semaphore(at_once)
            return list(await asyncio.gather(*(self._one(row, told, slots) for row in rows)))

        return self._runner.run(all_of_them())

    def stored(self, row: Row) -> Row:
        """What a collector has of a rollout before it stores it."""

        async def made() -> Row:
            answer = await self._client.post(server_name=self._agent, url_path="/run", json=row)
            return stamp(row, await get_response_json(answer))

        return self._runner.run(made())

    async def _one(self, row: Row, told: Callable[[Row], object], slots: asyncio.Semaphore) -> Row:
        try:
            async with slots:
                answer = await self._client.post(server_name=self._agent, url_path="/run", json=row)
            await raise_for_status(answer)
            record = stamp(row, orjson.loads(await answer.read()))
        except Exception as error:  # noqa: BLE001 - a failed rollout is a record
            record = failure_record(row, failure_of(error, self._agent), datetime.now(UTC), datetime.now(UTC))
        told(record)
        return record


def roll_out(rows: Sequence[Row], port: int, **settings: Any) -> list[Row]:
    """Make a rollout of every row on a stage of their own."""
    with Stage(port, **settings) as stage:
        return stage.roll_out(rows)
