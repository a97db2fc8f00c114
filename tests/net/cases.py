"""The requests of the net: whom to ask, what, in which order."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml

from nemo_gym.keys import NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
from tests.checkouts import servers_of
from tests.compat.stand_ins import write_compat_wheels
from tests.compat.test_third_party_servers import AGENT as THEIR_AGENT
from tests.compat.test_third_party_servers import ENVIRONMENT as THEIR_ENVIRONMENT
from tests.compat.test_third_party_servers import config_of as config_of_third_parties
from tests.compat.test_third_party_servers import write_server
from tests.hostile.model import ATTACKS, hostile_endpoint, mark
from tests.net.caller import Caller
from tests.net.recording import Exchange, Normalizer

MODELS: Mapping[str, dict[str, Any]] = {
    "openai_model": {"openai_base_url": "{endpoint}", "openai_api_key": "k", "openai_model": "m"},
    "azure_openai_model": {
        "openai_base_url": "{endpoint}",
        "openai_api_key": "k",
        "openai_model": "m",
        "default_query": {"api-version": "1"},
        "num_concurrent_requests": 8,
    },
    "inference_provider": {"base_url": "{endpoint}", "api_key": "k", "model": "m"},
    "vllm_model": {
        "base_url": "{endpoint}",
        "api_key": "k",
        "model": "m",
        "return_token_id_information": False,
        "uses_reasoning_parser": True,
    },
    "scripted_model": {},
}
"""Bundled model servers and their settings. `litellm_model` and `token_model` need a proxy and an engine."""
AGENTS = ("simple_agent", "non_executing_simple_agent", "function_agent", "remote_agent")
IMPATIENT: Mapping[str, dict[str, Any]] = {
    "code_gen": {"unit_test_timeout_secs": 1, "num_processes": 2},
    "math_with_judge": {"library_verifier_timeout_seconds": 5, "should_use_judge": True},
    "reasoning_gym": {"scoring_cpu_limit_s": 1},
}
LONG_ATTACKS = 200_000
"""Attacks with longer texts go to one environment and one model server only."""
FINAL_ANSWERS = ("", "A", "The answer is \\boxed{4}.", "<answer>4</answer>", "```python\nprint(4)\n```", '{"a": 1}')
BAD_BODIES: Mapping[str, tuple[bytes, str]] = {
    "no body": (b"", "application/json"),
    "broken JSON": (b"{", "application/json"),
    "a list": (b"[]", "application/json"),
    "an empty object": (b"{}", "application/json"),
    "a string": (b'"x"', "application/json"),
    "plain text": (b"hello", "text/plain"),
    "bytes that are no UTF-8": (b'{"a": "\xff"}', "application/json"),
    "a number that is none": (b'{"a": NaN}', "application/json"),
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
]
DIALECTS: Mapping[str, Any] = {
    "/v1/responses": lambda attack: {"input": [mark(attack), {"role": "user", "content": "Go on."}], "tools": TOOLS},
    "/v1/chat/completions": lambda attack: {
        "messages": [mark(attack), {"role": "user", "content": "Go on."}],
        "tools": [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k in ("name", "parameters")}}],
    },
    "/v1/messages": lambda attack: {
        "model": "m",
        "max_tokens": 100,
        "system": mark(attack)["content"],
        "messages": [{"role": "user", "content": "Go on."}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
}


def is_long(attack: str) -> bool:
    """Return whether an attack sends more text than most servers have to be shown."""
    return len(repr(ATTACKS[attack])) > LONG_ATTACKS


def attacks(with_long: bool) -> list[str]:
    """Return the names of the attacks, the long ones only where they are wanted."""
    return [attack for attack in ATTACKS if with_long or not is_long(attack)]


async def record(root: Path, only: str | None) -> list[Exchange]:
    """Return the responses of every server of the checkout at `root`; `only`: of parts with this in their name."""
    exchanges: list[Exchange] = []
    with hostile_endpoint() as endpoint:
        for name, work in _parts(root, endpoint):
            if only is None or only in name:
                exchanges += await work
                print(f"{name}: {len(exchanges)} responses so far", flush=True)
            else:
                work.close()
    return exchanges


def _parts(root: Path, endpoint: str) -> Iterator[tuple[str, Any]]:
    environments = sorted(f.name for f in (root / "resources_servers").iterdir() if (f / "configs").is_dir())
    for environment in environments:
        yield f"environment {environment}", _environment(root, endpoint, environment)
    for agent in AGENTS[1:]:
        yield f"agent {agent}", _agent(root, endpoint, agent)
    for model in MODELS:
        yield f"model {model}", _model(root, endpoint, model)
    yield "third parties", _third_parties(root)


@asynccontextmanager
async def _serving(
    root: Path, prefix: str, config: Mapping[str, Any], **more: Any
) -> AsyncIterator[tuple[Caller, dict[str, str]]]:
    with TemporaryDirectory(prefix="net") as folder:
        normalizer = Normalizer({str(root): "<root>"})
        jar = aiohttp.DummyCookieJar()
        with servers_of(root, Path(folder), config, **more) as servers:
            async with aiohttp.ClientSession(cookie_jar=jar) as session:
                yield Caller(session, normalizer, prefix), dict(servers.addresses)


def _model_block(model: str, endpoint: str) -> dict[str, Any]:
    settings = {
        key: value.format(endpoint=endpoint) if isinstance(value, str) else value
        for key, value in MODELS[model].items()
    }
    return {"responses_api_models": {model: {"entrypoint": "app.py", **settings}}}


def _environment_config(root: Path, environment: str, endpoint: str) -> dict[str, Any]:
    folder = root / "resources_servers" / environment / "configs"
    own = folder / f"{environment}.yaml"
    config = yaml.safe_load((own if own.exists() else min(folder.glob("*.yaml"))).read_text())
    for block in config.values():
        if isinstance(block, dict) and "resources_servers" in block:
            block["resources_servers"][environment].update(IMPATIENT.get(environment, {}))
    return {**config, "policy_model": _model_block("openai_model", endpoint)}


def _name_of(config: Mapping[str, Any], kind: str) -> str:
    return next(name for name, block in config.items() if isinstance(block, dict) and kind in block)


def _rows(root: Path, environment: str) -> list[dict[str, Any]]:
    lines = (root / "resources_servers" / environment / "data/example.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _attacked(row: dict[str, Any], attack: str) -> dict[str, Any]:
    given = row["responses_create_params"]["input"]
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
    parameters = {**row["responses_create_params"], "input": [mark(attack), *asked]}
    return {**row, "responses_create_params": parameters}


async def _environment(root: Path, endpoint: str, environment: str) -> list[Exchange]:
    config = _environment_config(root, environment, endpoint)
    server, agent = _name_of(config, "resources_servers"), _name_of(config, "responses_api_agents")
    rows = _rows(root, environment)
    async with _serving(root, environment, config) as (caller, addresses):
        for name in (server, agent):
            await _every_route(caller, name, addresses[name])
        await _sessions(caller, addresses[server], rows)
        await _rollouts(caller, addresses[agent], rows, attacks(with_long=environment == "mcqa"))
    return caller.exchanges


async def _agent(root: Path, endpoint: str, agent: str) -> list[Exchange]:
    environment = "example_session_state_mgmt"
    config = _environment_config(root, environment, endpoint)
    name = _name_of(config, "responses_api_agents")
    (block,) = config[name]["responses_api_agents"].values()
    given = yaml.safe_load((root / "responses_api_agents" / agent / "configs" / f"{agent}.yaml").read_text())
    (settings,) = given[agent]["responses_api_agents"].values()
    changed = {**settings, "resources_server": block["resources_server"]}
    if agent == "remote_agent":
        changed["url"] = endpoint
    config[name] = {"responses_api_agents": {agent: changed}}
    async with _serving(root, agent, config) as (caller, addresses):
        await _every_route(caller, name, addresses[name])
        await _rollouts(caller, addresses[name], _rows(root, environment), attacks(with_long=False))
    return caller.exchanges


async def _model(root: Path, endpoint: str, model: str) -> list[Exchange]:
    config = {"policy_model": _model_block(model, endpoint)}
    async with _serving(root, model, config) as (caller, addresses):
        url = addresses["policy_model"]
        await _every_route(caller, "policy_model", url)
        for path, body_of in DIALECTS.items():
            for attack in attacks(with_long=model == "openai_model"):
                body = body_of(attack)
                await caller.send(f"{path}: {attack}", "POST", url + path, body)
                if not is_long(attack):
                    await caller.send(f"{path} as a stream: {attack}", "POST", url + path, {**body, "stream": True})
            prefixed = f"{url}/rollout/task-0-rollout-0{path}"
            await caller.send(f"{path} with a rollout id in its path", "POST", prefixed, body_of("refuses"))
    return caller.exchanges


async def _third_parties(root: Path) -> list[Exchange]:
    with TemporaryDirectory(prefix="theirs") as folder:
        theirs, wheels = Path(folder) / "theirs", Path(folder) / "wheels"
        wheels.mkdir()
        write_compat_wheels(wheels)
        write_server(theirs, "resources_servers/their_env", THEIR_ENVIRONMENT)
        write_server(theirs, "responses_api_agents/their_agent", THEIR_AGENT)
        config = config_of_third_parties(Path(folder), "their_env")
        environment = {
            NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME: str(theirs),
            "PIP_FIND_LINKS": str(wheels),
            "UV_FIND_LINKS": str(wheels),
            "PIP_NO_INDEX": "1",
            "UV_NO_INDEX": "1",
        }
        row = {"responses_create_params": {"input": "say something"}, "wanted": "this", "reward": 0.25}
        async with _serving(root, "third parties", config, environment=environment) as (caller, addresses):
            for name in ("their_env", "their_agent"):
                await _every_route(caller, name, addresses[name])
            await _sessions(caller, addresses["their_env"], [row])
            await _rollouts(caller, addresses["their_agent"], [row], ["refuses"])
        return caller.exchanges


async def _every_route(caller: Caller, name: str, url: str) -> None:
    """Ask for every route in the wrong ways; all but the schema is the same for every server."""
    _, schema, _ = await caller.send(f"{name} /openapi.json", "GET", f"{url}/openapi.json")
    for path, methods in json.loads(schema or b"{}").get("paths", {}).items():
        asked = path.replace("{", "").replace("}", "")
        for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD"):
            if method.lower() not in methods:
                await caller.send(f"{name} {method} {path}", method, url + asked)
        if "post" in methods:
            for what, (body, content_type) in BAD_BODIES.items():
                headers = [("content-type", content_type)]
                await caller.send(f"{name} {path} with {what}", "POST", url + asked, body, headers)
        elif "get" in methods:
            await caller.send(f"{name} {path}", "GET", url + asked)
    await caller.send(f"{name} a path that there is not", "POST", f"{url}/nowhere", {})
    await caller.send(
        f"{name} a page of another origin", "POST", f"{url}/nowhere", {}, [("origin", "http://evil.example")]
    )


async def _sessions(caller: Caller, url: str, rows: list[dict[str, Any]]) -> None:
    """Seed a session per row, use each tool that the row offers in it, and have each answer verified."""
    for number, row in enumerate(rows):
        _, _, cookies = await caller.send(f"row {number} /seed_session", "POST", f"{url}/seed_session", row)
        for tool in row["responses_create_params"].get("tools") or []:
            if "name" in tool:
                name = tool["name"]
                await caller.send(f"row {number} /{name}", "POST", f"{url}/{name}", _arguments(tool), cookies=cookies)
        for answer in FINAL_ANSWERS:
            body = {**row, "response": _response(answer)}
            await caller.send(f"row {number} /verify {answer!r}", "POST", f"{url}/verify", body, cookies=cookies)
        await caller.send(
            f"row {number} /verify without a session", "POST", f"{url}/verify", {**row, "response": _response("A")}
        )


async def _rollouts(caller: Caller, url: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Have every attack made on the rows in turn, and metrics of what came out."""
    results = []
    for number, attack in enumerate(names):
        row = _attacked(rows[number % len(rows)], attack)
        status, body, _ = await caller.send(f"/run: {attack}", "POST", f"{url}/run", row)
        if status == 200:
            results.append(
                {**json.loads(body), "_ng_task_index": number % len(rows), "_ng_rollout_index": number // len(rows)}
            )
    parameters = _attacked(rows[0], "refuses")["responses_create_params"]
    await caller.send("/v1/responses", "POST", f"{url}/v1/responses", parameters)
    await caller.send("/aggregate_metrics", "POST", f"{url}/aggregate_metrics", {"verify_responses": results})


def _arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that fit the declared types of a tool."""
    by_type = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return {name: by_type.get(each.get("type"), "x") for name, each in properties.items()}


def _response(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "r",
        "created_at": 1,
        "model": "m",
        "object": "response",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def run(root: Path, only: str | None) -> list[Exchange]:
    """Record in an event loop of its own."""
    return asyncio.run(record(root, only))
