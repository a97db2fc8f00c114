"""A budget for the whole run: tokens, output tokens or US dollars, over all of its starts.

What is in flight is taken to use what those rollouts of its agent used that took longer than it has been going on for.
While that and one rollout more fit well into what is left, more are started. When they do not, the run waits for what
is in flight, since then it is known what that used, and looks again. Rollouts differ, so what is expected is not
enough: what is in flight must also be all but sure not to take the run much above the limit, judged by how much those
before differed, and by how much longer than all of them one may last. So fewer are in flight as the limit comes near,
and the run goes above it only by what a rollout uses that is unlike all before. Before it is known how much a rollout
uses, only a few are started.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_gym.collect.failures import Attempt, PendingAttempt, rollout_name
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.errors import ConfigError
from nemo_gym.keys import USAGE_KEY_NAME
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.record import PARTIAL_RESPONSE_KEY, Outcome, outcome_of
from nemo_gym.runs.spending import COST_USD, Meter, amount_text, money

if TYPE_CHECKING:
    from nemo_gym.collect.dispatch import Dispatch

logger = logging.getLogger(__name__)

_BLIND_SHARE = 20
"""One of so many rollouts that are owed may be started before it is known what one uses."""
_BLIND_AT_LEAST = 8
_REMEMBERED = 500
"""Attempts whose durations tell what those in flight will use."""
_CLEARLY = 10
"""So many times the average of what is in flight fits: no need to look closer."""
_SHARE = 0.6
"""How much of what is left of a limit may be in flight: what is expected of it may be wrong."""
_ENOUGH = 0.98
"""The share of a limit from which on nothing is started: the last few rollouts would have to be made one by one."""
_MAY_EXCEED = 1.04
"""Of a limit: what is in flight must be all but sure not to take the run above that."""
_DOUBT, _DOUBT_AT_THE_END = 0.01, 0.1
"""How unlikely that has to be while others are in flight, which can be waited for, and when the run would end."""
_NEAR, _MOST = 0.9, 1.05
"""In the last tenth of a limit, one more as large as the largest so far must not take the run above that."""
_DRAWS = 200
_LONGER_STILL = 1.5
"""The exponent of Pareto's distribution, for those that take longer than all before."""
_LONGEST_STILL = 20.0


