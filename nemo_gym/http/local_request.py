"""A request to a colocated server: aiohttp's keyword arguments turned into an ASGI scope and a body.

Only what needs no socket is translated. For anything else (forms, streams, authentication, proxies)
`local_request` answers None and the caller uses HTTP: the server listens on its port as well.
"""

import re
from functools import lru_cache
from http.cookies import Morsel
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from aiohttp import ClientTimeout, CookieJar
from yarl import URL

JSON_CONTENT_TYPE = "application/json"
JSON_HEADERS = MappingProxyType({"Content-Type": JSON_CONTENT_TYPE})
"""Of a request that says nothing else about itself."""

_UNDERSTOOD = frozenset({"data", "headers", "cookies", "params", "timeout", "allow_redirects"})
_JSON_CALL = frozenset({"data", "headers", "cookies"})
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/_.~-]*").fullmatch
_PLAIN_COOKIE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~:/=@-]*").fullmatch
_IS_JSON = (b"content-type", JSON_CONTENT_TYPE.encode())
_ACCEPT = (b"accept", b"*/*")
_HAVE_BODIES = frozenset({"PATCH", "POST", "PUT"})
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_TYPE_OF_TEXT = b"text/plain; charset=utf-8"
_TYPE_OF_BYTES = b"application/octet-stream"
_NOT_PLAIN_MORSEL = ("domain", "secure", "expires")


class ReceivedCookie(Morsel[str]):
    """A cookie that an answer set, and the `name=value` to send back if it applies to every URL."""

    plain_pair: str | None = None

    def __init__(self) -> None:
        """Left empty, unlike any other morsel: whoever reads the cookie fills in name, value and all attributes."""


class LocalRequest(NamedTuple):
    """One request as an ASGI server would hand it on."""

    method: str
    url: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    timeout_s: float | None
    """None means the client's own limit."""
    content: Any = None
    """Handed over instead of a body, to a server that takes it."""


def local_request(method: str, base_url: str, url_path: str, kwargs: dict[str, Any]) -> LocalRequest | None:
    """The request `kwargs` describe; None when it takes a real connection."""
    if kwargs.get("headers") is JSON_HEADERS and _JSON_CALL.issuperset(kwargs):
        return json_request(method, base_url, url_path, kwargs.get("data", b""), kwargs.get("cookies"))
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
    headers = _translated(kwargs.get("headers") or {}, method, base_url, data, body)
    if cookies := kwargs.get("cookies"):
        headers = _with_cookies(headers, _cookie_header(cookies, base_url, url_path).encode())
    timeout = kwargs.get("timeout")
    if isinstance(timeout, ClientTimeout):
        timeout = timeout.total
    return LocalRequest(method, *target, headers, body, timeout)


def json_request(
    method: str, base_url: str, url_path: str, body: bytes, cookies: Any, content: Any = None
) -> LocalRequest:
    """What nearly every call between servers is."""
    headers = [*_json_headers(base_url), (b"content-length", b"%d" % len(body))]
    if cookies:
        headers.insert(0, (b"cookie", _cookie_header(cookies, base_url, url_path).encode()))
    return LocalRequest(method.upper(), *_target(base_url, url_path), headers, body, None, content)


@lru_cache
def _json_headers(base_url: str) -> tuple[tuple[bytes, bytes], ...]:
    return _IS_JSON, _host(base_url), _ACCEPT


@lru_cache(4096)
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
    kept = [value for name, value in headers if name == b"cookie" and value]
    return [(b"cookie", b"; ".join([*kept, own])), *(item for item in headers if item[0] != b"cookie")]


def _translated(given: Any, method: str, base_url: str, data: Any, body: bytes) -> list[tuple[bytes, bytes]]:
    """Headers as an ASGI server hands them on, with those that aiohttp adds of its own accord.

    Where the body ends is not the caller's to say: a wrong length would make its rest the next request.
    """
    pairs = given.items() if hasattr(given, "items") else given
    has_body = data is not None or method in _HAVE_BODIES
    headers = [*_fixed_headers(tuple(pairs), base_url, has_body, isinstance(data, str))]
    if body or method not in ("GET", "HEAD", "OPTIONS", "TRACE"):
        headers.append((b"content-length", b"%d" % len(body)))
    return headers


@lru_cache(1024)  # those of one caller are the same every time
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
    if b"accept" not in names:
        headers.append(_ACCEPT)
    return tuple(headers)


@lru_cache
def _host(base_url: str) -> tuple[bytes, bytes]:
    return b"host", base_url.partition("://")[2].encode("ascii")


def _cookie_header(cookies: Any, base_url: str, path: str) -> str:
    """The cookies that apply to a path, judged as aiohttp judges them."""
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


def is_plain(morsel: Morsel[str]) -> bool:
    """Whether a cookie applies to every URL."""
    if morsel["path"] not in ("", "/") or any(morsel[attribute] for attribute in _NOT_PLAIN_MORSEL):
        return False
    return morsel["max-age"] == "" or str(morsel["max-age"]).lstrip("0").isdecimal()
