"""Nothing that a model does takes its rollout out of the score: in no environment, with no agent.

Environments and agents are those on disk, so that a new one is attacked as soon as it is there.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.combine.shard_metrics import request_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import stored_by_agent
from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status
from nemo_gym.testing import _rollout, build_server
from tests.hostile.model import ATTACKS, hostile_endpoint, mark, nested

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = sorted(folder.name for folder in (ROOT / "resources_servers").iterdir() if (folder / "configs").is_dir())
AGENTS = sorted(folder.name for folder in (ROOT / "responses_api_agents").iterdir() if (folder / "configs").is_dir())
MODELS = ["openai_model", "vllm_model", "inference_provider"]
IMPATIENT: Mapping[str, dict[str, Any]] = {
    "code_gen": {"unit_test_timeout_secs": 1, "num_processes": 2},
    "math_with_judge": {"library_verifier_timeout_seconds": 0.5, "should_use_judge": True},
    "reasoning_gym": {"scoring_cpu_limit_s": 1},
}
"""Settings under which this takes less time."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with hostile_endpoint() as url:
        yield url


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_api_agents.simple_agent.app.MOST_STEPS", 40)


def config_of(environment: str, agent: str, model: str, endpoint: str) -> tuple[DictConfig, str]:
    """The config of a run, and the name of the agent in it."""
    paths = [
        _config_of_environment(environment),
        ROOT / "responses_api_models" / model / "configs" / f"{model}.yaml",
    ]
    given: dict[str, Any] = {
        "config_paths": [str(path) for path in paths],
        "policy_base_url": endpoint,
        "policy_api_key": "none",
        "policy_model_name": "m",
    }
    instance = next(name for name, block in _blocks(paths[0]) if "resources_servers" in block)
    settings: dict[str, Any] = {instance: {"resources_servers": {environment: IMPATIENT.get(environment, {})}}}
    name = next(name for name, block in _blocks(paths[0]) if "responses_api_agents" in block)
    if agent != "simple_agent":
        path = ROOT / "responses_api_agents" / agent / "configs" / f"{agent}.yaml"
        given["config_paths"].append(str(path))
        name = agent
        settings[agent] = {"responses_api_agents": {agent: {"resources_server": {"name": instance}}}}
        settings["remote_agent_url"] = endpoint
    merged = OmegaConf.merge(given, settings)
    assert isinstance(merged, DictConfig)
    return GlobalConfigDictParser().parse_no_environment(merged), name


def _config_of_environment(environment: str) -> Path:
    """The one of its name, or the first."""
    folder = ROOT / "resources_servers" / environment / "configs"
    own = folder / f"{environment}.yaml"
    return own if own.exists() else min(folder.glob("*.yaml"))


def _blocks(path: Path) -> list[tuple[str, Any]]:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return [(str(name), block) for name, block in content.items() if isinstance(block, dict)]


def rows_of(environment: str) -> dict[str, dict[str, Any]]:
    """A row for every attack; all examples take turns."""
    lines = (ROOT / "resources_servers" / environment / "data" / "example.jsonl").read_text().splitlines()
    rows = {}
    for number, attack in enumerate(ATTACKS):
        row = json.loads(lines[number % len(lines)])
        given = row["responses_create_params"]["input"]
        asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
        row["responses_create_params"]["input"] = [mark(attack), *asked]
        rows[attack] = row
    return rows


@asynccontextmanager
async def serving(config: DictConfig) -> AsyncIterator[ServerClient]:
    """The servers of a run, in this process, and a client of them."""
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    async with AsyncExitStack() as running:
        for instance in GlobalConfigDictParser().filter_for_server_instance_configs(config):
            server = build_server(instance, client, {})
            app = server.complete_app()
            await running.enter_async_context(app.router.lifespan_context(app))
            address, paths = Address(server.config.host, server.config.port), server.CANCELLABLE_PATHS
            register_local_app(instance.name, app, [address], cancellable_paths=paths)
        yield client


async def played(config: DictConfig, agent: str, rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What became of every attack."""
    async with serving(config) as client:
        return {
            attack: await asyncio.wait_for(_rollout(client, row, agent, [agent]), 60) for attack, row in rows.items()
        }


def unscored(results: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """What is wrong with the results that have no score, by attack."""
    return {
        attack: f"{result.get('_ng_failure_class')}: {result.get('_ng_failure_message', result.get('reward'))}"[:300]
        for attack, result in results.items()
        if "_ng_failure_class" in result
        or not isinstance(result.get("reward"), int | float)
        or not math.isfinite(result["reward"])
    }


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_attack_on_an_environment_is_scored(environment: str, endpoint: str) -> None:
    config, agent = config_of(environment, "simple_agent", "openai_model", endpoint)

    results = asyncio.run(played(config, agent, rows_of(environment)))

    assert unscored(results) == {}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("agent", AGENTS)
def test_every_attack_on_an_agent_is_scored(agent: str, model: str, endpoint: str) -> None:
    config, name = config_of("example_session_state_mgmt", agent, model, endpoint)

    results = asyncio.run(played(config, name, rows_of("example_session_state_mgmt")))

    assert unscored(results) == {}


def records(agent: str, levels: int) -> list[bytes]:
    """Five rollouts as they are stored, of which the third is nested so deeply."""
    said = ['"A"', '"B"', nested(levels), "null", '"A"']
    return [
        f'{{"_ng_task_index":{n},"_ng_rollout_index":0,"agent_ref":{{"name":"{agent}"}},"reward":{n % 2}.0,'
        f'"extracted_answer":{answer}}}'.encode()
        for n, answer in enumerate(said)
    ]


async def metrics_of(config: DictConfig, agent: str, request: dict[str, Any]) -> Any:
    async with serving(config) as client:
        answer = await client.post(server_name=agent, url_path="/aggregate_metrics", **request)
        await raise_for_status(answer)
        return await get_response_json(answer)


@pytest.mark.parametrize("levels", [90, 190, 250, 900, 50_000])
def test_one_record_nested_deeply_costs_no_agent_its_metrics(levels: int) -> None:
    config, agent = config_of("mcqa", "simple_agent", "openai_model", "http://127.0.0.1:1/v1")
    body = b'{"verify_responses":[' + b",".join(records(agent, levels)) + b"]}"
    request = {"data": body, "headers": {"content-type": "application/json"}}

    metrics = asyncio.run(metrics_of(config, agent, request))

    assert metrics["agent_metrics"]["mean/reward"] == 0.4
    assert metrics["agent_metrics"]["pass@1/no_answer"] == 20.0
    assert len(metrics["group_level_metrics"]) == 5


@pytest.mark.parametrize("levels", [90, 190, 250, 900])
def test_one_stored_record_nested_deeply_costs_no_run_its_metrics(levels: int, tmp_path: Path) -> None:
    config, agent = config_of("mcqa", "simple_agent", "openai_model", "http://127.0.0.1:1/v1")
    paths = RolloutPaths(tmp_path / "out.jsonl")
    paths.rollouts.write_bytes(b"\n".join([*records(agent, levels), b""]))

    metrics = asyncio.run(metrics_of(config, agent, request_of(stored_by_agent(paths, 5)[agent])))

    assert metrics["agent_metrics"]["mean/reward"] == 0.4
    assert len(metrics["group_level_metrics"]) == 5
