"""What an agent tells beside the rollout to whoever asked for it: how long its calls took, and what it had come to.

A collector that wants to know of calls sends `ASKS_FOR_CALLS` with `/run`. While the agent works, every one that its
process makes by `ServerClient` is noted in the log of the running context, and the answer to `/run` carries them in a
header.
A rollout that was asked for by a name (`ATTEMPT_HEADER`) can be asked after meanwhile: what it is doing since when.
Authors of agents need do nothing, and agents that know nothing of it answer without the header. A second header has
what the models used that the agent asked, as model servers tell it with each answer.

An agent whose work breaks off notes what it has so far on the exception (`keep_partial`). Callers know an error answer
as a JSON string, and that it stays; only a request with `WANTS_PARTIAL` is answered with an object that has both, the
string as `error` and the response as `partial_response`, and says in `failed_in` which call broke off, if the agent
did: what failed in `/verify` has its whole response, and can be scored without being made again. Reading the answer
takes them apart again, so that texts and classes of errors are the same either way.
"""

import json
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import islice
from operator import itemgetter
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

WANTS_PARTIAL = "x-nemo-gym-wants-partial"
"""Header of a request whose sender can read the object."""
HAS_PARTIAL = "x-nemo-gym-has-partial"
"""Header of an answer that is the object."""
MAX_PARTIAL_BYTES = 1 << 20
LEFT_OUT = "_ng_items_left_out"
"""Of a response that was too long: how many of its last items are missing."""
VERIFY = "verify"
"""What `failed_in` says of a rollout that was only not scored."""
VERIFY_REPEATEDLY = "verify_repeatedly"
"""The same, if the environment was asked several times and failed every time."""
_PARTIAL_RESPONSE = "_ng_partial_response"
_FAILED_IN = "_ng_failed_in"
CALLS_HEADER = "x-nemo-gym-calls"
ASKS_FOR_CALLS: Mapping[str, str] = MappingProxyType({CALLS_HEADER: "1"})
ASKED = (CALLS_HEADER.encode(), b"1")
"""The same as a server sees it."""
ATTEMPT_HEADER = "x-nemo-gym-attempt"
IN_FLIGHT_PATH = "/ng_rollouts_in_flight"
MOST_CALLS = 200
MOST_TOLD = 10_000
_MOST_NAME_CHARACTERS = 300
_NAMED_BY = ATTEMPT_HEADER.encode()
_MOST_HEADER_BYTES = 7_500
"""aiohttp and most proxies take 8 KB for one header."""
_MOST_PATH_CHARACTERS = 200
_MICROSECONDS = 1_000_000
_FAILED = 400


USAGE_HEADER = "x-nemo-gym-usage"
_USAGE = USAGE_HEADER.encode()


