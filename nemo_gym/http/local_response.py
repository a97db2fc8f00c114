"""The answer of a server in the same process: to its caller aiohttp's `ClientResponse`.

The body is already there, so nothing here waits; the methods are coroutines because aiohttp's are.
"""

import asyncio
import json
from collections.abc import Callable
from email.message import Message
from http.cookies import CookieError, Morsel, SimpleCookie
from types import TracebackType
from typing import Any, Literal

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from nemo_gym.http.errors import ServerResponseError, reason_phrase

RawHeaders = list[tuple[bytes, bytes]]
_FLAGS = ("secure", "httponly", "partitioned")


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
    ) -> None:
        self.method = method
        self.status = status
        self.ok = status < 400
        self.raw_headers = tuple(raw_headers)
        self._url = url
        self._body = body
        self._broken = broken

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
        return aiohttp.RequestInfo(self.url, self.method, CIMultiDictProxy(CIMultiDict()), self.url)

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
            self._cookies = SimpleCookie()
            for header in self.headers.getall("set-cookie", ()):
                if (cookie := _read_cookie(header)) is not None:
                    self._cookies[cookie.key] = cookie
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


def _read_cookie(header: str) -> Morsel[str] | None:
    """Read one `Set-Cookie` header. `SimpleCookie.load` gives up at attributes it has not heard of."""
    pair, _, attributes = header.partition(";")
    name, _, coded = pair.strip().partition("=")
    cookie: Morsel[str] = Morsel()
    try:
        cookie.set(name, SimpleCookie().value_decode(coded)[0], coded)
    except CookieError:
        return None
    for attribute in attributes.split(";"):
        key, _, value = attribute.strip().partition("=")
        if cookie.isReservedKey(key):
            cookie[key] = True if key.lower() in _FLAGS else value
    return cookie


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
