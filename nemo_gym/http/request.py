"""One HTTP request, tried again only while it has not been sent.

A refused connection, an unknown host name and a connection that takes too long to open leave the
server untouched: such calls are repeated, within bounds. Once a request went out it may have been
carried out, so whatever happens then is the caller's to know: a tool is never run twice. Answers
are returned whatever their status.

Redirects are followed as aiohttp would, but for what proves who is calling: aiohttp takes along whatever header it does
not know, and endpoints have keys in headers of many names. To another origin go only headers that say nothing but what
the body is. A request that was redirected has been carried out, so it is never sent again to have someone else follow
the redirect.
"""

import asyncio
import errno
import json as stdlib_json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import ClientResponse
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from yarl import URL

from nemo_gym.config.secrets import is_secret_key, mask_url_passwords
from nemo_gym.http.errors import (
    AnswerTooLargeError,
    MalformedResponseError,
    NotHttpAnswerError,
    NotHttpError,
    ResponseTooLargeError,
    ServerCallError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
    UnprovenServerError,
    cause_of,
    excerpt,
)
from nemo_gym.http.local_response import LocalResponse
from nemo_gym.http.run_answers import keep_partial, taken_apart
from nemo_gym.http.session import (
    current_settings,
    get_global_aiohttp_client,
    is_global_aiohttp_client_request_debug_enabled,
    over_aiohttp,
)
from nemo_gym.http.settings import replaceable
from nemo_gym.keys import MASK
from nemo_gym.retry import Tries

logger = logging.getLogger(__name__)

NEVER_HEALS = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorSSLError,
    UnprovenServerError,
    NotHttpAnswerError,
    AnswerTooLargeError,
)
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnprovenServerError)
TRANSPORT_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, *NEVER_HEALS)