class CallUsage(NamedTuple):
    """The tokens of one model call, or of several."""

    model: str | None
    """The name that the model goes by; None if nobody says, or several were asked."""
    input: int
    """Those out of the cache included."""
    cached: int
    output: int
    total: int

    def plus(self, other: "CallUsage") -> "CallUsage":
        """Return the sum of two."""
        model = self.model if self.model == other.model else None
        counts = (mine + theirs for mine, theirs in zip(self[1:], other[1:], strict=True))
        return CallUsage(model, *counts)

    def as_record(self) -> dict[str, Any]:
        """Return what is stored in a record: a `usage` as in a response, and the model."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "total_tokens": self.total,
            "model": self.model,
        }


def usage_header(usage: CallUsage) -> tuple[bytes, bytes]:
    """Return the header of an answer that says what it took."""
    return _USAGE, json.dumps(usage).encode()


def usage_in(headers: Iterable[tuple[bytes, bytes]]) -> CallUsage | None:
    """Return what the headers of an answer say that it took; None if they do not say, or not in a way we know."""
    for name, value in headers:
        if len(name) == len(_USAGE) and name.lower() == _USAGE:
            try:
                model, *counts = orjson.loads(value)
                is_known = all(type(count) is int and count >= 0 for count in counts)
                return CallUsage(model if isinstance(model, str) else None, *counts) if is_known else None
            except (TypeError, ValueError):
                return None
    return None


class CallLog:
    """The calls of one rollout: the first `MOST_CALLS` that ended, and how many more there were."""

    __slots__ = ("_began_s", "_calls", "_left_out", "_untold", "_usage", "latest", "name", "owner")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = (), owner: str | None = None) -> None:
        """`headers` are those of the request for the rollout, `owner` is the agent that was asked."""
        self.latest: tuple[float, str, str] | None = None
        """When the call began that was begun last, its server and its path; None once it has ended."""
        self.name = ""
        """By which the rollout was asked for; one that has a name is to be closed."""
        for header, value in headers:
            if header == _NAMED_BY:
                self.name = value.decode("latin-1")[:_MOST_NAME_CHARACTERS]
                _IN_FLIGHT[self.name] = self
        self._began_s = perf_counter()
        self._calls: list[tuple[float, float, str, str]] = []
        self._left_out = 0
        self.owner = owner
        """The agent. Its own calls of models are counted; those of its environment, such as a judge's, are not."""
        self._usage: CallUsage | None = None
        self._untold = False

    def note_answer(self, response: Any) -> None:
        """Note the answer of a model to the agent."""
        if response.status < _FAILED:
            used = usage_in(getattr(response, "raw_headers", ()))  # stand-ins for answers have none
            self._untold |= used is None
            if used is not None:
                self._usage = used if self._usage is None else self._usage.plus(used)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return what the answer to `/run` carries; what models used only if each of them said it."""
        is_told = self._usage is not None and not self._untold
        return [self.header(), *([usage_header(self._usage)] if self._usage is not None and is_told else [])]

    def note(self, server: str, path: str, started_s: float) -> None:
        """A call that began at `started_s`, by `perf_counter`, has ended."""
        if self.latest is not None and self.latest[0] == started_s:
            self.latest = None
        if len(self._calls) < MOST_CALLS:
            self._calls.append((started_s, perf_counter(), server, path))
        else:
            self._left_out += 1

    def close(self) -> None:
        """The rollout is not in flight any more."""
        if _IN_FLIGHT.get(self.name) is self:
            del _IN_FLIGHT[self.name]

    def doing(self) -> dict[str, Any]:
        """How long the rollout has been out, how many of its calls have ended, and which one is under way."""
        now_s, latest = perf_counter(), self.latest
        call = None if latest is None else {"server": latest[1], "path": latest[2], "for_s": now_s - latest[0]}
        return {"for_s": now_s - self._began_s, "calls": len(self._calls) + self._left_out, "call": call}

    def header(self) -> tuple[bytes, bytes]:
        """The header with the calls; later ones are left out of a header that would be too long."""
        kept = sorted(self._calls)
        while len(value := self._encoded(kept)) > _MOST_HEADER_BYTES:
            kept = kept[: len(kept) // 2]
        return ASKED[0], value

    def _encoded(self, calls: list[tuple[float, float, str, str]]) -> bytes:
        """JSON in ASCII: how many are left out; of each endpoint its server, path, start, duration, start, ..."""
        began_s = self._began_s
        of_endpoint: dict[tuple[str, str], list[str | int]] = {}
        for started_s, ended_s, server, path in calls:
            path = path[:_MOST_PATH_CHARACTERS]
            times = of_endpoint.get((server, path))
            if times is None:
                times = of_endpoint[server, path] = [server, path]
            times += (  # rounded, in half the time of `round`
                int((started_s - began_s) * _MICROSECONDS + 0.5),
                int((ended_s - started_s) * _MICROSECONDS + 0.5),
            )
        left_out = self._left_out + len(self._calls) - len(calls)
        told = [left_out, *of_endpoint.values()]
        try:
            value = orjson.dumps(told)
        except orjson.JSONEncodeError:  # names with halves of characters
            value = b"\xff"
        return value if value.isascii() else json.dumps(told).encode()


_IN_FLIGHT: dict[str, CallLog] = {}
"""The rollouts that this process works on and that were asked for by a name."""


def rollouts_in_flight() -> dict[str, dict[str, Any]]:
    """What the rollouts of this process are doing that were asked for by a name."""
    return {name: log.doing() for name, log in islice(_IN_FLIGHT.items(), MOST_TOLD)}


CALL_LOG: ContextVar[CallLog | None] = ContextVar("nemo_gym_call_log", default=None)
"""The log of the rollout that the running code works on, if somebody asked for one."""


_START = itemgetter("start_s")


def _decoded(value: str | bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:  # names with halves of characters
        return json.loads(value)


def calls_of(response: Any) -> dict[str, Any]:
    """`calls_told` of the headers of an answer; those of ours need not all be read for it."""
    raw = getattr(response, "raw_headers", None)
    if type(raw) is not tuple:
        return calls_told(getattr(response, "headers", None))
    for name, value in raw:
        if len(name) == len(CALLS_HEADER) and name.lower() == ASKED[0]:
            return _told(value)
    return {}


def calls_told(headers: Any) -> dict[str, Any]:
    """The part of a record's timing that an answer's headers tell: `calls`, and `calls_left_out` if there are such.

    Empty when they tell nothing, or nothing that can be read.
    """
    try:
        return _told(headers[CALLS_HEADER])
    except (LookupError, TypeError):
        return {}


def _told(value: str | bytes) -> dict[str, Any]:
    try:
        left_out, *endpoints = _decoded(value)
        calls = [
            {
                "server": endpoint[0],
                "path": endpoint[1],
                "start_s": endpoint[place] / _MICROSECONDS,
                "duration_s": endpoint[place + 1] / _MICROSECONDS,
            }
            for endpoint in endpoints
            if isinstance(endpoint[0], str) and isinstance(endpoint[1], str)
            for place in range(2, len(endpoint), 2)
        ]
        calls.sort(key=_START)
        return {"calls": calls, "calls_left_out": left_out} if int(left_out) else {"calls": calls}
    except (LookupError, TypeError, ValueError, RecursionError):
        return {}


def keep_partial(error: BaseException, response: Any, failed_in: str | None = None) -> None:
    """Note on `error` what there was of the response when it was raised; the first to say so knows best.

    `failed_in` is `VERIFY` or `VERIFY_REPEATEDLY` when the response is whole and only its verdict is missing.
    """
    if response is not None and partial_of(error) is None:
        setattr(error, _PARTIAL_RESPONSE, response)
        setattr(error, _FAILED_IN, failed_in)


def partial_of(error: BaseException) -> Any:
    """What was noted on `error`; None if nothing was."""
    return getattr(error, _PARTIAL_RESPONSE, None)


def failed_in(error: BaseException) -> str | None:
    """In which call, if that was noted on `error`."""
    return getattr(error, _FAILED_IN, None)


def whole_response_in(error: BaseException) -> dict[str, Any] | None:
    """Return the response that was noted on `error`, if it is whole and only its verdict is missing."""
    response = partial_of(error)
    is_whole = (
        failed_in(error) in (VERIFY, VERIFY_REPEATEDLY) and isinstance(response, dict) and LEFT_OUT not in response
    )
    return response if is_whole else None


def told_of_call(failed_in: str | None) -> dict[str, Any]:
    """Return what an error answer says of the call that broke off."""
    if failed_in == VERIFY_REPEATEDLY:
        return {"failed_in": VERIFY, "repeatedly": True}
    return {} if failed_in is None else {"failed_in": failed_in}


def partial_is_wanted(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the sender of a request with these headers can read the object."""
    name = WANTS_PARTIAL.encode()
    return any(key.lower() == name for key, _ in headers)


