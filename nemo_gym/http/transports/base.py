"""What every transport has in common: the Protocol, the registry, and the request that all of them carry.

A transport takes a whole request to a server and returns the answer: `exchange(request, timeout_s)`. Servers in the
same event loop are reached in memory; `ServerClient` looks for them by name before anything else. Everyone else has
an address, and the first transport of `TRANSPORTS` that can be opened here carries the request there.

A request is aiohttp's keyword arguments turned into an ASGI scope and a body. Only what needs no more is translated.
For anything else (forms, streams, authentication, proxies) `local_request` answers None, and the request goes to
aiohttp as it is: a server that lives here listens on its port as well.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from http.cookies import Morsel, SimpleCookie
from importlib import import_module
from ipaddress import ip_address
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from aiohttp import AddrInfoType, ClientResponse, ClientTimeout, CookieJar
from aiohttp.http import SERVER_SOFTWARE
from yarl import URL

from nemo_gym.http.addresses import Address, TlsAddress
from nemo_gym.http.run_answers import ATTEMPT_HEADER
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.http.transports.response import LocalResponse, RawHeaders, ReceivedCookie, bounded_cache, is_plain
from nemo_gym.process_inputs import num_workers
from nemo_gym.rollout_correlation import ROLLOUT_HEADER

TRANSPORTS = [
    "nemo_gym.http.transports.wire",
    "nemo_gym.http.transports.session",
]
"""Ways to an address, the one to prefer first; one is taken out by deleting its module and its line.

Each module has an `open_transport(settings)`, which returns None where the transport cannot work.
"""
KEEPALIVE_TIMEOUT_S = 15.0
"""How long an idle connection is kept: long before servers of ours close it."""
MAX_HEAD_BYTES = 64 * 1024
"""Of everything in an answer before the body: status line and headers, also of interim answers."""
JSON_CONTENT_TYPE = "application/json"
JSON_HEADERS = MappingProxyType({"Content-Type": JSON_CONTENT_TYPE})
"""Of a request that says nothing else about itself."""
_UNDERSTOOD = frozenset({"data", "headers", "cookies", "params", "timeout", "allow_redirects"})
_JSON_CALL = frozenset({"data", "headers", "cookies"})
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/_.~-]*").fullmatch
_PLAIN_COOKIE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~:/=@-]*").fullmatch
_IS_JSON = (b"content-type", JSON_CONTENT_TYPE.encode())
_ACCEPT = (b"accept", b"*/*")
_OF_AIOHTTP = ((b"user-agent", SERVER_SOFTWARE.encode()), (b"accept-encoding", b"gzip, deflate"))
"""What aiohttp says to everyone; gateways in front of an endpoint turn away who does not say what it is."""
_HOST_NAME = re.compile(r"(?![0-9.]+$)[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*").fullmatch
"""Names without a dot at the end, and none of the short forms of addresses, which aiohttp refuses."""
_HAVE_BODIES = frozenset({"PATCH", "POST", "PUT"})
_OF_ONE_ROLLOUT = {name: name.encode() for name in (ATTEMPT_HEADER, ROLLOUT_HEADER)}
"""Headers of ours that hardly ever have the same value again."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_TYPE_OF_TEXT = b"text/plain; charset=utf-8"
_TYPE_OF_BYTES = b"application/octet-stream"
_LONG_S = 60.0
"""Limits from which on a second more does not matter."""
_LOOKED_AT_EVERY_S = 1.0


class LocalRequest(NamedTuple):
    """One request as an ASGI server would hand it on."""

    method: str
    url: str
    path: str
    raw_path: bytes
    query: bytes
    headers: RawHeaders
    body: bytes
    timeout_s: float | None
    """None means the client's own limit."""
    address: Address | TlsAddress | None = None
    """Where its server listens; None: nowhere."""
    head: bytes | None = None
    """All that goes over the wire before the body, where somebody knows it; it says the same as the fields above."""
    pieces: Sequence[bytes] = ()
    """The body in pieces, where it is long and they are used again; `body` is empty then."""


_as_request = tuple.__new__
"""Makes a `LocalRequest` of all its fields, in a third of the time that its own constructor takes."""


class Transport(Protocol):
    """One way for a request to reach a server."""

    async def exchange(self, request: LocalRequest, timeout_s: float, /) -> LocalResponse | ClientResponse:
        """Send a request once and return the answer, whatever its status; redirects are not followed.

        Raises:
            aiohttp.ClientConnectorError, CannotConnectError, aiohttp.ConnectionTimeoutError: nothing was sent.
            UnprovenServerError: nothing was sent: it would show the run's token to somebody who does not know it.
            aiohttp.ClientConnectionError: the connection broke before the answer began.
            NotHttpAnswerError: what came back is not HTTP.
            AnswerTooLargeError: more came back than is allowed.
            TimeoutError: no complete answer within `timeout_s`.
        """