JSON_CONTENT_TYPE = "application/json"
JSON_HEADERS = MappingProxyType({"Content-Type": JSON_CONTENT_TYPE})
"""Of a request that says nothing else about itself."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 10

_FOR_ANYONE = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "content-encoding", "user-agent"}
)
"""Headers that may go to whomever a server names."""
_OF_ONE_ORIGIN = frozenset({"auth", "cookies"})
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


async def request(
    method: str,
    url: str,
    _internal: bool = False,
    _max_connection_retries: int | None = None,
    _server_name: str | None = None,
    **kwargs: Any,
) -> ClientResponse:
    """Send one request, with aiohttp's keyword arguments, and return the answer whatever its status.

    `_internal` marks calls between servers of one run. It and `_server_name` only show in the words of an error.
    """
    return await send(
        method,
        lambda: url,
        with_json_body(kwargs),
        internal=_internal,
        server_name=_server_name,
        max_retries=_max_connection_retries,
    )


async def send(
    method: str,
    choose_url: Callable[[], str],
    kwargs: dict[str, Any],
    *,
    internal: bool,
    server_name: str | None = None,
    not_sent: Callable[[], None] = lambda: None,
    max_retries: int | None = None,
) -> ClientResponse:
    """Send one request; `choose_url` is asked before every try, `not_sent` told of tries that reached nobody."""
    policy = current_settings().retry_between_servers
    tries = Tries(policy if max_retries is None else replace(policy, max_tries=max_retries + 1))
    while True:
        url = choose_url()
        try:
            return await try_once(method, url, kwargs)
        except TRANSPORT_ERRORS as error:
            pause_s = tries.pause_after_failure()
            call = Call(method, url, server_name, internal)
            failure = call_failure(error, call, tries)
            if pause_s is None or not isinstance(failure, ServerUnreachableError) or isinstance(error, NEVER_HEALS):
                raise failure from error
            not_sent()
        tries.warn_of_first(mask_url_passwords(url.partition("?")[0]), str(failure))
        await asyncio.sleep(pause_s)


async def try_once(method: str, url: str, kwargs: dict[str, Any]) -> ClientResponse:
    """Send one request once, and wherever it is redirected."""
    client_of_loop = replaceable("get_global_aiohttp_client", get_global_aiohttp_client)
    if client_of_loop is not get_global_aiohttp_client:
        return await client_of_loop().request(method=method, url=url, **kwargs)
    for _ in range(MAX_REDIRECTS + 1):
        answer = await over_aiohttp(get_global_aiohttp_client(), method, url, kwargs)
        redirect = redirect_of(answer, kwargs) if answer.status in REDIRECTS else None
        if redirect is None:
            return answer
        answer.release()
        method, url, kwargs = redirect
    raise aiohttp.TooManyRedirects(aiohttp.RequestInfo(answer.url, method, CIMultiDictProxy(CIMultiDict())), ())


class Redirect(NamedTuple):
    """The request to go on with."""

    method: str
    url: str
    kwargs: dict[str, Any]


def redirect_of(answer: LocalResponse | ClientResponse, kwargs: dict[str, Any]) -> Redirect | None:
    """What to ask next, after `kwargs` were answered with a redirect; None if the caller is to have that answer.

    Method and body go along as far as the status allows, what proves who is calling only within the same origin.
    """
    location = answer.headers.get("Location") or answer.headers.get("URI")
    if location is None or not kwargs.get("allow_redirects", True):
        return None
    try:
        url = answer.url.join(URL(location))
        is_same_origin = url.origin() == answer.url.origin()
    except ValueError as error:
        raise aiohttp.InvalidUrlRedirectClientError(location, "The server redirects to what is no URL") from error
    method, dropped = answer.method, {"params"}
    if (answer.status == 303 and method != "HEAD") or (answer.status in (301, 302) and method == "POST"):
        method = "GET"
        dropped.add("data")
    if not is_same_origin:
        dropped |= _OF_ONE_ORIGIN
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    if not is_same_origin and kept.get("headers"):
        given = CIMultiDict(kept["headers"])
        kept["headers"] = CIMultiDict((name, value) for name, value in given.items() if name.lower() in _FOR_ANYONE)
    return Redirect(method, str(url), kept)


def call_failure(error: BaseException, call: Call, tries: Tries) -> ServerCallError:
    """What a caller is told about a call that ended in `error` instead of an answer."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, NOT_SENT) and not isinstance(error, NEVER_HEALS):
        cause = cause_of(error)
    where = f"{call.method} {call.shown_url} (tries: {tries.failures}, {tries.elapsed_s:.1f} s): {cause}"
    who = "the server" if call.server_name is None else f"server {call.server_name!r}"
    kind: type[ServerCallError]
    if isinstance(error, NOT_SENT):
        kind, message = ServerUnreachableError, f"Cannot connect to {who}, {where}. {_remedy(error, call)}"
    elif isinstance(error, NotHttpAnswerError):
        kind, message = NotHttpError, f"What answers for {who} does not speak HTTP, {where}"
    elif isinstance(error, AnswerTooLargeError):
        kind, message = ResponseTooLargeError, f"Too large an answer from {who}, {where}"
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
    if isinstance(error, UnprovenServerError):
        return "`ng_status` lists the servers that are running"
    if isinstance(error, aiohttp.ClientConnectorSSLError) and "CERTIFICATE" not in str(error).upper():
        return "This looks like a port without TLS: use http://"
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
        headers = given
        if type(given) is not dict or "Content-Type" not in given:
            headers = CIMultiDict(given)
            headers.setdefault("Content-Type", JSON_CONTENT_TYPE)
    return {**kwargs, "data": json_bytes(value), "headers": headers}


def json_bytes(value: Any) -> bytes:
    """`value` as JSON."""
    if not isinstance(value, BaseModel):
        try:
            return orjson.dumps(value, default=_plain)
        except TypeError as error:
            return _encoded_slowly(value, error)
    if type(value).model_dump is not BaseModel.model_dump:
        return json_bytes(value.model_dump(exclude_unset=True))
    try:
        return value.model_dump_json(exclude_unset=True).encode()
    except PydanticSerializationError:  # of half a surrogate pair
        return json_bytes(value.model_dump(exclude_unset=True))