def bounded_response(response: Any, most_bytes: int = MAX_PARTIAL_BYTES) -> dict[str, Any] | None:
    """A response as plain JSON that is not longer than that, if need be without its last items.

    None if it is no response, or too long without any item.
    """
    try:
        content = orjson.loads(_as_json(response))
    except (TypeError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    room = most_bytes - len(orjson.dumps({**content, "output": [], LEFT_OUT: 0}))
    items = content["output"] if isinstance(content.get("output"), list) else []
    kept = 0
    for item in items:
        room -= len(orjson.dumps(item)) + 1
        if room < 0:
            break
        kept += 1
    if kept == len(items):
        return content if room >= 0 else None
    return {**content, "output": items[:kept], LEFT_OUT: len(items) - kept} if kept else None


def _as_json(response: Any) -> bytes:
    if isinstance(response, BaseModel):
        return response.model_dump_json(warnings=False).encode()
    return orjson.dumps(response)


class ErrorBody(NamedTuple):
    """The body of an error answer, taken apart."""

    content: bytes
    """What callers know as the body."""
    partial_response: dict[str, Any] | None = None
    failed_in: str | None = None


def taken_apart(body: bytes, headers: Mapping[str, str]) -> ErrorBody:
    """What an error answer with these headers says."""
    if headers.get(HAS_PARTIAL) is None:
        return ErrorBody(body)
    try:
        both = orjson.loads(body)
        where = VERIFY_REPEATEDLY if both.get("repeatedly") else both.get("failed_in")
        return ErrorBody(orjson.dumps(both["error"]), bounded_response(both["partial_response"]), where)
    except (ValueError, TypeError, KeyError, AttributeError):
        return ErrorBody(body)
