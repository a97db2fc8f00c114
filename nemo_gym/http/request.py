"""One HTTP request, tried again only while it has not been sent.

A refused connection, an unknown host name and a connection that takes too long to open leave the
server untouched: such calls are repeated, within bounds. Once a request went out it may have been
carried out, so whatever happens then is the caller's to know: a tool is never run twice. Answers
are returned whatever their status.
"""

import asyncio
import errno
import json as stdlib_json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import aiohttp
import orjson
from aiohttp import ClientResponse, ClientTimeout
from multidict import CIMultiDict
from pydantic import BaseModel

from nemo_gym.config.secrets import is_secret_key, mask_url_passwords
from nemo_gym.http.errors import (
    MalformedResponseError,
    ServerCallError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
    excerpt,
)
from nemo_gym.http.local_request import JSON_CONTENT_TYPE, JSON_HEADERS, local_request
from nemo_gym.http.redirects import REDIRECTS, redirect_of
from nemo_gym.http.retry import Tries
from nemo_gym.http.seams import replaceable
from nemo_gym.http.session import (
    current_settings,
    get_global_aiohttp_client,
    is_global_aiohttp_client_request_debug_enabled,
    wire_pool,
)
from nemo_gym.http.wire import CannotConnectError, target_of
from nemo_gym.keys import MASK

logger = logging.getLogger(__name__)

NEVER_HEALS = (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError)
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, CannotConnectError)
TRANSPORT_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, *NEVER_HEALS)

_SHORTEST_SECRET = 6
"""What is shorter is no secret worth the name, and would turn up in any text."""


class Call(NamedTuple):
    """Whom a call is for, as its errors name it."""

    method: str
    url: str
    server_name: str | None = None
    internal: bool = False
    timeout_key: str = "http_total_timeout_s"

    @property
    def shown_url(self) -> str:
        """The URL without a password it may hold."""
        return mask_url_passwords(self.url)


async def request(method: str, url: str, _internal: bool = False, **kwargs: Any) -> ClientResponse:
    """Send one request, with aiohttp's keyword arguments, and return the answer whatever its status.

    `_internal` marks calls between servers of one run; it only shows in the words of an error.
    """
    return await send(method, lambda: url, with_json_body(kwargs), internal=_internal)


async def send(
    method: str,
    choose_url: Callable[[], str],
    kwargs: dict[str, Any],
    *,
    internal: bool,
    server_name: str | None = None,
    not_sent: Callable[[], None] = lambda: None,
) -> ClientResponse:
    """Send one request; `choose_url` is asked before every try, `not_sent` told of tries that reached nobody."""
    tries = Tries(current_settings().retry_between_servers)
    while True:
        url = choose_url()
        try:
            return await try_once(method, url, kwargs, whole=internal)
        except TRANSPORT_ERRORS as error:
            pause_s = tries.pause_after_failure()
            call = Call(method, url, server_name, internal)
            failure = call_failure(error, call, tries)
            if pause_s is None or not isinstance(failure, ServerUnreachableError) or isinstance(error, NEVER_HEALS):
                raise failure from error
            not_sent()
        tries.warn_of_first(mask_url_passwords(url.partition("?")[0]), str(failure))
        await asyncio.sleep(pause_s)


async def try_once(method: str, url: str, kwargs: dict[str, Any], *, whole: bool) -> ClientResponse:
    """Send one request once; `whole` says that its answer is of no use before it is complete."""
    client_of_loop = replaceable("get_global_aiohttp_client", get_global_aiohttp_client)
    is_plain = whole and method.upper() != "HEAD" and client_of_loop is get_global_aiohttp_client
    target = target_of(url) if is_plain and not _bounds_more_than_the_whole(kwargs.get("timeout")) else None
    request = None if target is None else local_request(method, target.origin, target.path, kwargs)
    if target is not None and request is not None:
        timeout_s = request.timeout_s or current_settings().http_total_timeout_s
        answer = await wire_pool().exchange(target, request, timeout_s)
        redirect = redirect_of(answer, kwargs) if answer.status in REDIRECTS else None
        if redirect is None:
            return cast(ClientResponse, answer)
        method, url, kwargs = redirect
    return await client_of_loop().request(method=method, url=url, **kwargs)


def _bounds_more_than_the_whole(timeout: Any) -> bool:
    """Whether a call's own timeout also bounds parts of it, which takes aiohttp."""
    return isinstance(timeout, ClientTimeout) and not (timeout.sock_read is None and timeout.connect is None)


