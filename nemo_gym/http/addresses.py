"""Where the servers of a config are: looked up by name once, and again when the config changes.

Reading an address out of OmegaConf takes longer than many a call, so it is remembered together with
the nodes it came from; a replaced config, a replaced instance and a changed host or port are noticed.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from nemo_gym.errors import ServerRefNotFoundError
from nemo_gym.global_config import get_first_server_config_dict
from nemo_gym.keys import SERVER_TYPES

_SHUN_UNREACHABLE_S = 30.0


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


def base_url(address: Address) -> str:
    """`http://host:port`, with an IPv6 host in brackets."""
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass
class Replica:
    """One of several identical servers behind a name."""

    address: Address
    in_flight: int = 0
    times_chosen: int = 0
    shunned_until_s: float = 0.0

    def shun(self) -> None:
        """Prefer the others for a while: this one could not be reached."""
        self.shunned_until_s = time.monotonic() + _SHUN_UNREACHABLE_S


def least_busy(replicas: Iterable[Replica]) -> Replica:
    """The replica with the fewest calls under way, the idle ones in turn, unreachable ones last."""
    now = time.monotonic()
    return min(replicas, key=lambda replica: (replica.shunned_until_s > now, replica.in_flight, replica.times_chosen))


class _Remembered(NamedTuple):
    """An address, and the nodes and raw values of the config that it was read from."""

    address: Address
    url: str
    config: DictConfig
    instance: Any
    block: dict[Any, Any]
    host: Any
    host_value: Any
    port: Any
    port_value: Any

    def still_holds(self, config: DictConfig, name: str) -> bool:
        if config is not self.config or config._content.get(name) is not self.instance:  # type: ignore[union-attr]
            return False
        host, port = self.block.get("host"), self.block.get("port")
        if host is not self.host or port is not self.port:
            return False
        return bool(host._val == self.host_value and port._val == self.port_value)


class AddressBook:
    """Addresses by server name."""

    def __init__(self) -> None:
        self._remembered: dict[str, _Remembered] = {}
        self.replicas: dict[str, list[Replica]] = {}

    def look_up(self, config: DictConfig, name: str) -> tuple[Address, str]:
        """The address and base URL that `config` gives for the server called `name`.

        Raises:
            ServerRefNotFoundError: there is no such server, or it has no address.
        """
        known = self._remembered.get(name)
        if known is None or not known.still_holds(config, name):
            known = self._remembered[name] = _read(config, name)
        return known.address, known.url


def _read(config: DictConfig, name: str) -> _Remembered:
    names = server_names(config)
    if name not in names:
        raise ServerRefNotFoundError(_unknown(name, names))
    block = get_first_server_config_dict(config, name)
    host, port = block.get("host"), block.get("port")
    if host is None or port is None:
        raise ServerRefNotFoundError(
            f"Server {name!r} has no address (host: {host}, port: {port}): it was not started with this config"
        )
    address, nodes = Address(str(host), int(port)), _nodes(block)
    return _Remembered(
        address=address,
        url=base_url(address),
        config=config,
        instance=_nodes(config).get(name),
        block=nodes,
        host=nodes["host"],
        host_value=nodes["host"]._val,
        port=nodes["port"],
        port_value=nodes["port"]._val,
    )


def server_names(config: DictConfig) -> list[str]:
    """The names of the server instances in `config`."""
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    return [str(name) for name, block in tree.items() if _is_instance(block)]


def _is_instance(block: Any) -> bool:
    if not isinstance(block, Mapping) or not block or next(iter(block)) not in SERVER_TYPES:
        return False
    implementations = next(iter(block.values()))
    return isinstance(implementations, Mapping) and isinstance(next(iter(implementations.values()), None), Mapping)


def _unknown(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    if not names:
        return f"No server is called {name!r}: the config defines no servers. Is this the head server you mean?"
    return f"No server is called {name!r}.{meant} Configured servers: {', '.join(sorted(names))}"


def _nodes(config: DictConfig) -> dict[Any, Any]:
    """The children of a config as OmegaConf keeps them; its public access is 100 times slower."""
    return cast("dict[Any, Any]", config._content)
