"""Which host and port each server gets."""

from collections.abc import Callable, Collection
from random import randint
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, gethostbyname, gethostname, socket

from omegaconf import DictConfig

from nemo_gym.errors import ConfigError
from nemo_gym.keys import (
    DEFAULT_HEAD_SERVER_PORT,
    DEFAULT_HOST,
    DEFAULT_HOST_KEY_NAME,
    DISALLOWED_PORTS_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
)
from nemo_gym.schemas.server_config import ServerInstanceConfig

DEFAULT_PORT_RANGE = (10_001, 20_000)
OFFLINE_PORT = -1

FindPort = Callable[[list[int], int, int], int]
"""(ports not to use, lowest, highest) -> a port that was free a moment ago."""


def find_open_port(disallowed: Collection[int], low: int, high: int, max_retries: int = 50) -> int:
    """A port between `low` and `high` that nothing listens on and that is not disallowed."""
    taken = set(disallowed)
    for _ in range(max_retries):
        port = randint(low, high)
        if port in taken:
            continue
        with socket(AF_INET, SOCK_STREAM) as probe:
            probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                taken.add(port)
                continue
            return port
    raise RuntimeError(
        f"Unable to find an open port between {low} and {high} after {max_retries} attempts; "
        f"widen the range with +{PORT_RANGE_LOW_KEY_NAME}= and +{PORT_RANGE_HIGH_KEY_NAME}="
    )


def default_host(config: DictConfig, *, offline: bool) -> str:
    """The host of servers that name none."""
    if config.get(USE_ABSOLUTE_IP_KEY_NAME) and not offline:
        return gethostbyname(gethostname())
    return config.get(DEFAULT_HOST_KEY_NAME) or DEFAULT_HOST


def duplicate_ports(config: DictConfig, instances: list[ServerInstanceConfig]) -> list[ConfigError]:
    """One error per pair of servers that were given the same port."""
    owners: dict[int, str] = {_head_port(config): "the head server"}
    problems: list[ConfigError] = []
    for instance in instances:
        port = instance.get_inner_run_server_config().port
        if not port or port == OFFLINE_PORT:
            continue
        if port in owners:
            problems.append(
                ConfigError(f"port {port} is given to {owners[port]} and to {instance.name!r}; change one of them")
            )
        owners[port] = repr(instance.name)
    return problems


def assign_addresses(
    config: DictConfig, instances: list[ServerInstanceConfig], find_port: FindPort, *, offline: bool
) -> None:
    """Complete every server's `host` and `port`, and the head server's, in place."""
    host = default_host(config, offline=offline)
    low = config.setdefault(PORT_RANGE_LOW_KEY_NAME, DEFAULT_PORT_RANGE[0])
    high = config.setdefault(PORT_RANGE_HIGH_KEY_NAME, DEFAULT_PORT_RANGE[1])
    head_port = _head_port(config)
    explicit = [instance.get_inner_run_server_config().port for instance in instances]
    disallowed = [head_port] if head_port else []
    disallowed += [port for port in explicit if port and port != OFFLINE_PORT]
    for instance in instances:
        block = instance.get_inner_run_server_config_dict()
        if not block.get("host"):
            block["host"] = host
        if block.get("port"):
            continue
        if offline:
            block["port"] = OFFLINE_PORT
        else:
            block["port"] = find_port(disallowed, low, high)
            disallowed.append(block["port"])
    if not head_port and not offline:
        head_port = find_port(disallowed, low, high)
        disallowed.append(head_port)
    head = config.get(HEAD_SERVER_KEY_NAME) or {}
    config[HEAD_SERVER_KEY_NAME] = {**head, "host": head.get("host") or host, "port": head_port}
    config[DISALLOWED_PORTS_KEY_NAME] = disallowed


def _head_port(config: DictConfig) -> int:
    """The head server's port; 0 stands for any free one."""
    port = (config.get(HEAD_SERVER_KEY_NAME) or {}).get("port")
    return DEFAULT_HEAD_SERVER_PORT if port is None else int(port)