class Budget(Policy):
    """Starts no more rollouts than the limits of a run allow."""

    def __init__(self, limits: Mapping[str, float], meter: Meter, before: Sequence[Meter], owed: int) -> None:
        """`limits` by option; `meter` counts attempts from now on, those of `before` have counted earlier ones."""
        self.limits = limits
        self.options = frozenset(limits)
        self.is_held = False
        """Whether nothing is in flight, and the next rollout would exceed a limit."""
        self._meter = meter
        self._spent: dict[str, float] = {name: sum(each.amount(name) for each in before) for name in limits}
        self._all = _History(limits)
        self._all.add_many(sum(each.attempts - each.untold for each in before), self._spent)
        self._by_agent: dict[str, _History] = {}
        self._in_flight: Counter[str] = Counter()
        self._owed = owed
        """Rollouts that were never started."""
        self._blind = max(_BLIND_AT_LEAST, owed // _BLIND_SHARE)
        self._decides = True
        self._unknown = sum(each.unknown for each in before)
        """Rollouts of before that do not say what they used."""
        self._dispatch: Dispatch | None = None

    @property
    def spent(self) -> Mapping[str, float]:
        """What is used up of each limit, over all starts of the run."""
        return self._spent

    def obey(self, limits: Mapping[str, float]) -> None:
        """Go by limits from elsewhere from now on, and leave it to others when the run is to end."""
        self._decides = False
        self.limits = limits
        if self._dispatch is not None:
            self._dispatch.look_again()

    def begin(self, dispatch: "Dispatch") -> None:
        """Keep the dispatcher, which is stopped when the budget is used up."""
        self._dispatch = dispatch
        if self._unknown:
            dispatch.stop(self._unkept(f"{self._unknown:,} finished rollouts do not say how many tokens they used"))

    def change(self, config: RolloutCollectionConfig, changed: Collection[str]) -> None:
        """Go on with other limits; none can be lifted, since only what is limited is counted.

        Raises:
            ConfigError: one would be.
        """
        check_not_lifted(self.limits, config.budgets)
        self.limits = {name: config.budgets[name] for name in self.limits}
        if self._dispatch is not None:
            self._dispatch.look_again()

    def started(self, pending: PendingAttempt) -> None:
        """One more is in flight."""
        self._in_flight[pending.agent] += 1
        self._owed -= pending.number == 1

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """One less is in flight, and it is known what it used."""
        self._in_flight[pending.agent] -= 1
        failure = attempt.failure
        record = attempt.result or {}
        if failure is not None:
            record = {PARTIAL_RESPONSE_KEY: failure.partial_response, USAGE_KEY_NAME: failure.usage}
        before = self._meter.amounts(self.limits)
        is_success = failure is None and outcome_of(record) is Outcome.SUCCESS
        self._meter.add(record, success=is_success)
        used = {name: self._meter.amount(name) - before[name] for name in self.limits}
        for name, amount in used.items():
            self._spent[name] += amount
        took_s = asyncio.get_running_loop().time() - pending.started_s
        self._all.add(used, took_s)
        self._by_agent.setdefault(pending.agent, _History(self.limits)).add(used, took_s)
        if self._meter.unknown:
            return self._unkept(f"{rollout_name(attempt.row)} does not say how many tokens it used")
        if COST_USD in self.limits and self._meter.unpriced and self._meter.prices is not None:
            why = self._meter.prices.no_price(next(iter(self._meter.unpriced)))
            return Stop(StopKind.BUDGET, f"{COST_USD} cannot be kept: {why}")
        exceeded = next((name for name, limit in self.limits.items() if self._spent[name] >= limit), None)
        return Stop(StopKind.BUDGET, self._message(exceeded)) if exceeded is not None and self._decides else None

    def holds_back(self) -> bool:
        """Whether the next rollout, together with those in flight, would exceed a limit."""
        assert self._dispatch is not None
        in_flight = self._in_flight.total()
        name = next((name for name in self.limits if self._would_exceed(name)), None)
        self.is_held = name is not None and not in_flight
        if name is None:
            return in_flight >= max(self._blind, 2 * self._all.attempts)
        if self.is_held and self._decides and self._dispatch.stopped is None:
            self._dispatch.stop(Stop(StopKind.BUDGET, self._message(name)))
        return True

    def notice(self) -> str:
        """How much of the tightest limit is used up."""
        shares = {name: self._spent[name] / limit for name, limit in self.limits.items() if limit}
        if not shares or not self._decides:
            return ""
        name = max(shares, key=lambda each: shares[each])
        return f"{100 * shares[name]:.0f} % of {name}"

    def _would_exceed(self, name: str) -> bool:
        limit, spent, mean = self.limits[name], self._spent[name], self._all.mean(name)
        if spent >= limit:
            return True
        assert self._dispatch is not None
        now_s, in_flight_now = asyncio.get_running_loop().time(), self._dispatch.attempts_in_flight
        oldest_s = now_s - in_flight_now[0].started_s if in_flight_now else 0.0
        if spent + _CLEARLY * mean * (len(in_flight_now) + 1) + self._all.most(name, oldest_s) < limit:
            return False
        going: dict[str, list[float]] = {agent: [] for agent in self._in_flight}
        for pending in in_flight_now:
            going.setdefault(pending.agent, []).append(now_s - pending.started_s)
        in_flight = next_one = 0.0
        for agent, elapsed_s in going.items():
            expected, of_agent = self._by_agent.get(agent, self._all).expect(name, elapsed_s)
            in_flight += expected
            next_one = max(next_one, of_agent)
        left = limit - spent
        if in_flight + self._owed * next_one <= left:  # all of the rest fits
            return False
        if spent > _ENOUGH * limit or in_flight + next_one > left * (_SHARE if in_flight else 1.0):
            return True
        if spent + in_flight + next_one > _NEAR * limit and spent + in_flight + self._all.largest(name) > _MOST * limit:
            return True
        drawn = sum(self._by_agent.get(agent, self._all).draw(name, elapsed_s) for agent, elapsed_s in going.items())
        doubt = _DOUBT if in_flight_now else _DOUBT_AT_THE_END
        return spent + float(np.quantile(drawn, 1 - doubt)) > _MAY_EXCEED * limit

    def _message(self, name: str) -> str:
        limit, spent, mean = self.limits[name], self._spent[name], self._all.mean(name)
        given = money(limit) if name == COST_USD else f"{limit:,.0f}"
        if spent >= limit:
            return f"{name}={given} is used up: {amount_text(name, spent)} so far"
        return (
            f"the next rollout would exceed {name}={given}: {amount_text(name, spent)} so far, and a rollout takes "
            f"about {amount_text(name, mean)}"
        )

    def _unkept(self, why: str) -> Stop:
        """Return the reason to stop when nobody knows what is used up of the limits."""
        return Stop(
            StopKind.BUDGET,
            f"{' and '.join(self.limits)} cannot be kept: {why}. Have the agent ask its model by `server_client`, or "
            "put `usage` into its response; or leave that option out",
        )


def check_not_lifted(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Only what was limited from the beginning is counted, so limits can change, but not go.

    Raises:
        ConfigError: one would.
    """
    lifted = before.keys() - after.keys()
    if lifted:
        raise ConfigError(f"+set: {', '.join(sorted(lifted))} can be another number, but not be lifted")


class _History:
    """What attempts have used, of each limit, and how long they took."""

    def __init__(self, names: Iterable[str]) -> None:
        self.attempts = 0
        self._sums = dict.fromkeys(names, 0.0)
        self._largest = dict.fromkeys(names, 0.0)
        self._longest_s = 0.0
        self._latest: deque[tuple[float, dict[str, float]]] = deque(maxlen=_REMEMBERED)

    def add(self, used: dict[str, float], took_s: float) -> None:
        self.add_many(1, used)
        self._latest.append((took_s, used))
        self._longest_s = max(self._longest_s, took_s)
        for name, amount in used.items():
            self._largest[name] = max(self._largest[name], amount)

    def add_many(self, attempts: int, used: Mapping[str, float]) -> None:
        self.attempts += attempts
        for name, amount in used.items():
            self._sums[name] += amount

    def mean(self, name: str) -> float:
        """What a rollout used on average; 0 while nothing is known."""
        return self._sums[name] / self.attempts if self.attempts else 0.0

    def largest(self, name: str) -> float:
        """The most that one rollout has used; 0 while nothing is known."""
        return self._largest[name]

    def most(self, name: str, elapsed_s: float) -> float:
        """What one attempt may use that has been going on for so long, at the very most."""
        return _LONGEST_STILL * self._largest[name] * _stretch(elapsed_s, self._longest_s)

    def expect(self, name: str, elapsed_s: Sequence[float]) -> tuple[float, float]:
        """What attempts will use that have been going on for so long, all together, and what a new one will.

        Short ones end first, so the mean of what has ended is too low. Every attempt that goes on is taken to end as
        one of those that took longer (Kaplan and Meier's estimate); if none did, as the longest and in proportion.
        """
        if not self._latest:
            return self.mean(name) * len(elapsed_s), self.mean(name)
        times = np.array([*(took_s for took_s, _ in self._latest), *elapsed_s])
        amounts = np.array([*(used[name] for _, used in self._latest), *(0.0 for _ in elapsed_s)])
        ends = np.arange(len(times)) < len(self._latest)
        order = np.lexsort((~ends, times))
        times, amounts, ends = times[order], amounts[order], ends[order]
        at_risk = np.arange(len(times), 0, -1)
        surviving = np.cumprod(1.0 - ends / at_risk)
        weights = np.append(1.0, surviving[:-1]) * ends / at_risk
        longest = int(np.flatnonzero(ends)[-1])
        beyond = amounts[ends].max() * _stretch(times[-1], times[longest])
        # From each place on: what is used, weighted; the last share is of those that outlast all that ended.
        weighted = np.cumsum((weights * amounts)[::-1])[::-1] + surviving[-1] * beyond
        shares = np.cumsum(weights[::-1])[::-1] + surviving[-1]
        going = np.flatnonzero(~ends)
        means = np.where(shares[going] > 0, weighted[going] / np.maximum(shares[going], 1e-12), beyond)
        return float(means.sum()), float(weighted[0] / shares[0])

    def draw(self, name: str, elapsed_s: Sequence[float]) -> "np.ndarray[Any, Any]":
        """What attempts that have been going on for so long, and a new one, may come to: so many possible totals.

        Each may end as one of those that took longer, or take longer than all that ended: of n that have ended, the
        next outlasts all in one of n + 1 cases, and then nobody knows by how much.
        """
        chance = np.random.default_rng(self.attempts)
        going = np.array([*elapsed_s, 0.0])
        if not self._latest:
            return np.full(_DRAWS, self.mean(name) * len(going))
        took = np.array([took_s for took_s, _ in self._latest])
        amounts = np.array([used[name] for _, used in self._latest])
        order = np.argsort(took)
        took, amounts = took[order], amounts[order]
        first = np.searchsorted(took, going, side="right")
        place = first[:, None] + (chance.random((len(going), _DRAWS)) * (len(took) + 1 - first)[:, None]).astype(int)
        farther = np.minimum(chance.random(place.shape) ** (-1 / _LONGER_STILL), _LONGEST_STILL)
        beyond = amounts.max() * np.maximum(1.0, going / max(took[-1], 1e-9))[:, None] * farther
        drawn = np.where(place < len(took), amounts[np.minimum(place, len(took) - 1)], beyond)
        return np.asarray(drawn.sum(axis=0))


def _stretch(longest_s: float, longest_ended_s: float) -> float:
    return max(1.0, longest_s / longest_ended_s) if longest_ended_s > 0 else 1.0
