"""What a caller of a server may have to catch.

All of these can be pickled (they cross process and Ray boundaries) and stay what existing code
catches: aiohttp's client errors, `OSError`, `TimeoutError`, `ValueError`.
"""

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.errors import ConfigError, GymError

ERROR_STATUS_HEADER = "x-nemo-gym-error-status"
ERROR_SERVER_HEADER = "x-nemo-gym-error-server"
ERROR_CLASS_HEADER = "x-nemo-gym-error-class"
ERROR_HEADERS = (ERROR_STATUS_HEADER, ERROR_SERVER_HEADER, ERROR_CLASS_HEADER)
"""Headers of an error answer that describe the innermost failure; every hop passes them on unchanged."""

_EXCERPT_LENGTH = 500


class HttpSettingsError(ConfigError, ValueError):
    """A setting of the HTTP client has an impossible value."""


class HeadServerError(ConfigError, ValueError):
    """The head server cannot be reached, or what answers in its place is none."""


class ServerResponseError(GymError, aiohttp.ClientResponseError):
    """A server answered with an error status.

    `status` and `response_content` are the answer's own. `error_status`, `error_server` and
    `error_class` describe the innermost failure, however many servers lie between.
    """

    def __init__(
        self,
        url: str,
        status: int,
        response_content: bytes = b"",
        *,
        method: str = "POST",
        headers: Iterable[tuple[str, str]] = (),
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        url = mask_url_passwords(url)
        parsed = URL(url)
        # The headers of the request stay out of the error: they hold the API key.
        request_info = aiohttp.RequestInfo(parsed, method, CIMultiDictProxy(CIMultiDict()), parsed)
        super().__init__(
            request_info, (), status=status, message=reason_phrase(status), headers=CIMultiDict(list(headers))
        )
        self.url = url
        self.method = method
        self.response_content = response_content
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.args = (str(self),)

    @property
    def error_status(self) -> int:
        """The status of the innermost failure; this answer's own when it is the innermost."""
        text = self._header(ERROR_STATUS_HEADER)
        return int(text) if text is not None and text.isdecimal() else self.status

    @property
    def error_server(self) -> str | None:
        """The server in which the innermost failure happened, if it said so."""
        return self._header(ERROR_SERVER_HEADER)

    @property
    def error_class(self) -> str | None:
        """The name of the innermost exception's class, if it was said."""
        return self._header(ERROR_CLASS_HEADER)

    def _header(self, name: str) -> str | None:
        return None if self.headers is None else self.headers.get(name)

    def __str__(self) -> str:
        tries = f" (try {self.attempts}, after {self.elapsed_s:.1f} s)" if self.attempts > 1 else ""
        origin = ""
        if self.error_server is not None:
            origin = f" [failed in {self.error_server!r}: {self.error_class}, status {self.error_status}]"
        return f"{self.status} {self.message} from {self.method} {self.url}{tries}{origin}: {self.excerpt()}"

    def excerpt(self, length: int = _EXCERPT_LENGTH) -> str:
        """The beginning of the answer's body, as text."""
        return excerpt(self.response_content, length)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        headers = [] if self.headers is None else list(self.headers.items())
        arguments = (self.url, self.status, self.response_content)
        options = {
            "method": self.method,
            "headers": headers,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        return _rebuild, (type(self), arguments, options)


class ServerCallError(GymError):
    """A call that ended without an answer: which server, where, how many tries, how long."""

    message: Any

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        method: str = "",
        server_name: str | None = None,
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        self.args = (message,)
        self.message = message
        self.url = url
        self.method = method
        self.server_name = server_name
        self.attempts = attempts
        self.elapsed_s = elapsed_s

    def __str__(self) -> str:
        return str(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    def __reduce__(self) -> tuple[object, ...]:
        options = {
            "url": self.url,
            "method": self.method,
            "server_name": self.server_name,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        return _rebuild, (type(self), (self.message,), options)


class ServerUnreachableError(ServerCallError, aiohttp.ClientOSError):
    """No connection came about: the request was never sent."""


class ServerLostError(ServerCallError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
    """The connection broke after the request went out: it may or may not have been carried out."""


class ServerCallTimeoutError(ServerCallError, aiohttp.ServerTimeoutError):
    """No complete answer in the allowed time: the request may or may not have been carried out."""


class MalformedResponseError(GymError, json.JSONDecodeError):
    """A server answered with a body that is not JSON."""

    def __init__(self, message: str, body: bytes = b"", pos: int = 0) -> None:
        self.body = body
        json.JSONDecodeError.__init__(self, message, body.decode(errors="replace"), pos)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.msg, self.body, self.pos)


def failure_headers(error: BaseException, server_name: str) -> dict[str, str]:
    """The headers that tell callers of `server_name` where the failure behind `error` began."""
    if isinstance(error, ServerResponseError) and error.error_server is not None:
        received: Mapping[str, str] = error.headers or {}
        return {name: received[name] for name in ERROR_HEADERS if name in received}
    status = error.status if isinstance(error, aiohttp.ClientResponseError) else HTTPStatus.INTERNAL_SERVER_ERROR
    name = error.server_name if isinstance(error, ServerCallError) and error.server_name else server_name
    described = {
        ERROR_STATUS_HEADER: str(int(status)),
        ERROR_SERVER_HEADER: name,
        ERROR_CLASS_HEADER: type(error).__name__,
    }
    return {header: value.encode("ascii", "replace").decode("ascii") for header, value in described.items()}


def reason_phrase(status: int) -> str:
    """The standard words for a status; empty for statuses nobody named."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def excerpt(body: bytes, length: int = _EXCERPT_LENGTH) -> str:
    """The beginning of a body, as text on one line."""
    text = " ".join(body[: 4 * length].decode(errors="replace").split())
    return text if len(text) <= length else f"{text[:length]}…"


def _rebuild(cls: type[BaseException], arguments: tuple[object, ...], options: dict[str, object]) -> BaseException:
    return cls(*arguments, **options)