def call_failure(error: BaseException, call: Call, tries: Tries) -> ServerCallError:
    """What a caller is told about a call that ended in `error` instead of an answer."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = f"{call.method} {call.shown_url} (tries: {tries.failures}, {tries.elapsed_s:.1f} s): {cause}"
    who = "the server" if call.server_name is None else f"server {call.server_name!r}"
    kind: type[ServerCallError]
    if isinstance(error, NOT_SENT):
        kind, message = ServerUnreachableError, f"Cannot connect to {who}, {where}. {_remedy(error, call)}"
    elif isinstance(error, TimeoutError):
        kind = ServerCallTimeoutError
        message = (
            f"No answer in time from {who}, {where}. Find out what keeps it, or allow more time "
            f"(`{call.timeout_key}`, or the call's own `timeout`)"
        )
    else:
        kind = ServerLostError
        message = (
            f"The connection to {who} broke after the request was sent, {where}. "
            "It may have been carried out; that server's log should say why it broke"
        )
    return kind(
        message,
        url=call.shown_url,
        method=call.method,
        server_name=call.server_name,
        attempts=tries.failures,
        elapsed_s=tries.elapsed_s,
    )


def _remedy(error: BaseException, call: Call) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "This process has no file descriptors left: raise the limit with `ulimit -n 65535`"
    if call.internal:
        return "Is it running? `ng_status` lists the servers that are, and its log says why it is not"
    return "Check the address, and that something listens there"


def with_json_body(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with a `json` argument turned into bytes; of a pydantic model only the fields set go out."""
    value = kwargs.pop("json", None)
    if value is None:
        return kwargs
    headers: Mapping[str, str] = JSON_HEADERS
    if given := kwargs.get("headers"):
        headers = CIMultiDict(given)
        headers.setdefault("Content-Type", JSON_CONTENT_TYPE)
    return {**kwargs, "data": json_bytes(value), "headers": headers}


def json_bytes(value: Any) -> bytes:
    """`value` as JSON."""
    if not isinstance(value, BaseModel):
        return _encoded(value)
    if type(value).model_dump is not BaseModel.model_dump:
        return _encoded(value.model_dump(exclude_unset=True))
    return value.__pydantic_serializer__.to_json(value, exclude_unset=True)


def _encoded(value: Any) -> bytes:
    """Numbers of more than 64 bits and halves of surrogate pairs are JSON, too, and orjson refuses them."""
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError as error:
        try:
            return stdlib_json.dumps(value, default=_plain, separators=(",", ":")).encode()
        except (TypeError, ValueError):
            raise error from None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    raise TypeError  # orjson words it, naming the type


async def raise_for_status(response: ClientResponse) -> None:
    """Raise `ServerResponseError` with the body of the answer if its status is an error."""
    if response.ok:
        return
    try:
        content = await response.read()
    except (aiohttp.ClientError, TimeoutError):
        content = b""
    if is_global_aiohttp_client_request_debug_enabled():
        url, said = mask_url_passwords(str(response.url)), without_sent_secrets(content, response)
        logger.info("%s: %s %s\nAnswer: %s", response.status, response.method, url, said.decode(errors="replace"))
    raise response_error(response, content)


def response_error(response: ClientResponse, content: bytes, tries: Tries | None = None) -> ServerResponseError:
    """The error that an answer with an error status amounts to."""
    return ServerResponseError(
        str(response.url),
        response.status,
        without_sent_secrets(content, response),
        method=response.method,
        headers=response.headers.items(),
        attempts=1 if tries is None else tries.failures,
        elapsed_s=0.0 if tries is None else tries.elapsed_s,
    )


def without_sent_secrets(body: bytes, response: ClientResponse) -> bytes:
    """`body` with `****` for the keys and tokens of the request: some servers repeat what they refuse."""
    for name, value in response.request_info.headers.items():
        secret = value.partition(" ")[2] or value
        if is_secret_key(name) and len(secret) >= _SHORTEST_SECRET:
            body = body.replace(secret.encode(), MASK.encode())
    return body


async def get_response_json(response: ClientResponse) -> Any:
    """The body of an answer, read as JSON whatever its content type."""
    try:
        body = await response.read()
    except TRANSPORT_ERRORS as error:
        call = Call(response.method, str(response.url), internal=True)
        raise call_failure(error, call, Tries(current_settings().retry_between_servers, failures=1)) from error
    return parse_json(body, response)


def parse_json(body: bytes, response: ClientResponse) -> Any:
    """`body` as JSON; also what Python's own encoder writes and orjson refuses (NaN, lone surrogates)."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            return stdlib_json.loads(body)
        except (ValueError, RecursionError):
            body, url = without_sent_secrets(body, response), mask_url_passwords(str(response.url))
            raise MalformedResponseError(
                f"{response.method} {url} answered {response.status} with a body that is not JSON: "
                f"{excerpt(body, 200)!r}. Check that the address is the one you mean; {error.msg}",
                body,
                error.pos,
            ) from None
