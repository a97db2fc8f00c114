"""PUBLIC: which servers of a run are up: ask the head server for the list, and each server on it whether it answers."""

import http.client
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from nemo_gym.config.secrets import auth_token, refused_by_head
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import get_global_config_dict, maybe_get_global_config_dict
from nemo_gym.http.addresses import Address, base_url, fetch, probe
from nemo_gym.http.errors import UnprovenServerError
from nemo_gym.keys import DEFAULT_HEAD_SERVER_PORT, DEFAULT_HOST, HEAD_SERVER_KEY_NAME
from nemo_gym.schemas.server_config import ServerInstanceDisplayConfig, ServerStatus
from nemo_gym.terminal import new_table, print_line, print_table

logger = logging.getLogger(__name__)

_HEAD_TIMEOUT_S = 5.0
_SERVER_TIMEOUT_S = 2.0
_ASKED_AT_ONCE = 32


class StatusCommand:
    """What `ng_status` does, for programs."""

    def __init__(self, head_server_config: BaseServerConfig | None = None) -> None:
        """`head_server_config` is where the run's head server is; by default where this process's config says."""
        self._head_server_config = head_server_config

    def discover_servers(self) -> list[ServerInstanceDisplayConfig]:
        """Every server of the run with its health; empty, with a warning, when no head server answers."""
        head = self._head_server_config or _configured_head()
        address, token = Address(head.host, head.port), auth_token(maybe_get_global_config_dict() or {})
        try:
            status, body = fetch(address, "/server_instances", _HEAD_TIMEOUT_S, token)
            if status == HTTPStatus.UNAUTHORIZED:
                logger.warning("%s", refused_by_head(base_url(address), token))
                return []
            listed: list[dict[str, Any]] = json.loads(body) if status == 200 else []
            servers = [ServerInstanceDisplayConfig.model_validate(entry) for entry in listed]
        except UnprovenServerError as error:
            logger.warning("%s", error)
            return []
        except (OSError, http.client.HTTPException, ValidationError, ValueError, TypeError, RecursionError) as error:
            logger.warning(
                "Could not connect to head server at %s (%s: %s). Start the servers with `ng_run`; if they run with "
                "another address, name it with +head_server.host and +head_server.port",
                base_url(address),
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "no answer",
            )
            return []
        if not servers:
            return []
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(servers))) as pool:
            statuses = list(pool.map(self.check_health, servers))
        now = time.time()
        return [
            server.model_copy(
                update={
                    "status": status,
                    "uptime_seconds": None if server.start_time is None else now - server.start_time,
                }
            )
            for server, status in zip(servers, statuses, strict=True)
        ]

    def check_health(self, server_info: ServerInstanceDisplayConfig) -> ServerStatus:
        """Whether a server answers at its URL; any HTTP answer will do."""
        if not server_info.url:
            return "unknown_error"
        host, _, port = server_info.url.partition("://")[2].partition("/")[0].rpartition(":")
        try:
            address = Address(host.strip("[]"), int(port))
        except ValueError:
            return "unknown_error"
        return probe(address, _SERVER_TIMEOUT_S)

    def display_status(self, servers: Sequence[ServerInstanceDisplayConfig]) -> None:
        """Print the servers as a table, and how many of them are healthy."""
        if not servers:
            print_line("No NeMo Gym servers found running.")
            return
        table = new_table("server", "URL", "pid", "isolation", "uptime", "status")
        for number, server in enumerate(servers, 1):
            mark = "✓" if server.status == "success" else "✗"
            replica = f" (replica {server.replica})" if server.replica else ""
            name = f"[{number}] {mark} {server.process_name}{replica} ({server.server_type}/{server.name})"
            uptime = "" if server.uptime_seconds is None else format_uptime(server.uptime_seconds)
            table.add_row(name, server.url, str(server.pid), server.isolation, uptime, server.status)
        print_table(table)
        healthy = sum(server.status == "success" for server in servers)
        hosts = f" in {_hosts(servers)}" if any(server.most_replicas for server in servers) else ""
        print_line(f"{len(servers)} servers found ({healthy} healthy, {len(servers) - healthy} unhealthy){hosts}")


def _hosts(servers: Sequence[ServerInstanceDisplayConfig]) -> str:
    count = len({server.pid for server in servers if server.isolation == "hosted"})
    most = max(server.most_replicas or 0 for server in servers)
    return f"{count} host process{'' if count == 1 else 'es'}, at most {most}"


def format_uptime(seconds: float) -> str:
    """`1d 2h 3m 4.5s`, without leading zeros."""
    minutes, remaining_s = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    days, hours = divmod(hours, 24)
    parts = [f"{days}d", f"{hours}h", f"{minutes}m", f"{remaining_s:.1f}s"]
    first = next((at for at, value in enumerate((days, hours, minutes)) if value), 3)
    return " ".join(parts[first:])


def _configured_head() -> BaseServerConfig:
    given = get_global_config_dict().get(HEAD_SERVER_KEY_NAME) or {}
    return BaseServerConfig(host=given.get("host") or DEFAULT_HOST, port=given.get("port") or DEFAULT_HEAD_SERVER_PORT)