def _encoded_slowly(value: Any, error: TypeError) -> bytes:
    """Numbers of more than 64 bits and halves of surrogate pairs are JSON, too, and orjson refuses them."""
    try:
        return stdlib_json.dumps(value, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError):
        raise error from None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    raise TypeError  # orjson words it, naming the type


async def raise_for_status(response: ClientResponse, content: bytes | None = None) -> None:
    """Raise `ServerResponseError` with the body of the answer if its status is an error.

    Whoever has read the body passes it as `content`.
    """
    if response.ok:
        return
    if content is None:
        try:
            content = _as_bytes(await response.read())
        except (aiohttp.ClientError, TimeoutError):
            content = b""
    if is_global_aiohttp_client_request_debug_enabled():
        url, method = _asked(response)
        said = without_sent_secrets(content, response).decode(errors="replace")
        logger.info("%s: %s %s\nAnswer: %s", response.status, method, mask_url_passwords(url), said)
    raise response_error(response, content)


def response_error(response: ClientResponse, content: bytes, tries: Tries | None = None) -> ServerResponseError:
    """The error that an answer with an error status amounts to."""
    url, method = _asked(response)
    given = getattr(response, "headers", None)
    headers: Mapping[str, str] = given if isinstance(given, Mapping) else {}
    said = taken_apart(without_sent_secrets(content, response), headers)
    error = ServerResponseError(
        url,
        response.status,
        said.content,
        method=method,
        headers=headers.items(),
        attempts=1 if tries is None else tries.failures,
        elapsed_s=0.0 if tries is None else tries.elapsed_s,
    )
    keep_partial(error, said.partial_response, said.failed_in)
    return error


def _asked(response: ClientResponse) -> tuple[str, str]:
    """URL and method that an answer is the answer to; programs' own stand-ins for answers have neither."""
    method = getattr(response, "method", None)
    return str(getattr(response, "url", "")), method if isinstance(method, str) else "POST"


def _as_bytes(body: Any) -> bytes:
    """A body that was read; stand-ins may have it as text."""
    return body if isinstance(body, bytes) else str(body).encode()


def without_sent_secrets(body: bytes, response: ClientResponse) -> bytes:
    """`body` with `****` for the keys and tokens of the request: some servers repeat what they refuse."""
    sent = getattr(getattr(response, "request_info", None), "headers", None)
    for name, value in sent.items() if isinstance(sent, Mapping) else ():
        secret = value.partition(" ")[2] or value
        if is_secret_key(name) and len(secret) >= _SHORTEST_SECRET:
            body = body.replace(secret.encode(), MASK.encode())
    return body


async def get_response_json(response: ClientResponse) -> Any:
    """The body of an answer, read as JSON whatever its content type."""
    return parse_json(await whole_body(response), response)


async def whole_body(response: ClientResponse) -> bytes:
    """The body of an answer; raises what a caller is told when it does not arrive."""
    try:
        return await response.read()
    except TRANSPORT_ERRORS as error:
        url, method = _asked(response)
        call = Call(method, url, internal=True)
        raise call_failure(error, call, Tries(current_settings().retry_between_servers, failures=1)) from error


def parse_json(body: bytes, response: ClientResponse) -> Any:
    """`body` as JSON; also what Python's own encoder writes and orjson refuses (NaN, lone surrogates)."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            return stdlib_json.loads(body)
        except (ValueError, RecursionError):
            url, method = _asked(response)
            body = without_sent_secrets(_as_bytes(body), response)
            raise MalformedResponseError(
                f"{method} {mask_url_passwords(url)} answered {response.status} with a body that is not JSON: "
                f"{excerpt(body, 200)!r}. Check that the address is the one you mean; {error.msg}",
                body,
                error.pos,
            ) from None
