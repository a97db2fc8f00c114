"""A whole answer, of a colocated server or one asked over a bare connection: to its caller aiohttp's `ClientResponse`.

The body is already there, so nothing here waits; the methods are coroutines because aiohttp's are.
"""

import asyncio
import json
from collections.abc import Callable
from email.message import Message
from functools import _lru_cache_wrapper, lru_cache, update_wrapper
from http.cookies import CookieError, Morsel, SimpleCookie
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from nemo_gym.http.errors import ServerResponseError, reason_phrase

RawHeaders = list[tuple[bytes, bytes]]
_DECODER = SimpleCookie()
_fill: Callable[[Morsel[str], dict[str, str]], None] = Morsel.__setstate__  # type: ignore[attr-defined]
_SET_COOKIE = (b"set-cookie", b"Set-Cookie")
_FLAGS = ("secure", "httponly", "partitioned")
_NOT_PLAIN_MORSEL = ("domain", "secure", "expires")
MOST_KEY_CHARACTERS = 4_000_000
_Result = TypeVar("_Result")


def bounded_cache(
    max_entries: int, most_characters: int = MOST_KEY_CHARACTERS
) -> "Callable[[Callable[..., _Result]], _lru_cache_wrapper[_Result]]":
    """An `lru_cache` that is emptied before its keys are longer than so many characters in all.

    Looking something up costs what it costs there; only what is new is measured. An only argument has a length.
    """

    def decorate(function: Callable[..., _Result]) -> "_lru_cache_wrapper[_Result]":
        kept = 0

        @lru_cache(max_entries)
        def look_up(*args: Any) -> _Result:
            nonlocal kept
            length = len(args[0] if len(args) == 1 else repr(args))
            kept += length
            if kept > most_characters:
                look_up.cache_clear()
                kept = length
            return function(*args)

        update_wrapper(look_up, function)
        return look_up

    return decorate


class ReceivedCookie(Morsel[str]):
    """A cookie that an answer set, and the `name=value` to send back if it applies to every URL."""

    plain_pair: str | None = None
    name = ""

    def __init__(self) -> None:
        """Left empty, unlike any other morsel: whoever reads the cookie fills in name, value and all attributes."""


class LocalResponse:
    """An answer that needs no socket any more."""

    history: tuple[()] = ()
    closed = True
    connection = None
    _headers: CIMultiDictProxy[str] | None = None
    _cookies: SimpleCookie | None = None
    _content: aiohttp.StreamReader | None = None

    def __init__(
        self,
        method: str,
        url: str,
        status: int,
        raw_headers: RawHeaders,
        body: bytes,
        *,
        broken: bool = False,
        sent_headers: RawHeaders | None = None,
    ) -> None:
        self.method = method
        self.status = status
        self.ok = status < 400
        self.raw_headers = tuple(raw_headers)
        self._url = url
        self._body = body
        self._broken = broken
        self._sent_headers = sent_headers

    @property
    def reason(self) -> str:
        """The standard words for the status."""
        return reason_phrase(self.status)

    @property
    def url(self) -> URL:
        """Where the same request would have gone over HTTP."""
        return URL(self._url)

    real_url = url

    @property
    def host(self) -> str | None:
        """The host of the URL."""
        return self.url.host

    @property
    def request_info(self) -> aiohttp.RequestInfo:
        """What was asked for."""
        sent = CIMultiDict((_text(name), _text(value)) for name, value in self._sent_headers or ())
        return aiohttp.RequestInfo(self.url, self.method, CIMultiDictProxy(sent), self.url)

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The answer's headers."""
        if self._headers is None:
            pairs = [(_text(name), _text(value)) for name, value in self.raw_headers]
            self._headers = CIMultiDictProxy(CIMultiDict(pairs))
        return self._headers

    @property
    def cookies(self) -> SimpleCookie:
        """The cookies this answer sets."""
        if self._cookies is None:
            self._cookies = SimpleCookie.__new__(SimpleCookie)  # an empty one needs nothing else
            for name, value in self.raw_headers:
                if name in _SET_COOKIE and (morsel := _read_cookie(value)) is not None:
                    dict.__setitem__(self._cookies, morsel.name, morsel)
        return self._cookies

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self._content_type_header().get_content_type()

    @property
    def charset(self) -> str | None:
        """The character set the content type names."""
        found = self._content_type_header().get_param("charset")
        return found if isinstance(found, str) else None

    def _content_type_header(self) -> Message:
        message = Message()
        message["content-type"] = self.headers.get("content-type", "application/octet-stream")
        return message

    @property
    def content(self) -> aiohttp.StreamReader:
        """The body as a stream."""
        if self._content is None:
            loop = asyncio.get_running_loop()
            self._content = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)
            self._content.feed_data(self._body)
            if self._broken:
                self._content.set_exception(_payload_error())
            else:
                self._content.feed_eof()
        return self._content

    async def read(self) -> bytes:
        """The whole body."""
        if self._broken:
            raise _payload_error()
        return self._body

    def get_encoding(self) -> str:
        """The character set of the body: UTF-8 unless the answer says otherwise."""
        return self.charset or "utf-8"

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        """The body as text."""
        return (await self.read()).decode(encoding or self.get_encoding(), errors)

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: Callable[[str], Any] = json.loads,
        content_type: str | None = "application/json",
    ) -> Any:
        """The body as JSON, provided that the content type says so."""
        is_json = self.content_type == content_type or self.content_type.endswith("+json")
        if content_type and not is_json:
            raise aiohttp.ContentTypeError(
                self.request_info,
                self.history,
                status=self.status,
                message=f"Attempt to decode JSON with unexpected mimetype: {self.content_type}",
                headers=self.headers,
            )
        text = (await self.text(encoding)).strip()
        return loads(text) if text else None

    def raise_for_status(self) -> None:
        """Raise if the status is an error."""
        if not self.ok:
            raise ServerResponseError(
                self._url, self.status, self._body, method=self.method, headers=self.headers.items()
            )

    def release(self) -> "_Nothing":
        """There is no connection to give back."""
        return _NOTHING

    def close(self) -> None:
        """There is no connection to close."""

    async def wait_for_close(self) -> None:
        """There is no connection to wait for."""

    async def __aenter__(self) -> "LocalResponse":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def __repr__(self) -> str:
        return f"<LocalResponse({self._url}) [{self.status} {self.reason}]>"