class OpenTransport(Transport, Protocol):
    """A transport to addresses, with the connections of one event loop."""

    def ensure_capacity(self, connections: int, /) -> None:
        """Raise the limits, where there are any, so that one server may be sent that many calls at once."""

    async def aclose(self) -> None:
        """Close every connection."""


def open_transports(settings: GlobalAIOHTTPAsyncClientConfig) -> list[OpenTransport]:
    """The transports of the registry that work here, for the running event loop, the one to prefer first."""
    opened = [import_module(name).open_transport(settings) for name in TRANSPORTS]
    return [transport for transport in opened if transport is not None]


class Timer(Protocol):
    """What is going to happen unless it is cancelled."""

    def cancel(self) -> None:
        """Have it not happen."""


class _LongWaits(dict["time_limit | _LongWait", float]):
    """When the long limits of one event loop end: all have one timer, which costs a tenth of one for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        loop.call_later(_LOOKED_AT_EVERY_S, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        for wait in [wait for wait, until_s in self.items() if until_s <= now_s]:
            wait.cancel()
            wait.end()
        if self:
            self._loop.call_later(_LOOKED_AT_EVERY_S, self._look)
        else:
            _LONG_WAITS.pop(self._loop, None)


class _LongWait:
    __slots__ = ("_argument", "_give_up", "_waits")

    def __init__(self, waits: _LongWaits, give_up: Callable[[Any], object], argument: Any) -> None:
        self._waits, self._give_up, self._argument = waits, give_up, argument

    def cancel(self) -> None:
        self._waits.pop(self, None)

    def end(self) -> None:
        self._give_up(self._argument)


_LONG_WAITS: dict[asyncio.AbstractEventLoop, _LongWaits] = {}


def _long_waits(loop: asyncio.AbstractEventLoop) -> _LongWaits:
    for closed in [known for known in _LONG_WAITS if known.is_closed()]:
        del _LONG_WAITS[closed]
    waits = _LONG_WAITS[loop] = _LongWaits(loop)
    return waits


def call_after(
    loop: asyncio.AbstractEventLoop, limit_s: float, give_up: Callable[[Any], object], argument: Any
) -> Timer:
    """`loop.call_later` for what hardly ever happens: after a long limit it does up to a second late."""
    if limit_s < _LONG_S:
        return loop.call_later(limit_s, give_up, argument)
    waits = _LONG_WAITS.get(loop)
    if waits is None:
        waits = _long_waits(loop)
    wait = _LongWait(waits, give_up, argument)
    waits[wait] = loop.time() + limit_s
    return wait


class time_limit:  # noqa: N801 - reads as the function it would be
    """`asyncio.timeout`, entered by a plain `with`, and at a fifth of its cost; a long limit may be a second late."""

    __slots__ = ("_before", "_is_over", "_limit_s", "_loop", "_task", "_timer", "_waits")

    def __init__(self, limit_s: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the running one, for who has it at hand: to ask for it takes a call of the system."""
        self._limit_s = limit_s
        self._loop = loop
        self._is_over = False

    def __enter__(self) -> None:
        loop = self._loop or asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._waits = _LONG_WAITS.get(loop)
        if self._waits is None or self._limit_s < _LONG_S:
            self._waits = None
            self._timer = call_after(loop, self._limit_s, time_limit.end, self)
        else:
            self._waits[self] = loop.time() + self._limit_s

    def cancel(self) -> None:
        """Stop the clock."""
        if self._waits is None:
            self._timer.cancel()
        else:
            self._waits.pop(self, None)

    def end(self) -> None:
        """The time is over."""
        self._is_over = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._waits is None:
            self._timer.cancel()
        else:
            self._waits.pop(self, None)
        if self._is_over and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Target(NamedTuple):
    """Where a URL leads, if that is HTTP or HTTPS to an address or a host name."""

    address: Address | TlsAddress
    origin: str
    path: str


@bounded_cache(4096)
def target_of(url: str) -> Target | None:
    """The target of a URL; None if it takes more than a bare connection."""
    try:
        parsed = URL(url)
        host, port = parsed.raw_host or "", parsed.port
        if not _HOST_NAME(host):
            ip_address(host)
    except ValueError:
        return None
    if parsed.scheme not in ("http", "https") or parsed.raw_user is not None or port is None:
        return None
    address = TlsAddress(host, port) if parsed.scheme == "https" else Address(host, port)
    return Target(address, str(parsed.origin()), parsed.raw_path_qs)


