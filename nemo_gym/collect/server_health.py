"""How the servers of a run fare: what can be wrong with them and their endpoints, and what calls were tried again.

Model servers try calls again while an endpoint is busy, failing or away, so a run with thousands of 429s may look like
one with a slow model. They count what they ride out, and tell it together with the state of their endpoints; those that
do not tell are taken to have had no trouble.
"""

import http.client
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import orjson

from nemo_gym.http.addresses import Address, fetch
from nemo_gym.keys import MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

READINESS = MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME
_LONGEST_TEXT = 300
_SHOWN_AFTER_S = 5.0
_TOLD_AFTER_S = 30.0
"""Of silence: a server under full load may be slow to answer."""
_SILENT_AFTER_S = 60.0
"""Who has not answered a first call by then may be at work on it, or hang."""
_MOST_ENDPOINTS = 50
_MOST_KINDS = 20
_WORTH_TELLING_S = 0.05
"""Of waiting for a pace: a call that need not wait waits microseconds."""
_KIND_LENGTH = 30
_Group = TypeVar("_Group", bound=Hashable)


class Condition(StrEnum):
    """How a server is, the better the earlier."""

    WELL = "answers"
    BUSY = "is busy with CPU and does not answer"
    SILENT = "accepts connections and says nothing"
    STOPPED = "is stopped by a signal and says nothing"
    UNREACHABLE = "cannot be reached"
    REFUSES = "refuses connections"


class Limits(NamedTuple):
    """How many seconds each kind of trouble may last; None: for ever."""

    max_silence_s: float | None
    max_refused_s: float | None
    readiness_s: float | None

    @property
    def shortest_s(self) -> float:
        """The shortest limit that is set; infinite when there is none."""
        return min((limit for limit in self if limit is not None), default=math.inf)


class Look(NamedTuple):
    """One look at one server."""

    condition: Condition
    content: Any = None
    """What it answered, if that is JSON."""
    told: tuple[tuple[int, Any], ...] = ()
    """The same of every process of it that answered, by port."""


def look_at(address: Address, path: str, timeout_s: float, token: str | None) -> Look:
    """Ask a server; any answer means that it is well."""
    try:
        status, body = fetch(address, path, timeout_s, token)
    except ConnectionRefusedError:
        return Look(Condition.REFUSES)
    except TimeoutError:
        return Look(Condition.SILENT)
    except (OSError, http.client.HTTPException, ValueError):
        return Look(Condition.UNREACHABLE)
    try:
        return Look(Condition.WELL, orjson.loads(body) if status == http.client.OK else None)
    except ValueError:
        return Look(Condition.WELL)