@bounded_cache(1_024)  # a session's cookie comes with every answer
def _read_cookie(header: bytes) -> ReceivedCookie | None:
    """Read one `Set-Cookie` header. `SimpleCookie.load` gives up at attributes it has not heard of."""
    pair, _, attributes = _text(header).partition(";")
    name, _, coded = pair.strip().partition("=")
    if not _is_name(name):
        return None
    morsel = ReceivedCookie()
    value = _DECODER.value_decode(coded)[0] if coded[:1] == '"' else coded
    try:
        _fill(morsel, {"key": name, "value": value, "coded_value": coded})
    except CookieError:
        return None
    read, applies_everywhere = _attributes(attributes)
    dict.update(morsel, read)
    morsel.name = name
    morsel.plain_pair = f"{name}={coded}" if applies_everywhere else None
    return morsel


@bounded_cache(1024)
def _is_name(name: str) -> bool:
    """Whether a cookie may be called that."""
    try:
        probe: Morsel[str] = Morsel()
        probe.set(name, "", "")
    except CookieError:
        return False
    return True


@bounded_cache(1024)
def _attributes(text: str) -> tuple[Morsel[str], bool]:
    """What follows the pair in a `Set-Cookie` header, and `is_plain` of it: the same for every cookie of a server."""
    read: Morsel[str] = Morsel()
    for attribute in text.split(";"):
        key, _, value = attribute.strip().partition("=")
        if read.isReservedKey(key):
            read[key] = True if key.lower() in _FLAGS else value
    return read, is_plain(read)


def is_plain(morsel: Morsel[str]) -> bool:
    """Whether a cookie applies to every URL."""
    if morsel["path"] not in ("", "/") or any(morsel[attribute] for attribute in _NOT_PLAIN_MORSEL):
        return False
    return morsel["max-age"] == "" or str(morsel["max-age"]).lstrip("0").isdecimal()


class _Nothing:
    """What aiohttp's `release` returns: may be awaited, need not be."""

    def __await__(self) -> Any:
        yield from ()


_NOTHING = _Nothing()


def _payload_error() -> aiohttp.ClientPayloadError:
    return aiohttp.ClientPayloadError("The server ended its answer before it was complete")


def _text(value: bytes) -> str:
    errors: Literal["surrogateescape"] = "surrogateescape"
    return value.decode("utf-8", errors)