def local_request(
    method: str, base_url: str, url_path: str, kwargs: dict[str, Any], address: Address | TlsAddress | None = None
) -> LocalRequest | None:
    """The request `kwargs` describe; None when only aiohttp can make it."""
    if kwargs.get("headers") is JSON_HEADERS and _JSON_CALL.issuperset(kwargs):
        body, cookies = kwargs.get("data", b""), kwargs.get("cookies")
        return json_request(method.upper(), base_url, url_path, body, cookies, address)
    if not _UNDERSTOOD.issuperset(kwargs):
        return None
    data = kwargs.get("data")
    if data is None:
        body = b""
    elif isinstance(data, bytes):
        body = data
    elif isinstance(data, str):
        body = data.encode()
    else:
        return None
    params = kwargs.get("params")
    target = _target_with(base_url, url_path, params) if params else _target(base_url, url_path)
    method = method.upper()
    headers, fixed = _translated(kwargs.get("headers") or {}, method, base_url, data, body)
    head = None
    if cookies := kwargs.get("cookies"):
        headers = _with_cookies(headers, _cookie_header(cookies, base_url, url_path).encode())
    elif fixed and (beginning := _beginning(method, target, fixed)) is not None:
        head = b"%bcontent-length: %d\r\n\r\n" % (beginning, len(body))
    timeout = kwargs.get("timeout")
    if isinstance(timeout, ClientTimeout):
        timeout = timeout.total
    return _as_request(LocalRequest, (method, *target, headers, body, timeout, address, head, ()))


def message_of(request: LocalRequest) -> Sequence[bytes]:
    """Head and body as they go out, in pieces.

    Raises:
        ValueError: the method or a header holds what would end its line.
    """
    target = b"%b?%b" % (request.raw_path, request.query) if request.query else request.raw_path
    lines = [b"%b: %b\r\n" % header for header in request.headers]
    head = b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode("ascii"), target, b"".join(lines))
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2 or b"\0" in head or " " in request.method:
        raise ValueError(f"a header of {request.method!r} {request.path} holds a line break or a null")
    return head, *(request.pieces or (request.body,))


def json_request(
    method: str,
    base_url: str,
    url_path: str,
    body: bytes,
    cookies: Any,
    address: Address | TlsAddress | None = None,
) -> LocalRequest:
    """What nearly every call between servers is; `method` is in capitals."""
    length = (b"content-length", b"%d" % len(body))
    if cookies:
        own = (b"cookie", _cookie_header(cookies, base_url, url_path).encode())
        headers = [own, *_json_headers(base_url), length]
    else:
        headers = [*_json_headers(base_url), length]
    target = _target(base_url, url_path)
    return _as_request(LocalRequest, (method, *target, headers, body, None, address, None, ()))


@lru_cache
def _json_headers(base_url: str) -> tuple[tuple[bytes, bytes], ...]:
    return _IS_JSON, _host(base_url), _ACCEPT, *_of_client(base_url)


@bounded_cache(4096)
def _target(base_url: str, url_path: str) -> tuple[str, str, bytes, bytes]:
    """URL, path, path as it goes over the wire, and query."""
    if _PLAIN_PATH(url_path) and "/." not in url_path:
        return base_url + url_path, url_path, url_path.encode("ascii"), b""
    return _parts(URL(base_url + url_path))


def _target_with(base_url: str, url_path: str, params: Any) -> tuple[str, str, bytes, bytes]:
    return _parts(URL(base_url + url_path).extend_query(params))


def _parts(url: URL) -> tuple[str, str, bytes, bytes]:
    return str(url), unquote(url.raw_path), url.raw_path.encode("ascii"), url.raw_query_string.encode("ascii")


def _with_cookies(headers: list[tuple[bytes, bytes]], own: bytes) -> list[tuple[bytes, bytes]]:
    for name, _ in headers:
        if name == b"cookie":
            break
    else:
        return [(b"cookie", own), *headers]
    kept = [value for name, value in headers if name == b"cookie" and value]
    return [(b"cookie", b"; ".join([*kept, own])), *(item for item in headers if item[0] != b"cookie")]


