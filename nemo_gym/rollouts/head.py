"""Which run the collector talks to, and whether its agents are there."""

import http.client
import logging
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.http.addresses import Address
from nemo_gym.http.probe import fetch
from nemo_gym.http.server_client import ServerClient
from nemo_gym.keys import AGENTS_TYPE

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


def announce_head(client: ServerClient) -> None:
    """Say which run answers at the head server's address: there may be several on a machine."""
    health = _ask(client, "/health")
    if isinstance(health, dict) and health.get("run_id"):
        head = client.head_server_config
        logger.info("Head server at %s:%s: run %s in %s", head.host, head.port, health["run_id"], health.get("folder"))


def replicas_of(client: ServerClient) -> dict[str, list[Address]]:
    """The addresses of every agent that runs more than once."""
    addresses: dict[str, list[Address]] = {}
    instances = _ask(client, "/server_instances")
    for instance in instances if isinstance(instances, list) else ():
        if instance.get("server_type") == AGENTS_TYPE and instance.get("host") and instance.get("port"):
            name = instance.get("process_name")
            addresses.setdefault(name, []).append(Address(instance["host"], instance["port"]))
    return {name: found for name, found in addresses.items() if len(found) > 1}


def require_agents(client: ServerClient, agents: Iterable[str]) -> None:
    """Refuse rows for agents that the run does not have.

    Raises:
        ConfigError: names the agents that are missing and those that are there.
    """
    available = sorted(
        str(name)
        for name, block in client.global_config_dict.items_ex(resolve=False)
        if hasattr(block, "keys") and AGENTS_TYPE in block
    )
    missing = sorted(set(agents) - set(available))
    if not missing:
        return
    close = get_close_matches(missing[0], available, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    port = client.head_server_config.port
    raise ConfigError(
        f"the run behind the head server on port {port} has no agent called {', '.join(map(repr, missing))}{meant} "
        f"Its agents: {', '.join(available) or 'none'}. If you meant another run, name its head server with "
        "+head_server.port=<port>"
    )


def _ask(client: ServerClient, path: str) -> Any:
    """What the head server answers, or None when it does not: these are questions one can do without."""
    try:
        head = client.head_server_config
        status, body = fetch(Address(head.host, head.port), path, _TIMEOUT_S)
        return orjson.loads(body) if status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
