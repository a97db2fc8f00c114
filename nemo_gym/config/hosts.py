"""Which host and port each server gets, and the names under which it is called.

Names are those of the machine, of the config, and `allowed_hosts`: a page in a browser that has its own name point to
this machine (DNS rebinding) is known by nothing but that name.
"""

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from ipaddress import ip_address
from random import randint
from socket import AF_INET, SOCK_STREAM, getfqdn, gethostbyname, gethostname, socket
from typing import Any, TypeGuard

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.config.trees import walk
from nemo_gym.errors import ConfigError, NoOpenPortError
from nemo_gym.keys import (
    ALLOWED_HOSTS_KEY_NAME,
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

_HOST_KEYS = ("host", "default_host")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_LONGEST_NAME = 253
DEFAULT_PORT_RANGE = (10_001, 20_000)
_CHOSEN = "chosen_port"
"""A flag of OmegaConf's, which is no part of what a config says: this block had no port of its own."""
HIGHEST_PORT = 65_535
OFFLINE_PORT = -1
FindPort = Callable[[list[int], int, int], int]
"""(ports not to use, lowest, highest) -> a port that was free a moment ago."""
_KEYS_READ_HERE = (
    USE_ABSOLUTE_IP_KEY_NAME,
    DEFAULT_HOST_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    DISALLOWED_PORTS_KEY_NAME,
)


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, so that no name had to be looked up to get there."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def plain_name(host: str) -> str:
    """A host name as it is compared: in lower case, without the dot that may end it."""
    return host.lower().removesuffix(".")


def names_in_config(config: Mapping[Any, Any]) -> frozenset[str]:
    """Every `host` in `config` and its `allowed_hosts`; what cannot be resolved here is left out."""
    tree: Any = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    hosts = (_resolved(config, path, host) for path, host in _hosts_in(tree))
    return frozenset(plain_name(host) for host in (*hosts, *_allowed(config)) if host)


def allowed_hosts_problems(resolved: Mapping[str, Any]) -> list[ConfigError]:
    """What is wrong with `allowed_hosts`, if anything."""
    value = resolved.get(ALLOWED_HOSTS_KEY_NAME)
    entries = _entries(value)
    wrong = value if entries is None else next((entry for entry in entries if not _is_host(entry)), None)
    if wrong is None:
        return []
    return [
        ConfigError(
            f"{ALLOWED_HOSTS_KEY_NAME} holds {wrong!r}; it takes a list of host names without scheme and port, such as "
            f"+{ALLOWED_HOSTS_KEY_NAME}=[gym.example.com]"
        )
    ]


def _is_host(entry: Any) -> bool:
    if not isinstance(entry, str) or len(entry) > _LONGEST_NAME:
        return False
    return is_address(entry) or _NAME.fullmatch(plain_name(entry)) is not None


def _entries(value: Any) -> list[Any] | None:
    """The entries of `allowed_hosts`: of a list, or of a text with commas; None if it is neither."""
    if value is None:
        return []
    if isinstance(value, str):
        return [entry.strip() for entry in value.split(",") if entry.strip()]
    return list(value) if isinstance(value, list | tuple | ListConfig) else None


def _allowed(config: Mapping[Any, Any]) -> list[str]:
    try:
        entries = _entries(config.get(ALLOWED_HOSTS_KEY_NAME))
    except OmegaConfBaseException:
        return []
    return [entry for entry in entries or () if _is_host(entry)]


def _hosts_in(tree: Any) -> Iterator[tuple[str, str]]:
    """Where a `host` stands, as `[a][b]` since keys may hold dots, and what it is."""
    for place in walk(tree):
        if place.keys[-1] in _HOST_KEYS and isinstance(place.value, str):
            yield "".join(f"[{key}]" for key in place.keys), place.value


def _resolved(config: Mapping[Any, Any], path: str, host: str) -> str | None:
    if "${" not in host or not isinstance(config, DictConfig):
        return host
    try:
        value = OmegaConf.select(config, path)
    except OmegaConfBaseException:
        return None
    return value if isinstance(value, str) else None


class MachineNames:
    """The host name of this machine and its full name, which may take a name server's answer.

    That is asked once per process, in a thread that nobody has to wait for.
    """

    def __init__(self) -> None:
        name = plain_name(gethostname())
        self.names = frozenset({name, name.partition(".")[0]})
        self._asked = threading.Thread(target=self._ask, name="full name of this machine", daemon=True)
        self._asked.start()

    @property
    def are_complete(self) -> bool:
        """Whether the full name is known, or known to be unknown."""
        return not self._asked.is_alive()

    def _ask(self) -> None:
        self.names |= {plain_name(getfqdn())}


@cache
def machine_names() -> MachineNames:
    """Those of this machine; the first call has its full name asked for."""
    return MachineNames()


def find_open_port(disallowed: Collection[int], low: int, high: int, max_retries: int = 50) -> int:
    """A port between `low` and `high` that nobody has or holds for a server to come, and that is not disallowed."""
    taken = {port for port in disallowed if low <= port <= high}
    for _ in range(max_retries):
        if len(taken) > high - low:
            break
        port = randint(low, high)
        while port in taken:
            port = low + (port - low + 1) % (high - low + 1)
        with socket(AF_INET, SOCK_STREAM) as probe:  # without SO_REUSEADDR: a port that is held is not free either
            try:
                probe.bind(("", port))
            except OSError:
                taken.add(port)
                continue
            return port
    raise NoOpenPortError(
        f"Unable to find an open port between {low} and {high} after {max_retries} attempts; "
        f"widen the range with +{PORT_RANGE_LOW_KEY_NAME}= and +{PORT_RANGE_HIGH_KEY_NAME}="
    )


def default_host(config: Mapping[str, Any], *, offline: bool) -> str:
    """The host of servers that name none."""
    if config.get(USE_ABSOLUTE_IP_KEY_NAME) and not offline:
        name = gethostname()
        try:
            return gethostbyname(name)
        except OSError as error:
            raise ConfigError(
                f"{USE_ABSOLUTE_IP_KEY_NAME} is set, but this machine's name {name!r} has no address ({error}); "
                f"give the address itself with +{DEFAULT_HOST_KEY_NAME}=<address> and +{USE_ABSOLUTE_IP_KEY_NAME}=false"
            ) from error
    return str(config.get(DEFAULT_HOST_KEY_NAME) or DEFAULT_HOST)


def address_problems(resolved: Mapping[str, Any], instances: list[ServerInstanceConfig]) -> list[ConfigError]:
    """What is wrong with the hosts and ports that were given: no numbers, no range, one port for two servers."""
    problems: list[ConfigError] = []
    try:
        _port_range(resolved)
        head = _head_server(resolved)
    except ConfigError as error:
        return [error]
    owners: dict[tuple[str, int], str] = {}
    if _is_given(head["port"]):
        owners[_comparable(head["host"], resolved), head["port"]] = "the head server"
    for instance in instances:
        inner = instance.get_inner_run_server_config()
        if not _is_given(inner.port):
            continue
        address = (_comparable(inner.host, resolved), inner.port)
        if address in owners:
            problems.append(
                ConfigError(
                    f"port {inner.port} is given to {owners[address]} and to {instance.name!r}; change one of them, or "
                    "leave `port` out to have a free one chosen"
                )
            )
        owners.setdefault(address, repr(instance.name))
    return problems


def assign_addresses(
    config: DictConfig, instances: list[ServerInstanceConfig], find_port: FindPort, *, offline: bool
) -> None:
    """Complete every server's `host` and `port`, and the head server's, in place."""
    resolved: Any = {
        key: OmegaConf.to_container(config[key], resolve=True) if OmegaConf.is_config(config[key]) else config[key]
        for key in _KEYS_READ_HERE
        if key in config
    }
    host = default_host(resolved, offline=offline)
    low, high = _port_range(resolved)
    head = _head_server(resolved)
    kept_free = _ports(resolved.get(DISALLOWED_PORTS_KEY_NAME) or [])
    explicit = [instance.get_inner_run_server_config().port for instance in instances]
    avoided = [port for port in (head["port"], *explicit, *kept_free) if _is_given(port)]

    def free_port() -> int:
        if offline:
            return OFFLINE_PORT
        avoided.append(find_port(avoided, low, high))
        return avoided[-1]

    in_order = []
    for instance, given in zip(instances, explicit, strict=True):
        block = instance.get_inner_run_server_config_dict()
        if not instance.get_inner_run_server_config().host:
            block["host"] = host
        port = given if _is_given(given) else free_port()
        if port != given:
            block["port"] = port
            block._set_flag(_CHOSEN, values=True)
        in_order.append(port)
    head["port"] = head["port"] if _is_given(head["port"]) else free_port()
    head["host"] = head["host"] or host
    config[HEAD_SERVER_KEY_NAME] = head
    config[PORT_RANGE_LOW_KEY_NAME], config[PORT_RANGE_HIGH_KEY_NAME] = low, high
    used = [port for port in (head["port"], *in_order) if port != OFFLINE_PORT]
    config[DISALLOWED_PORTS_KEY_NAME] = [*used, *(port for port in kept_free if port not in used)]


def port_was_chosen(block: DictConfig) -> bool:
    """Whether nobody asked for the port of a server, so that it may as well have another."""
    return bool(block._get_flag(_CHOSEN))


def _is_given(port: int | None) -> TypeGuard[int]:
    """Whether somebody chose this port; 0 leaves the choice to us, and so does what an offline parse put there."""
    return bool(port) and port != OFFLINE_PORT


def _comparable(host: str | None, resolved: Mapping[str, Any]) -> str:
    """A host such that equal ones are surely the same machine."""
    named = host or resolved.get(DEFAULT_HOST_KEY_NAME) or DEFAULT_HOST
    return DEFAULT_HOST if named in ("localhost", DEFAULT_HOST) else str(named)


def _port_range(resolved: Mapping[str, Any]) -> tuple[int, int]:
    low = _port(resolved.get(PORT_RANGE_LOW_KEY_NAME) or DEFAULT_PORT_RANGE[0], PORT_RANGE_LOW_KEY_NAME)
    high = _port(resolved.get(PORT_RANGE_HIGH_KEY_NAME) or DEFAULT_PORT_RANGE[1], PORT_RANGE_HIGH_KEY_NAME)
    if low > high:
        raise ConfigError(
            f"{PORT_RANGE_LOW_KEY_NAME} is {low} and {PORT_RANGE_HIGH_KEY_NAME} is {high}: there is no port "
            "between them; exchange them or widen the range"
        )
    return low, high


def _head_server(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The head server's block with its port as a number; 0 stands for any free one."""
    block = resolved.get(HEAD_SERVER_KEY_NAME) or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{HEAD_SERVER_KEY_NAME} is {block!r}; it takes `host` and `port`, each may be left out")
    port = block.get("port")
    number = DEFAULT_HEAD_SERVER_PORT if port is None else _port(port, f"{HEAD_SERVER_KEY_NAME}.port")
    return {"host": None, **block, "port": number}


def _ports(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{DISALLOWED_PORTS_KEY_NAME} is {value!r}; it takes a list of ports")
    return [_port(port, DISALLOWED_PORTS_KEY_NAME) for port in value]


def _port(value: Any, key: str) -> int:
    try:
        port = int(value)
    except (TypeError, ValueError):
        port = OFFLINE_PORT
    if isinstance(value, bool) or not (0 <= port <= HIGHEST_PORT or value == OFFLINE_PORT):
        raise ConfigError(f"{key} is {value!r}; a port is a number between 0 and {HIGHEST_PORT}")
    return port