@dataclass
class Trouble:
    """A server that did not answer when it was last looked at."""

    since_s: float
    condition: Condition = Condition.SILENT
    is_starting: bool = False
    """By the launcher, for the first time or again: that is its own business, and bounded there."""
    refused_s: float = 0.0
    silent_s: float = 0.0
    is_told: bool = False
    _since_at_s: float = field(default_factory=time.time)

    @property
    def is_silent(self) -> bool:
        """Whether it accepts connections and yet does not answer."""
        return self.condition in (Condition.BUSY, Condition.SILENT, Condition.STOPPED)

    def note(self, condition: Condition, passed_s: float, *, is_starting: bool) -> None:
        """Count `passed_s` more seconds, and remember in what condition it is now."""
        has_become_worse = self.is_silent and condition in (Condition.REFUSES, Condition.UNREACHABLE)
        if has_become_worse or self.is_starting is not is_starting:
            self.is_told = False
        self.condition, self.is_starting = condition, is_starting
        if condition is not Condition.REFUSES:
            self.refused_s = 0.0
        if not is_starting:
            self.silent_s += passed_s
            if condition is Condition.REFUSES:
                self.refused_s += passed_s

    def left_s(self, limits: Limits) -> float:
        """How much longer this may last."""
        if self.is_starting:
            return math.inf
        return min(
            math.inf if limits.max_silence_s is None else limits.max_silence_s - self.silent_s,
            math.inf
            if limits.max_refused_s is None or self.condition is not Condition.REFUSES
            else limits.max_refused_s - self.refused_s,
        )

    def notice(self, name: str, now_s: float) -> str:
        """The trouble in a few words; empty while it may pass by itself."""
        lasts_s = now_s - self.since_s
        if self.is_silent and lasts_s < _SHOWN_AFTER_S:
            return ""
        return (
            f"{shown(name)} {'is being started by ng_run' if self.is_starting else self.condition} for {lasts_s:.0f} s"
        )

    def is_worth_telling(self, now_s: float, limits: Limits) -> bool:
        """Whether a line should be logged now that was not before."""
        quiet_s = min(_TOLD_AFTER_S, math.inf if limits.max_silence_s is None else limits.max_silence_s / 4)
        return not self.is_told and (not self.is_silent or now_s - self.since_s >= quiet_s)

    def told(self, limits: Limits, *, is_head: bool) -> str:
        """The log line without its beginning, the names of the servers it is true of."""
        if self.is_starting:
            return f"{self.condition} since {self._since()}: `ng_run` is starting it, so the time does not count"
        words = f"{self.condition} since {self._since()}"
        if is_head:
            is_gone = self.condition is Condition.REFUSES
            return f"{words}: `ng_run` {'is gone, and the servers that it started end with it' if is_gone else 'hangs'}"
        if self.left_s(limits) == math.inf:
            return f"{words}. Nothing ends the run for that; stop it with Ctrl-C if this is not meant to pass"
        return f"{words}. The run ends if that lasts {self._limit(limits)} and no rollout succeeds meanwhile"

    def too_long(self, limits: Limits) -> str:
        """Why the run ends."""
        return f"{self.condition} since {self._since()}, longer than {self._limit(limits)} allows"

    def _limit(self, limits: Limits) -> str:
        is_refused = self.condition is Condition.REFUSES and limits.max_refused_s is not None
        if is_refused and self.left_s(limits._replace(max_silence_s=None)) <= self.left_s(limits):
            return f"max_refused_s={limits.max_refused_s:g}"
        return f"max_silence_s={limits.max_silence_s:g}"

    def _since(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._since_at_s))


@dataclass
class EndpointState:
    """What a model server says about an endpoint of its."""

    url: str
    set_with: str
    """The name of the setting that holds the address."""
    problem: str
    """Why it cannot be asked; empty when nothing is known to be wrong."""
    failing_since_s: float
    waiting_since_s: float | None
    """Since when its very first answer is waited for; None when it is not."""
    has_answered: bool
    told: str = ""

    def left_s(self, allowed_s: float, succeeded_s: float, now_s: float) -> float:
        """How much longer it may be missing; for ever if it has worked before."""
        if not self.problem or self.has_answered:
            return math.inf
        return allowed_s - (now_s - max(self.failing_since_s, succeeded_s))

    def notice(self, now_s: float) -> str:
        """The trouble in a few words; empty when there is none."""
        if self.problem:
            return f"no answer from {self.url}{self._yet} for {now_s - self.failing_since_s:.0f} s: {self.problem}"
        waits_s = 0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s
        if waits_s >= _SILENT_AFTER_S:
            return f"{self.url} took its first call and has been silent for {waits_s:.0f} s"
        if waits_s >= _SHOWN_AFTER_S:
            return f"{self.url} is connected and at work on its first answer for {waits_s:.0f} s"
        return ""

    def worth_telling(self, allowed_s: float | None) -> str:
        """A line to be logged now; empty if there is nothing new."""
        line, kind = "", ""
        waits_long = self.waiting_since_s is not None and time.monotonic() - self.waiting_since_s >= _TOLD_AFTER_S
        if self.problem:
            kind, line = "problem", self._missing(allowed_s)
        elif self.told == "problem":
            line = f"the endpoint {self.url} can be reached now"
        elif waits_long:
            kind = "busy"
            line = f"the endpoint {self.url} is connected and has not answered yet: it is loading, or busy"
        is_new, self.told = kind != self.told, kind
        return line if is_new else ""

    def too_long(self) -> str:
        """Why the run ends."""
        return f"no answer from {self.url}: {self.problem}; correct {self.set_with}, or start it"

    @property
    def _yet(self) -> str:
        return "" if self.has_answered else " yet"

    def _missing(self, allowed_s: float | None) -> str:
        if self.has_answered:
            return f"no answer from {self.url}, which worked before: {self.problem}. Calls are tried again for a while"
        end = "" if allowed_s is None else f". The run ends if that lasts {READINESS}={allowed_s:g}"
        return f"no answer from {self.url} yet: {self.problem}; correct {self.set_with}, or wait while it loads{end}"


