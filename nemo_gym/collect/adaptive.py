"""`num_samples_in_parallel=auto`: caps that find out by themselves how many rollouts in flight pay off.

A `Controller` looks at one agent twice a second. It works in rounds, in each of which about as many rollouts end as may
be in flight:

- In the beginning the cap doubles from round to round, until the model is overloaded or throughput stops growing.
- An attempt that ends with 429, 503 or a timeout has none started in its place; more than a few of them in a round take
  a tenth off.
- Calls that pause in model servers before they are tried again are of rollouts that need not be in flight: where more
  than a tenth of them pause, they are taken off the cap, four tenths of it at most, and none starts until so many have
  ended.
- Later the cap grows half of the way to where the last overload was, and beyond that in steps that double.
- A cap that has grown by a quarter without throughput going along, so that only latency grew, is taken back, and the
  next try waits longer. Latency that rises at the same cap, without throughput, takes off a quarter for a trial round:
  if throughput goes down with it, rollouts have only become longer, and the cap is restored.

Rounds in which the cap was not reached say nothing about it. The numbers a controller goes by can be added up over
shards, so that with Ray the driver decides for all of them.
"""

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nemo_gym.collect.admission import MAX_CONNECTIONS, prepare_connections
from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.stopping import Stop
from nemo_gym.runs.manifest import RunManifest
from nemo_gym.runs.options import DEFAULT_ENTRY, Concurrency, SharedRolloutCollectionConfig
from nemo_gym.runs.options.steering import Bounds
from nemo_gym.runs.record import FailureClass
from nemo_gym.terminal import shown

if TYPE_CHECKING:
    from nemo_gym.collect.dispatch import Dispatch

FIRST_CAP = 32
TICK_S = 0.5
_ROUND_S = 1.0
_JUDGED_FROM = 20
"""Rollouts that must have ended in a round, once the beginning is over."""
_MAY_FAIL, _MAY_PAUSE = 0.05, 0.1
"""The part of attempts that may fail of overload, and of rollouts in flight whose calls may pause: a few that wait take
the place of others at once, so that the model never does."""
_OFF, _MOST_OFF = 0.1, 0.4
_KEPT_WAITING = 0.05
_FILLED = 0.85
_GREW = 1.25
_PAYS_OFF = 0.25
"""The least growth of throughput, in relation to that of the cap, on a logarithmic scale."""
_SLOWER = 1.5
_LESS = 0.75
_HARMLESS = 0.9
_LONGEST_HOLD = 32
_MOST_DOUBLINGS = 6
_ALMOST = 0.99
_CHANGES_KEPT = 200
_NAME_LENGTH = 40
OVERLOADED = frozenset({429, 503, 504, 529})
"""Statuses of answers."""
_PAUSES = frozenset(map(str, OVERLOADED))
_TIMED_OUT = "timeout"


class Load(NamedTuple):
    """What has become of an agent's attempts so far, given up on stragglers aside."""

    ended: int = 0
    """Well, or with a failure that says nothing about load."""
    overloads: int = 0
    """Attempts that failed because there are too many, and calls that timed out and were made again."""
    seconds: float = 0.0
    """What the attempts that ended took, together."""
    turned_away: int = 0
    """Calls that model servers made again because there were too many."""
    paused_s: float = 0.0
    """How long calls have paused for that, together."""

    def plus(self, other: "Load") -> "Load":
        """The sum of this load and another."""
        return Load(
            self.ended + other.ended,
            self.overloads + other.overloads,
            self.seconds + other.seconds,
            self.turned_away + other.turned_away,
            self.paused_s + other.paused_s,
        )

    def since(self, earlier: "Load") -> "Load":
        """What was added since an earlier load."""
        return Load(
            self.ended - earlier.ended,
            self.overloads - earlier.overloads,
            self.seconds - earlier.seconds,
            self.turned_away - earlier.turned_away,
            self.paused_s - earlier.paused_s,
        )


class Change(NamedTuple):
    """A cap that was set."""

    at_s: float
    """Since the run began."""
    cap: int
    why: str


class _Mark(NamedTuple):
    """What a cap has brought."""

    cap: int
    throughput: float
    latency_s: float