def _translated(
    given: Any, method: str, base_url: str, data: Any, body: bytes
) -> tuple[list[tuple[bytes, bytes]], tuple[tuple[bytes, bytes], ...]]:
    """Headers as an ASGI server hands them on, with those that aiohttp adds of its own accord.

    Also those of them that are the same every time, if only the length of the body follows.

    Where the body ends is not the caller's to say: a wrong length would make its rest the next request.
    """
    pairs = tuple(given.items() if hasattr(given, "items") else given)
    has_body = data is not None or method in _HAVE_BODIES
    if ROLLOUT_HEADER in given or ATTEMPT_HEADER in given:
        own = [(_OF_ONE_ROLLOUT[name], str(value).encode()) for name, value in pairs if name in _OF_ONE_ROLLOUT]
        pairs = tuple([pair for pair in pairs if pair[0] not in _OF_ONE_ROLLOUT])
        headers = [*_fixed_headers(pairs, base_url, has_body, isinstance(data, str)), *own]
        fixed: tuple[tuple[bytes, bytes], ...] = ()
    else:
        fixed = _fixed_headers(pairs, base_url, has_body, isinstance(data, str))
        headers = [*fixed]
    if body or method not in ("GET", "HEAD", "OPTIONS", "TRACE"):
        headers.append((b"content-length", b"%d" % len(body)))
        return headers, fixed
    return headers, ()


@bounded_cache(1024)
def _beginning(
    method: str, target: tuple[str, str, bytes, bytes], fixed: tuple[tuple[bytes, bytes], ...]
) -> bytes | None:
    """What goes over the wire before the length of a body; None if it cannot."""
    url, path, raw_path, query = target
    try:
        head, _ = message_of(LocalRequest(method, url, path, raw_path, query, [*fixed], b"", None))
    except ValueError:
        return None
    return head.removesuffix(b"\r\n")


@bounded_cache(1024)  # those of one caller are the same every time
def _fixed_headers(
    pairs: tuple[tuple[str, Any], ...], base_url: str, has_body: bool, is_text: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """All but the length."""
    headers = [(name.lower().encode("ascii"), str(value).encode()) for name, value in pairs]
    headers = [header for header in headers if header[0] not in _FRAMING]
    names = {name for name, _ in headers}
    if b"content-type" not in names and has_body:
        headers.append((b"content-type", _TYPE_OF_TEXT if is_text else _TYPE_OF_BYTES))
    if b"host" not in names:
        headers.append(_host(base_url))
    headers += [header for header in (_ACCEPT, *_of_client(base_url)) if header[0] not in names]
    return tuple(headers)


@lru_cache
def _host(base_url: str) -> tuple[bytes, bytes]:
    return b"host", base_url.partition("://")[2].encode("ascii")


def _of_client(base_url: str) -> tuple[tuple[bytes, bytes], ...]:
    """What the client says of itself: nothing to a plain address, which is a server of ours or next to one."""
    target = target_of(base_url)
    is_plain_address = target is None or (target.address.scheme == "http" and is_bare(target.address.host))
    return () if is_plain_address else _OF_AIOHTTP


def is_bare(host: str) -> bool:
    """Whether a host is an address, or known to be one without asking anybody."""
    return host == "localhost" or not _HOST_NAME(host)


def _cookie_header(cookies: Any, base_url: str, path: str) -> str:
    """The cookies that apply to a path, judged as aiohttp judges them."""
    if type(cookies) is SimpleCookie and len(cookies) == 1:
        (only,) = cookies.values()
        if type(only) is ReceivedCookie and only.plain_pair is not None:
            return only.plain_pair
    pairs = list(cookies.items() if hasattr(cookies, "items") else cookies)
    plain = [_plain_pair(name, value) for name, value in pairs]
    if None not in plain:
        return "; ".join(plain)  # type: ignore[arg-type]
    jar = CookieJar()
    jar.update_cookies(pairs)
    chosen = jar.filter_cookies(URL(base_url + path))
    return "; ".join(f"{name}={morsel.coded_value}" for name, morsel in chosen.items())


def _plain_pair(name: str, value: Any) -> str | None:
    """`name=value` of a cookie that applies to every URL and needs no quoting."""
    if isinstance(value, ReceivedCookie):
        return value.plain_pair
    if isinstance(value, Morsel):
        return f"{name}={value.coded_value}" if is_plain(value) else None
    return f"{name}={value}" if _PLAIN_COOKIE(str(value)) else None


def workers_share(limit: int) -> int:
    """This worker's share of a limit; 0, which is no limit, stays 0."""
    workers = max(1, num_workers())
    return max(1, limit // workers) if limit else 0


def socket_factory(settings: GlobalAIOHTTPAsyncClientConfig) -> Callable[[Any], socket.socket]:
    """Makes sockets that notice a peer whose machine vanished, where the platform can."""
    wanted = {
        "TCP_KEEPIDLE": settings.global_aiohttp_tcp_keepalive_idle_seconds,
        "TCP_KEEPINTVL": settings.global_aiohttp_tcp_keepalive_interval_seconds,
        "TCP_KEEPCNT": settings.global_aiohttp_tcp_keepalive_probes,
    }
    options = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]

    def make(address: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in options:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        return made

    return make