class Process(NamedTuple):
    """What the launcher says about the processes of a server."""

    cpu_s: float
    is_stopped: bool


def starting_in(states: Any) -> set[str]:
    """The servers that the launcher is starting, from what the head server answered."""
    names = states.get("starting") if isinstance(states, Mapping) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def processes_in(states: Any) -> dict[str, Process]:
    """What the process of each server does, from what the head server answered."""
    try:
        return {name: Process(float(it["cpu_s"]), bool(it["is_stopped"])) for name, it in states["processes"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def endpoints_in(content: Any, now_s: float) -> dict[str, EndpointState]:
    """The endpoints of a model server, from its own answer; none if it says nothing that we understand."""
    try:
        return {state.url: state for state in (_endpoint(it, now_s) for it in content or ())}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def _endpoint(told: Mapping[str, Any], now_s: float) -> EndpointState:
    has_answered, asked_s_ago = bool(told["has_answered"]), told["asked_s_ago"]
    is_waiting = not has_answered and told["waiting"] and asked_s_ago is not None
    return EndpointState(
        url=shown(str(told["url"]), _LONGEST_TEXT),
        set_with=shown(str(told["set_with"]), _LONGEST_TEXT),
        problem=shown(str(told["problem"]), _LONGEST_TEXT),
        failing_since_s=now_s - float(told["failing_s"]),
        waiting_since_s=now_s - float(asked_s_ago) if is_waiting else None,
        has_answered=has_answered,
    )


@dataclass
class EndpointRetries:
    """The tries that an endpoint's troubles have cost since the run began, also of calls that failed in the end."""

    counts: Counter[str] = field(default_factory=Counter)
    """Tries that failed and were made again, by status, or `timeout` or `connection`."""
    cost_s: float = 0.0
    """Seconds that calls have spent on failed tries and on pauses after them, all calls together."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Calls that pause now, by what they wait for to pass."""
    paced_s: float = 0.0
    """Seconds that calls have waited for the pace that their model server keeps, all calls together."""
    pacing: int = 0
    """Calls that wait for it now."""

    def add(self, other: "EndpointRetries") -> None:
        """Add up what is counted in two places."""
        self.counts.update(other.counts)
        self.waiting.update(other.waiting)
        self.cost_s, self.paced_s = self.cost_s + other.cost_s, self.paced_s + other.paced_s
        self.pacing += other.pacing

    def notice(self) -> str:
        """For a line that changes: what was ridden out and what waits now; empty when nothing was."""
        said = [f"tried again after {_listed(self.counts)} in {_duration(self.cost_s)}"] if self.counts else []
        said += [f"calls waiting: {_listed(self.waiting)}"] if self.counts and +self.waiting else []
        if self.paced_s >= _WORTH_TELLING_S:
            now = f" ({self.pacing} waiting now)" if self.pacing else ""
            said.append(f"waited {_duration(self.paced_s)} for the pace over all calls{now}")
        return ", ".join(said)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        found = {"tried_again": dict(self.counts), "cost_s": round(self.cost_s, 3)}
        return found | ({"paced_s": round(self.paced_s, 3)} if self.paced_s >= _WORTH_TELLING_S else {})


class RetryLedger:
    """The retries of all model servers, as they tell them; of several (policy and judge) it is said whose they are."""

    def __init__(self) -> None:
        self.by_server: dict[str, Counter[str]] = {}
        """Tries that failed and were made again, by the model server that made them."""
        self._told: dict[tuple[str, int, str], EndpointRetries] = {}
        """By model server, process of it and the endpoint's address; not more addresses than can be shown."""
        self._last: dict[tuple[str, int, str], tuple[Counter[str], float, float]] = {}

    def note(self, server: str, process: int, told: Any, run_for_s: float) -> None:
        """Take what one process of a model server told, `run_for_s` after the run began.

        What it had counted before that is not of this run, unless its first call was made since.
        """
        for state in told if isinstance(told, list) else ():
            try:
                self._note(server, process, state, run_for_s)
            except (TypeError, KeyError, ValueError, AttributeError):
                continue

    def _note(self, server: str, process: int, state: Mapping[str, Any], run_for_s: float) -> None:
        url = shown(state["url"], _LONGEST_TEXT)
        counts, waiting = _counter(state["ridden_out"]), _counter(state["pausing"])
        cost_s, asked_s_ago = float(state["ridden_out_cost_s"]), state["asked_s_ago"]
        paced_s, pacing = float(state.get("paced_s", 0.0)), int(state.get("pacing", 0))
        is_ours = asked_s_ago is None or float(asked_s_ago) <= run_for_s
        key = (server, process, url)
        at_first = (Counter[str](), 0.0, 0.0) if is_ours else (counts, cost_s, paced_s)
        before, before_s, before_paced_s = self._last.get(key, at_first)
        if cost_s < before_s or paced_s < before_paced_s - _WORTH_TELLING_S:  # it was started again
            before, before_s, before_paced_s = Counter(), 0.0, 0.0
        self._last[key] = (counts, cost_s, paced_s)
        self.by_server.setdefault(server, Counter()).update(counts - before)
        if key not in self._told and len({told for *_, told in self._told} - {url}) >= _MOST_ENDPOINTS:
            return
        found = self._told.setdefault(key, EndpointRetries())
        found.waiting, found.pacing = Counter(), 0
        found.add(EndpointRetries(counts - before, cost_s - before_s, waiting, paced_s - before_paced_s, pacing))

    def pausing_in(self, server: str) -> Counter[str]:
        """Calls of a model server that pause now before they are made again, by what was wrong."""
        return self._added_up(lambda name, _: name == server).get(True, EndpointRetries()).waiting

    def _added_up(self, group_of: Callable[[str, str], _Group]) -> dict[_Group, EndpointRetries]:
        """What was told, in groups by model server and address."""
        groups: dict[_Group, EndpointRetries] = {}
        for (server, _, url), found in self._told.items():
            groups.setdefault(group_of(server, url), EndpointRetries()).add(found)
        return groups

    def notice(self) -> str:
        """For a line that changes: what was ridden out and what waits now; empty when nothing was."""
        servers = self._added_up(lambda server, _: f"{server}: " if len(self.by_server) > 1 else "")
        return ", ".join(name + said for name, it in servers.items() if (said := it.notice()))

    def lines(self) -> list[str]:
        """One for each endpoint that had trouble, and one for each that was waited for to keep a pace."""
        places = self._added_up(lambda server, url: f"{server} at {url}" if len(self.by_server) > 1 else url).items()
        tried, waited = "Retries: {}: tried again after {}, at a cost of {}", "Pace: {}: waited {} for the pace"
        said = [tried.format(at, _listed(it.counts), _duration(it.cost_s)) for at, it in places if it.counts]
        said += [waited.format(at, _duration(it.paced_s)) for at, it in places if it.paced_s >= _WORTH_TELLING_S]
        return [f"{line} over all calls" for line in said]

    def as_json(self) -> dict[str, Any]:
        """For programs: by address and, where there are several model servers, by these, too."""
        places = self._added_up(lambda _, url: url)
        found: dict[str, Any] = {url: it.as_json() for url, it in places.items() if it.notice()}
        for (server, url), it in self._added_up(lambda *place: place).items() if len(self.by_server) > 1 else ():
            if it.notice():
                found[url].setdefault("by_server", {})[server] = it.as_json()
        return found


def retried_text(ledger: RetryLedger, paused: Mapping[str, int]) -> str:
    """For a line that changes: what model servers rode out, and how many rollouts pause after which failure."""
    waiting = f"rollouts waiting to be tried again: {_listed(Counter(paused))}" if paused else ""
    return ", ".join(filter(None, (ledger.notice(), waiting)))


def _counter(told: Any) -> Counter[str]:
    return Counter({shown(kind, _KIND_LENGTH): int(count) for kind, count in list(told.items())[:_MOST_KINDS]})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} \N{MULTIPLICATION SIGN} {kind}" for kind, count in counts.most_common())


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"
