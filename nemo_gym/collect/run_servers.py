"""The servers of the run that the collector talks to: which they are, their models, and what to say without them."""

import http.client
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from aiohttp import ClientResponse
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.collect.failures import attempt_name
from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.http.addresses import Address, fetch
from nemo_gym.http.client import ServerClient
from nemo_gym.http.request import JSON_HEADERS, get_response_json
from nemo_gym.http.run_answers import ASKS_FOR_CALLS, ATTEMPT_HEADER, WANTS_PARTIAL, calls_of, usage_in
from nemo_gym.keys import (
    AGENTS_TYPE,
    MODEL_NAME_KEYS,
    MODELS_TYPE,
    SERVER_STATES_PATH,
    TIMING_KEY_NAME,
)
from nemo_gym.runs.manifest import RunFacts
from nemo_gym.runs.record import Row
from nemo_gym.runs.spending import add_usage

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_RUN_PATH = "/run"
_ASKS_FOR_MORE = {**JSON_HEADERS, WANTS_PARTIAL: "true", **ASKS_FOR_CALLS}
"""Headers of `/run`: what a run wants to know beside the result."""


class NoAgentError(ConfigError, KeyError):
    """A row that does not say which agent it is for."""

    def __str__(self) -> str:
        return str(self.args[0])


class RunPost:
    """Sends the rows of one run to their agents; its rollouts go by the name of the run, and their own."""

    def __init__(
        self, client: ServerClient, run: str, refuse: Callable[[ClientResponse, Row], Awaitable[None]]
    ) -> None:
        """`run` is what the run is called; `refuse` raises for an answer with an error. Call it inside a coroutine."""
        self._client, self._run, self._refuse = client, run, refuse

    async def post(self, row: Row) -> Any:
        """The answer to `/run`, with what the agent told of its calls."""
        agent = agent_to_ask(row)
        name = attempt_name(row)
        response = await self._client.post(
            server_name=agent, url_path=_RUN_PATH, json=row, headers=self._headers_for(name)
        )
        if response.status >= 400:
            await self._refuse(response, row)
        result = await get_response_json(response)
        if isinstance(result, dict):
            result[TIMING_KEY_NAME] = calls_of(response)
            add_usage(result, usage_in(getattr(response, "raw_headers", ())))
        return result

    def _headers_for(self, name: str | None) -> Mapping[str, str]:
        return {**_ASKS_FOR_MORE, ATTEMPT_HEADER: self._run if name is None else f"{self._run}/{name}"}


def agent_to_ask(row: Row) -> str:
    """The agent that a row is for.

    Raises:
        NoAgentError: it does not say.
    """
    try:
        agent: str = row["agent_ref"]["name"]
    except (KeyError, TypeError) as error:
        raise NoAgentError(
            f"a row does not say which agent it is for; it has {listed(row)}. Give each row an agent_ref, such as "
            '{"agent_ref": {"name": "my_agent"}}'
        ) from error
    return agent


def announce_head(client: ServerClient) -> None:
    """Say which run answers at the head server's address: there may be several on a machine."""
    health = _ask(client, "/health")
    if isinstance(health, dict) and health.get("run_id"):
        head = client.head_server_config
        logger.info("Run: %s at %s:%s, started in %s", health["run_id"], head.host, head.port, health.get("folder"))


def announce_servers(client: ServerClient, owed_by_agent: Mapping[str, int]) -> None:
    """Say which agents, and which models, will be at work."""
    agents = [agent for agent, owed in owed_by_agent.items() if owed]
    counted = agents if len(agents) == 1 else [f"{agent} ({owed_by_agent[agent]})" for agent in agents]
    logger.info("%s: %s", "Agent" if len(agents) == 1 else "Agents", listed(counted))
    models = model_names(client.global_config_dict)
    if models:
        logger.info("%s: %s", "Model" if len(models) == 1 else "Models", listed(models))


def replicas_of(client: ServerClient) -> dict[str, list[Address]]:
    """The addresses of every agent and model server that runs more than once, or may come to."""
    addresses: dict[str, list[Address]] = {}
    growing: set[str] = set()
    instances = _ask(client, "/server_instances")
    for instance in instances if isinstance(instances, list) else ():
        if instance.get("server_type") in (AGENTS_TYPE, MODELS_TYPE) and instance.get("host") and instance.get("port"):
            name = instance.get("process_name")
            addresses.setdefault(name, []).append(Address(instance["host"], instance["port"]))
            growing |= {name} if instance.get("most_replicas") else set()
    return {name: found for name, found in addresses.items() if len(found) > 1 or name in growing}


def follow_replicas(client: ServerClient) -> None:
    """Spread rollouts over all hosts that the run has now."""
    for name, addresses in replicas_of(client).items():
        client.set_replicas(name, addresses)


def edition_of(client: ServerClient) -> int | None:
    """How often the run's list of servers has changed, if its head server says so."""
    return edition_in(_ask(client, SERVER_STATES_PATH))


def edition_in(states: Any) -> int | None:
    """The same, from what the head server answered."""
    edition = states.get("edition") if isinstance(states, Mapping) else None
    return edition if isinstance(edition, int) else None


def require_agents(client: ServerClient, agents: Iterable[str]) -> None:
    """Refuse rows for agents that the run does not have.

    Raises:
        ConfigError: names the agents that are missing and those that are there.
    """
    available = sorted(name for name, _ in _blocks_of(client.global_config_dict, AGENTS_TYPE))
    missing = sorted(set(agents) - set(available))
    if not missing:
        return
    head = client.head_server_config
    raise ConfigError(
        f"the run behind the head server at {head.host}:{head.port} has no agent called "
        f"{listed(map(repr, missing))}{did_you_mean(missing[0], available) or '.'} Its agents: {listed(available)}. "
        "Correct +agent_name or the agent_ref of the rows; if you meant another run, name its head server with "
        "+head_server.port=<port>"
    )


def facts_about(client: ServerClient, command: Sequence[str] = ()) -> RunFacts:
    """What the manifest should say about the servers of this run."""
    config: Any = OmegaConf.to_container(client.global_config_dict, resolve=False)
    return RunFacts(command, config, model_names(client.global_config_dict))


def model_names(config: DictConfig) -> list[str]:
    """The models that the servers of a config ask for."""
    return sorted(set(_model_names(config)))


def _model_names(config: DictConfig) -> Iterator[str]:
    """What each model server asks for; the kind of server where it does not say."""
    for _, block in _blocks_of(config, MODELS_TYPE):
        for kind, settings in block[MODELS_TYPE].items_ex(resolve=False):
            names = (_text_at(settings, key) for key in MODEL_NAME_KEYS)
            yield next((name for name in names if name), str(kind))


def _text_at(settings: Any, key: str) -> str | None:
    try:
        value = settings.get(key) if isinstance(settings, DictConfig) else None
    except OmegaConfBaseException:
        return None
    return value if isinstance(value, str) else None


def _blocks_of(config: DictConfig, server_type: str) -> Iterator[tuple[str, DictConfig]]:
    for name, block in config.items_ex(resolve=False):
        if isinstance(block, DictConfig) and isinstance(block.get(server_type), DictConfig):
            yield str(name), block


def _ask(client: ServerClient, path: str) -> Any:
    """What the head server answers, or None when it does not: these are questions one can do without."""
    try:
        head = client.head_server_config
        status, body = fetch(Address(head.host, head.port), path, _TIMEOUT_S, client.auth_token)
        return orjson.loads(body) if status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