@dataclass
class Controller:
    """Finds the cap of one agent."""

    bounds: Bounds
    cap: int
    began_s: float
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=_CHANGES_KEPT))
    is_starting: bool = True
    _since_s: float = 0.0
    _at: Load = field(default_factory=lambda: Load())
    _cap_of_round: int = 0
    """At its beginning."""
    _ticks: int = 0
    _filled: int = 0
    _in_flight: int = 0
    """Added up over the ticks."""
    _has_drained: bool = True
    _ceiling: int | None = None
    """The cap of the last overload."""
    _beyond: int = 0
    _hold: int = 0
    """Rounds until the next attempt at growing."""
    _next_hold: int = 1
    _mark: _Mark | None = None
    _trial: _Mark | None = None
    """What there was before less was tried."""

    @classmethod
    def starting(cls, bounds: Bounds, now_s: float, cap: int | None = None) -> "Controller":
        """One that begins now: where an earlier run of the same ended, if that is given."""
        first = bounds.within(FIRST_CAP if cap is None else cap)
        made = cls(bounds, first, now_s, is_starting=cap is None, _since_s=now_s, _cap_of_round=first)
        made.changes.append(Change(0.0, first, "start" if cap is None else "as before"))
        return made

    def step(self, now_s: float, load: Load, in_flight: int) -> bool:
        """Look at what has happened by now; whether the cap is another one from now on."""
        if not self._has_drained:  # what the former cap let through still calls
            self._has_drained = in_flight <= self.cap
            self._begin_round(now_s, load)
            return False
        self._ticks += 1
        self._filled += in_flight >= _FILLED * self.cap
        self._in_flight += in_flight
        seen, lasted_s = load.since(self._at), now_s - self._since_s
        if lasted_s < (TICK_S if self.is_starting else _ROUND_S) * _ALMOST:
            return False
        cap, reached = self.cap, self._in_flight / self._ticks
        failed = seen.overloads / max(1, seen.overloads + seen.ended)
        paused = seen.paused_s / max(TICK_S, reached * lasted_s)
        if failed > _MAY_FAIL:
            self._back_off(now_s, reached, _OFF, f"{failed:.0%} of attempts failed of overload")
        elif seen.ended < (self.cap if self.is_starting else max(_JUDGED_FROM, self.cap)):
            return False
        elif paused > _MAY_PAUSE and seen.turned_away > _MAY_FAIL * seen.ended:  # others only pause after what was
            self._back_off(now_s, reached, paused - _KEPT_WAITING, f"{paused:.0%} waited for their turn at the model")
        elif self._filled >= _FILLED * self._ticks:
            self._judge(now_s, _Mark(cap, seen.ended / lasted_s, seen.seconds / seen.ended))
        self._begin_round(now_s, load)
        return self.cap != cap

    def overloaded(self, now_s: float, in_flight: int) -> bool:
        """An attempt has just failed of overload, and so many are left: start none in its place, for now."""
        cap = self.bounds.within(max(in_flight, self._cap_of_round * (1 - _MOST_OFF)))
        if cap >= self.cap:
            return False
        self.is_starting, self._mark, self._trial, self._hold, self._beyond = False, None, None, 1, 0
        self._ceiling = cap + 1
        self._set(now_s, cap, "overload")
        return True

    def _begin_round(self, now_s: float, load: Load) -> None:
        self._since_s, self._at, self._cap_of_round = now_s, load, self.cap
        self._ticks = self._filled = self._in_flight = 0

    def _set(self, now_s: float, cap: float, why: str) -> None:
        allowed = self.bounds.within(cap)
        if allowed != self.cap:
            self.cap = allowed
            self.changes.append(Change(round(now_s - self.began_s, 1), allowed, why))

    def _back_off(self, now_s: float, reached: float, off: float, why: str) -> None:
        self.is_starting, self._mark, self._trial, self._hold, self._beyond = False, None, None, 0, 0
        reached = min(self.cap, max(1.0, reached))
        cap = min(reached - 1, reached * (1 - min(_MOST_OFF, off)))
        self._ceiling = max(self.bounds.within(cap) + 1, math.ceil(cap * (1 + _KEPT_WAITING)))
        self._set(now_s, cap, why)
        self._has_drained = False

    def _judge(self, now_s: float, now: _Mark) -> None:
        """Decide what to do after a round in which the cap was reached."""
        if self._trial is not None:
            self._end_trial(now_s, now)
            return
        mark = self._mark
        if mark is None or now.cap < mark.cap:
            self._mark = mark = now
        elif now.cap >= _GREW * mark.cap:
            if math.log(now.throughput / mark.throughput) < _PAYS_OFF * math.log(now.cap / mark.cap):
                self._take_back(now_s, mark)
                return
            self._mark, self._next_hold = now, 1
        elif now.latency_s > _SLOWER * mark.latency_s > 0 and now.throughput <= mark.throughput:
            self._trial = now
            self._set(now_s, _LESS * now.cap, "slower without more throughput")
            self._has_drained = False
            return
        self._grow(now_s)

    def _take_back(self, now_s: float, mark: _Mark) -> None:
        self.is_starting, self._beyond = False, 0
        self._hold, self._next_hold = self._next_hold, min(2 * self._next_hold, _LONGEST_HOLD)
        self._set(now_s, mark.cap, "more brought no throughput")
        self._mark = None
        self._has_drained = False

    def _end_trial(self, now_s: float, now: _Mark) -> None:
        before, self._trial = self._trial, None
        assert before is not None
        if now.throughput >= _HARMLESS * before.throughput:
            self._mark, self._ceiling, self._hold = now, before.cap, self._next_hold
            return
        self._mark = before
        self._set(now_s, before.cap, "less cost throughput")

    def _grow(self, now_s: float) -> None:
        if self.is_starting:
            self._set(now_s, 2 * self.cap, "throughput grows")
            return
        if self._hold:
            self._hold -= 1
            return
        if self._ceiling is not None and self.cap < self._ceiling:
            step = max(1, (self._ceiling - self.cap) // 2)
        else:
            step = min(self.cap, max(1, self.cap // 32) * 2 ** min(self._beyond, _MOST_DOUBLINGS))
            self._beyond += 1
        self._set(now_s, self.cap + step, "probing")

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "bounds": [self.bounds.low, self.bounds.high],
            "at_end": self.cap,
            "is_known": not self.is_starting,
            "changes": [change._asdict() for change in self.changes],
        }


def controllers_for(
    bounds: Mapping[str, Bounds], agents: Iterable[str], now_s: float, earlier: Mapping[str, Any] | None = None
) -> dict[str, Controller]:
    """One for each agent whose cap adapts; `earlier` is what the manifest of a run that goes on says."""
    found = {}
    for agent in agents:
        own = bounds.get(agent, bounds.get(DEFAULT_ENTRY))
        if own is not None:
            found[agent] = Controller.starting(own, now_s, _cap_before((earlier or {}).get(agent)))
    return found


def _cap_before(told: Any) -> int | None:
    if not isinstance(told, Mapping) or not told.get("is_known"):
        return None
    cap = told.get("at_end")
    return cap if isinstance(cap, int) else None


def with_adaptive_caps(concurrency: Concurrency, caps: Mapping[str, int]) -> Concurrency:
    """The same caps but for those of these agents."""
    return replace(concurrency, per_agent={**concurrency.per_agent, **caps})


def notice_of(caps: Mapping[str, int]) -> str:
    """For the progress line."""
    if not caps:
        return ""
    if len(caps) == 1:
        return f"auto: {next(iter(caps.values()))} in parallel"
    return "auto: " + ", ".join(f"{shown(agent, _NAME_LENGTH)} {cap}" for agent, cap in caps.items()) + " in parallel"


class Lever(Protocol):
    """What caps are set with."""

    @property
    def in_flight_by_agent(self) -> Mapping[str, int]:
        """Rollouts in flight by agent."""

    @property
    def concurrency(self) -> Concurrency:
        """The caps that hold now."""

    def set_concurrency(self, concurrency: Concurrency) -> None:
        """Go on with other caps."""


class AdaptiveConcurrency(Policy):
    """Lets controllers set the caps of a run or, in a shard that is led from elsewhere, only measures."""

    options = frozenset({"num_samples_in_parallel"})

    def __init__(
        self, bounds: Mapping[str, Bounds], agents: Iterable[str], manifest: RunManifest | None = None
    ) -> None:
        """`bounds` are the run's, by agent; `manifest` says where an earlier start of it ended, and is told this."""
        self._bounds, self._agents, self._manifest = bounds, list(agents), manifest
        self._loads: dict[str, Load] = {}
        self._told: dict[str, Load] = {}
        """What model servers say."""
        self._asked_s = 0.0
        self._controllers: dict[str, Controller] = {}
        self._past: dict[str, Any] = {}
        """Of agents whose caps no longer adapt."""
        self._own: Concurrency | None = None
        self.lever: Lever | None = None
        """The dispatcher, unless somebody else keeps the caps."""
        self.is_led = False
        """Whether caps come from elsewhere."""

    def begin(self, dispatch: "Dispatch") -> None:
        """Start with the first caps."""
        self._dispatch = dispatch
        self.lever = self.lever or dispatch
        now_s = asyncio.get_running_loop().time()
        earlier = None if self._manifest is None else self._manifest.adaptive
        self._controllers = controllers_for(self._bounds, self._agents, now_s, earlier)
        self._loads = dict.fromkeys(self._controllers, Load())
        self._told, self._asked_s = dict(self._loads), now_s
        self._apply()

    @property
    def caps(self) -> dict[str, int]:
        """The caps that adapt, as they are now."""
        return {agent: controller.cap for agent, controller in self._controllers.items()}

    @property
    def most(self) -> Concurrency:
        """The run's caps by agent, those that adapt as high as they may become."""
        assert self.lever is not None
        highest = {agent: controller.bounds.high for agent, controller in self._controllers.items()}
        return with_adaptive_caps(self.lever.concurrency, highest)

    def loads(self) -> dict[str, Load]:
        """What has become of the attempts of each agent so far, with what model servers rode out."""
        return {agent: self._loads[agent].plus(self._told[agent]) for agent in self._controllers}

    async def act(self) -> None:
        """Look at every agent twice a second."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                await self._ask_model_servers()
                self._look(asyncio.get_running_loop().time())
        finally:
            if self._manifest is not None:
                self._manifest.adaptive = {**(self._manifest.adaptive or {}), **self.as_json()}

    def _look(self, now_s: float) -> None:
        assert self.lever is not None
        self.is_led = self.is_led or self.lever.concurrency != self._own
        if self.is_led:
            self._note_caps(now_s)
            return
        loads, in_flight = self.loads(), self.lever.in_flight_by_agent
        steps = [
            controller.step(now_s, loads[agent], in_flight.get(agent, 0))
            for agent, controller in self._controllers.items()
        ]
        if any(steps):
            self._apply()

    def change(self, config: SharedRolloutCollectionConfig, changed: Collection[str]) -> None:
        """Go on with the caps that a person gives: numbers, which then hold, or other bounds."""
        assert self.lever is not None
        concurrency = prepare_connections(config, dict.fromkeys(self._agents, MAX_CONNECTIONS))
        now_s = asyncio.get_running_loop().time()
        known = {agent: {"is_known": True, "at_end": cap} for agent, cap in self.caps.items()}
        self._past = self.as_json()
        self._controllers = controllers_for(config.adaptive, self._agents, now_s, known)
        for counted in (self._loads, self._told):
            counted.update({agent: counted.get(agent, Load()) for agent in self._controllers})
        self.is_led, self._own = False, None
        self.lever.set_concurrency(concurrency)
        self._apply()

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Count an attempt towards the load of its agent, whose cap falls at once if that is overloaded; no stop."""
        load = self._loads.get(pending.agent)
        if load is None or pending.agent not in self._controllers:
            return None
        now_s = asyncio.get_running_loop().time()
        took_s = 0.0 if attempt.duration_s is None else now_s - pending.started_s
        self._loads[pending.agent] = counted = _counted(load, attempt, took_s)
        if counted.overloads > load.overloads and not self.is_led and self.lever is not None:
            left = self.lever.in_flight_by_agent.get(pending.agent, 0)
            if self._controllers[pending.agent].overloaded(now_s, left):
                self._apply()
        return None

    def notice(self) -> str:
        """The caps as they are."""
        return notice_of(self.caps)

    def as_json(self) -> dict[str, Any]:
        """What became of the caps, by agent."""
        return {**self._past, **{agent: controller.as_json() for agent, controller in self._controllers.items()}}

    def _apply(self) -> None:
        """Set the caps, unless somebody else has set others since: then it is for them to say."""
        assert self.lever is not None
        self.is_led = self.is_led or self._own not in (None, self.lever.concurrency)
        if self.is_led:
            return
        self._own = with_adaptive_caps(self.lever.concurrency, self.caps)
        self.lever.set_concurrency(self._own)

    def _note_caps(self, now_s: float) -> None:
        assert self.lever is not None
        for agent, controller in self._controllers.items():
            cap = self.lever.concurrency.cap_of(agent)
            if cap is not None and cap != controller.cap:
                controller.cap = cap
                controller.changes.append(Change(round(now_s - controller.began_s, 1), cap, "told"))

    async def _ask_model_servers(self) -> None:
        servers = self._dispatch.servers
        if servers is None or self.lever is None:
            return
        await servers.count_retries(self._controllers)
        now_s = asyncio.get_running_loop().time()
        passed_s, self._asked_s = now_s - self._asked_s, now_s
        in_flight = self.lever.in_flight_by_agent
        for agent in self._controllers:
            made_again, paused_s = servers.ridden_out_for(agent), self._told[agent].paused_s
            self._told[agent] = Load(
                overloads=made_again[_TIMED_OUT],
                turned_away=sum(made_again[kind] for kind in _PAUSES),
                paused_s=paused_s + servers.pausing_for(agent, in_flight, _PAUSES) * passed_s,
            )


def _counted(load: Load, attempt: Attempt, took_s: float) -> Load:
    failure = attempt.failure
    if failure is not None:
        if not failure.failure_class.tells_of_run:
            return load
        if failure.failure_class in (FailureClass.RATE_LIMITED, FailureClass.TIMEOUT) or failure.status in OVERLOADED:
            return load._replace(overloads=load.overloads + 1)
    return load._replace(ended=load.ended + 1, seconds=load.seconds + took_s)
