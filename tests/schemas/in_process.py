"""Rollouts of `example_single_tool_call`, played through the real servers in one event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.client import ServerClient
from nemo_gym.http.request import get_json_to_store
from nemo_gym.http.transports.memory import Answer, register_local_app
from nemo_gym.http.transports.response import LocalResponse
from nemo_gym.jsonl import to_pieces
from nemo_gym.servers.direct import DirectLane
from nemo_gym.testing import build_server
from tests.perf.side_by_side import payloads, processes

AGENT = "example_single_tool_call_simple_agent"
CONFIGS = [
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml",
    "responses_api_models/openai_model/configs/openai_model.yaml",
]


def lanes(endpoint_port: int) -> dict[str, DirectLane]:
    """The three servers, registered in the running loop."""
    config = GlobalConfigDictParser().parse_no_environment(
        OmegaConf.create(
            {
                "config_paths": CONFIGS,
                "policy_base_url": f"http://127.0.0.1:{endpoint_port}/v1",
                "policy_api_key": "none",
                "policy_model_name": "canned",
            }
        )
    )
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    found = {}
    for instance in GlobalConfigDictParser().filter_for_server_instance_configs(config):
        server = build_server(instance, client, {})
        lane = found[instance.name] = DirectLane(server.complete_app(), instance.name)
        address, paths = Address(server.config.host, server.config.port), server.CANCELLABLE_PATHS
        register_local_app(instance.name, lane, [address], cancellable_paths=paths, direct=lane)
    return found


async def one_rollout(lane: DirectLane, row: bytes) -> list[bytes | memoryview]:
    """The line that the collector writes, in the pieces that it writes."""
    call = lane.find("POST", "/run")
    assert call is not None
    scope = {"type": "http", "method": "POST", "path": "/run", "headers": [], "query_string": b""}
    answer = await lane.answer(call, scope, row, asyncio.Event().wait)  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    response: Any = LocalResponse("POST", "http://127.0.0.1:1/run", answer.status, answer.headers, answer.body)
    record = await get_json_to_store(response)
    assert record["reward"] == 1.0
    return to_pieces({**record, "_ng_task_index": 0})


def played(
    tmp_path: Path, answer: bytes, work: Callable[[DirectLane, bytes], Awaitable[Any]], image: str | None = None
) -> Any:
    """What `work` returns, done with servers whose endpoint says `answer` last; the row shows the model an image."""
    path = tmp_path / "answer.json"
    path.write_bytes(answer)
    row = orjson.dumps(payloads.row_with(image))

    async def main(port: int) -> Any:
        lane = lanes(port)[AGENT]
        for _ in range(2):  # what is kept between rollouts is there then
            await one_rollout(lane, row)
        return await work(lane, row)

    with processes.helper("endpoint.py", "--answer", str(path)) as (_, port):
        return asyncio.run(main(port))
