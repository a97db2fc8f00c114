"""What one rollout costs, in calls: seconds differ from machine to machine, counts do not.

A rollout of `example_single_tool_call` is played through the real servers in one event loop, against the canned
endpoint of the benchmark. Whoever makes it cheaper lowers the figures here; nothing may raise them unnoticed.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.call_log import ASKED
from nemo_gym.http.client import ServerClient
from nemo_gym.http.transports.memory import Answer, register_local_app
from nemo_gym.servers.direct import DirectLane
from nemo_gym.testing import build_server
from tests.perf.side_by_side import processes

AGENT = "example_single_tool_call_simple_agent"
CONFIGS = [
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml",
    "responses_api_models/openai_model/configs/openai_model.yaml",
]
ROLLOUTS = 20

VALIDATIONS = {"validate_json", "validate_python"}
JSON_PASSES = {"validate_json", "to_json", "loads", "dumps"}
MOST_VALIDATIONS = 11
MOST_JSON_PASSES = 22
HTTP_REQUESTS = 2
MOST_CALLS = 1_160
MOST_CALLS_TO_TELL_TIMES = 45
"""What a collector that asks for the times of the calls adds to it."""


async def rollouts(lane: DirectLane, number: int, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    row = orjson.loads((processes.ROOT / processes.INPUT).read_bytes().splitlines()[0])
    call = lane.find("POST", "/run")
    assert call is not None
    for _ in range(number):
        scope = {"type": "http", "method": "POST", "path": "/run", "headers": list(headers), "query_string": b""}
        answer = await lane.answer(call, scope, orjson.dumps(row), asyncio.Event().wait)  # type: ignore[arg-type]
        assert isinstance(answer, Answer)
        assert orjson.loads(answer.body)["reward"] == 1.0
        assert (ASKED[0] in dict(answer.headers)) is bool(headers)


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


async def counted(endpoint_port: int, headers: Sequence[tuple[bytes, bytes]] = ()) -> Counter[str]:
    """How often each function was called in `ROLLOUTS` rollouts; C functions by their own name."""
    lane = lanes(endpoint_port)[AGENT]
    await rollouts(lane, 3, headers)
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            counts[argument.__name__] += 1
            counts["all"] += 1
        elif event == "call":
            counts[frame.f_code.co_qualname] += 1
            counts["all"] += 1

    sys.setprofile(note)
    try:
        await rollouts(lane, ROLLOUTS, headers)
    finally:
        sys.setprofile(None)
    return counts


def test_a_rollout_makes_no_more_validations_json_passes_and_requests_than_it_did() -> None:
    assert Path(processes.ROOT / CONFIGS[0]).exists()
    with processes.helper("endpoint.py") as (_, port):
        counts = asyncio.run(counted(port))
        counts_with_times = asyncio.run(counted(port, [ASKED]))

    def per_rollout(names: set[str]) -> float:
        return sum(counts[name] for name in names) / ROLLOUTS

    assert per_rollout({"Connection.send", "ClientRequest.__init__"}) == HTTP_REQUESTS
    assert per_rollout(VALIDATIONS) <= MOST_VALIDATIONS
    assert per_rollout(JSON_PASSES) - 2 <= MOST_JSON_PASSES  # the test itself reads and writes once
    assert per_rollout({"all"}) <= MOST_CALLS
    assert (counts_with_times["all"] - counts["all"]) / ROLLOUTS <= MOST_CALLS_TO_TELL_TIMES
