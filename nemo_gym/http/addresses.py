"""Where the servers of a config are, whether anything answers there, and whether that knows the run's token.

Addresses are looked up by name once, and again when the config changes. Reading an address out of OmegaConf takes
longer than many a call, so it is remembered together with the nodes it came from; a replaced config, a replaced
instance and a changed host or port are noticed.

Start-up and status ask without an event loop, each question bounded in time and size. Proxies of the environment are
never used: servers of a run are asked directly.

Before a request shows the run's token to a server, that has to prove that it has the token itself. The proof holds as
long as the connection that it was asked for: behind the next one somebody else may listen. aiohttp's connections are
not ours to speak over, so another one is opened to the same address for the proof alone.
"""

import asyncio
import errno
import http.client
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.secrets import CHALLENGE_HEADER, PROOF_PATH, bearer, lack_of_proof, new_challenge, unproven
from nemo_gym.errors import ServerRefNotFoundError
from nemo_gym.global_config import get_first_server_config_dict
from nemo_gym.http.errors import UnprovenServerError
from nemo_gym.keys import SERVER_TYPES
from nemo_gym.schemas.server_config import ServerStatus

_SHUN_UNREACHABLE_S = 30.0
TOKENS_TO_PROVE: dict[bytes, str] = {}
"""The tokens of this process's runs, by the value of the `Authorization` header that shows them."""
_LONGEST_PROOF_BYTES = 4096
_MAX_BYTES = 64 * 1024 * 1024


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


def base_url(address: Address) -> str:
    """Return `http://host:port`, with an IPv6 host in brackets."""
    host, port = address.host, address.port
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


class _Remembered:
    """An address, and the nodes and raw values of the config that it was read from."""

    __slots__ = ("_block", "_config", "_host", "_host_value", "_instance", "_port", "_port_value", "place")

    def __init__(self, place: tuple[Address, str], config: DictConfig, name: str, block: dict[Any, Any]) -> None:
        """`place` is the address and its URL, as `config` gives it in the `block` of the server called `name`."""
        self.place = place
        self._config, self._instance, self._block = config, _nodes(config).get(name), block
        self._host, self._port = block["host"], block["port"]
        self._host_value, self._port_value = self._host._val, self._port._val

    def still_holds(self, config: DictConfig, name: str) -> bool:
        try:
            if config is not self._config or config._content[name] is not self._instance:  # type: ignore[index]
                return False
            host, port = self._block["host"], self._block["port"]
        except (KeyError, TypeError):
            return False
        if host is not self._host or port is not self._port:
            return False
        return bool(host._val == self._host_value and port._val == self._port_value)


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
        return known.place


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
    address = Address(str(host), int(port))
    return _Remembered((address, base_url(address)), config, name, _nodes(block))


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


def fetch(address: Address, path: str, timeout_s: float, token: str | None = None) -> tuple[int, bytes]:
    """Status and body of `GET path`, asked with the run's token if one is given and who answers has proved to know it.

    Raises:
        OSError: nothing answers there in time, or with more than a config can be.
        UnprovenServerError: what answers does not know the token (also an `OSError`).
        http.client.HTTPException: what answers does not speak HTTP.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        if token is not None:
            require_proof_over(connection, address, token)
        connection.request("GET", path, headers={"Accept": "*/*", **bearer(token)})
        with connection.getresponse() as response:  # one that closes the connection has the socket to itself
            body = response.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise OSError(errno.EMSGSIZE, f"the answer to GET {path} is larger than {_MAX_BYTES} bytes")
        return response.status, body
    finally:
        connection.close()


def probe(address: Address, timeout_s: float = 5.0) -> ServerStatus:
    """Whether anything at all answers HTTP there."""
    try:
        fetch(address, "/", timeout_s)
    except TimeoutError:
        return "timeout"
    except (ConnectionError, socket.gaierror, http.client.RemoteDisconnected):
        return "connection_error"
    except (OSError, http.client.HTTPException, ValueError):
        return "unknown_error"
    return "success"


class Challenge:
    """One question to who listens at an address: do you know this token?"""

    def __init__(self, address: Address, token: str) -> None:
        self._address = address
        self._token = token
        self._challenge = new_challenge()
        self.headers = {"Host": base_url(address).partition("://")[2], CHALLENGE_HEADER: self._challenge}

    def message(self, more_headers: bytes = b"") -> tuple[bytes, bytes]:
        """The question as it goes over a bare connection: head and body."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items()).encode()
        return b"GET %b HTTP/1.1\r\n%b%b\r\n" % (PROOF_PATH.encode(), lines, more_headers), b""

    def check(self, status: int, body: bytes, *, is_open: bool) -> None:
        """Raise unless this answers the challenge as only who knows the token can, over a connection that stays open.

        Raises:
            UnprovenServerError: it is not.
        """
        reason = lack_of_proof(self._token, self._challenge, self._address.port, status, body)
        if reason is not None or not is_open:
            raise self.failed(reason or "it hangs up after its proof")

    def failed(self, reason: str) -> UnprovenServerError:
        """The error of a challenge that was not met."""
        return UnprovenServerError(unproven(base_url(self._address), reason))


async def require_proof(address: Address, token: str) -> None:
    """Make sure that who listens at `address` knows the token; how long to wait for that is the caller's to say.

    Raises:
        UnprovenServerError: it does not.
        OSError: nobody listens there, or it breaks off.
    """
    challenge = Challenge(address, token)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(challenge.message(b"Connection: close\r\n")[0])
        answer = b""
        while len(answer) < _LONGEST_PROOF_BYTES and (more := await reader.read(_LONGEST_PROOF_BYTES)):
            answer += more
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[:12].rpartition(b" ")[2]
    challenge.check(int(status) if status.isdigit() else 0, body, is_open=True)


def require_proof_over(connection: http.client.HTTPConnection, address: Address, token: str) -> None:
    """Make sure that who is at the other end of `connection` knows the token; it can then be used for more.

    Raises:
        UnprovenServerError: it does not.
        OSError, http.client.HTTPException: it does not answer in time, or not in HTTP.
    """
    challenge = Challenge(address, token)
    connection.request("GET", PROOF_PATH, headers=challenge.headers)
    with connection.getresponse() as response:
        body = response.read(_LONGEST_PROOF_BYTES)
        challenge.check(response.status, body, is_open=connection.sock is not None and response.length == 0)
    connection.auto_open = 0  # another connection may lead to somebody else
