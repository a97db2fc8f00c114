"""How long the calls of a rollout took: noted where an agent makes them, told to whoever asked for the rollout.

A collector that wants to know sends `ASKS_FOR_CALLS` with `/run`. While the agent works, every call that its process
makes by `ServerClient` is noted in the log of the running context, and the answer to `/run` carries them in a header.
A rollout that was asked for by a name (`ATTEMPT_HEADER`) can be asked after meanwhile: what it is doing since when.
Authors of agents need do nothing, and agents that know nothing of it answer without the header.
"""

import json
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import islice
from operator import itemgetter
from time import perf_counter
from types import MappingProxyType
from typing import Any

import orjson

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


class CallLog:
    """The calls of one rollout: the first `MOST_CALLS` that ended, and how many more there were."""

    __slots__ = ("_began_s", "_calls", "_left_out", "latest", "name")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """`headers` are those of the request for the rollout."""
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
        """What the answer to `/run` carries; later calls are left out of a header that would be too long."""
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
