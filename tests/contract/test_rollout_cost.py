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
import pytest
from omegaconf import OmegaConf

from nemo_gym import global_config
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.client import ServerClient
from nemo_gym.http.run_answers import ASKED
from nemo_gym.http.transports.memory import Answer, register_local_app
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.runs.record import Row
from nemo_gym.servers.direct import DirectLane
from nemo_gym.testing import build_server
from tests.collection.fakes import FakeRun, serve, write_rows
from tests.perf.side_by_side import processes

AGENT = "example_single_tool_call_simple_agent"
CONFIGS = [
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml",
    "responses_api_models/openai_model/configs/openai_model.yaml",
]
ROLLOUTS = 20

VALIDATIONS = {"validate_json", "validate_python"}
JSON_PASSES = {"validate_json", "to_json", "loads", "dumps"}
MOST_VALIDATIONS = 10
MOST_JSON_PASSES = 13
HTTP_REQUESTS = 2
MOST_CALLS = 1_066
"""Some 25 of them write requests, of which pydantic makes one call that takes twice as long."""
MOST_CALLS_TO_TELL_TIMES = 45
"""What a collector that asks for the times of the calls adds to it."""
MOST_CALLS_OF_COLLECTOR = 100
"""Of functions of ours, to send a row, read the answer, store, count and show it."""


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


async def one_call(row: Row, attempt: int) -> Row:
    """What an agent answers whose model called a tool once."""
    output = [
        {"type": "function_call", "name": "look_up", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "output": "{}", "call_id": "c"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "There you are."}]},
    ]
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    return {"responses_create_params": {}, "response": {"output": output, "usage": usage}, "reward": 1.0}


def calls_of_collector(folder: Path, repeats: int) -> int:
    """How many functions of ours are called to collect so many rollouts."""
    options = RolloutCollectionConfig(
        agent_name="alpha",
        input_jsonl_fpath=str(folder / "in.jsonl"),
        output_jsonl_fpath=str(folder / f"out-{repeats}.jsonl"),
        num_repeats=repeats,
        num_samples_in_parallel=1,
        disable_aggregation=True,
    )
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/nemo_gym/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        summary = asyncio.run(RolloutCollectionHelper().collect(options))
    finally:
        sys.setprofile(None)
    assert summary.finished == repeats
    return calls


def test_a_collector_makes_no_more_calls_for_a_rollout_than_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.jsonl", [{"responses_create_params": {"input": "hi"}}])
    with serve(FakeRun("alpha")) as run:
        run.answer = one_call
        config = OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": run.port}})
        monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", config)
        _, few, many = (calls_of_collector(tmp_path, repeats) for repeats in (3, 10, 10 + ROLLOUTS))

    assert (many - few) / ROLLOUTS <= MOST_CALLS_OF_COLLECTOR
