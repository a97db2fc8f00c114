"""Caps on rollouts in flight that hold for all shards together, divided evenly among those that run.

A shard that joins gets its share only as the others give theirs up, so the caps hold at every moment. That rests on
what each shard says of itself: which caps it goes by, and how many rollouts it has in flight. `Board` is where it says
so. What is said can be pickled.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.collect.adaptive import Load
from nemo_gym.collect.progress import ProgressState
from nemo_gym.executors.budget import Budgets, BudgetShares
from nemo_gym.runs.options import DEFAULT_ENTRY, Concurrency
from nemo_gym.runs.options.sharding import Shard

TOTAL = ""
"""The name of the cap over all agents; the others are called after their agent."""

PACE, WHOLE_PACE = "\0pace", 1_000_000
"""The pace of model servers, which is divided like a cap: its name, and of how many parts it is made."""

Caps = dict[str, int]


@dataclass(frozen=True)
class Report:
    """How a running shard is doing."""

    shard: Shard
    attempt: int
    node: str
    state: ProgressState | None = None
    """None before it has begun to collect."""
    caps: Mapping[str, int] = field(default_factory=dict)
    """Those it goes by."""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """How much of each cap it takes up."""
    is_draining: bool = False
    """Whether it has nothing more to start."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """What it says to what a person asked, by number."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """What it has used of the run's budgets, over all of its starts."""
    allowance: Mapping[str, float] = field(default_factory=dict)
    """How much of them it goes by."""
    is_held: bool = False
    """Whether nothing is in flight, and its next rollout would exceed that."""
    loads: Mapping[str, Load] = field(default_factory=dict)
    """What has become of its attempts, of agents whose caps adapt."""


@dataclass(frozen=True)
class Instruction:
    """What a running shard is to do."""

    caps: Mapping[str, int] = field(default_factory=dict)
    stop: bool = False
    at_once: bool = False
    orders: Mapping[str, Any] | None = None
    """What a person wants; see `nemo_gym.executors.control`."""
    allowance: Mapping[str, float] = field(default_factory=dict)
    """How much of the run's budgets it may use, with what it has used already."""


class Board:
    """Where running shards report and read what to do, and the driver reads how they are doing.

    Under Ray it is an actor. A board that was lost and started anew learns everything from the next reports, and the
    driver repeats with every look what it wants.
    """

    def __init__(self, caps: Mapping[str, int], budget: Budgets | None = None) -> None:
        self._shares = CapShares(caps)
        self._budget = BudgetShares(budget or Budgets())
        self._reports: dict[Shard, Report] = {}
        self._over: dict[Shard, int] = {}
        """The last attempt at each shard that is over."""
        self._stop = self._at_once = False
        self._orders: Mapping[str, Any] | None = None

    def report(self, report: Report) -> Instruction:
        """Take a shard's report; what it is to do."""
        if report.attempt <= self._over.get(report.shard, 0):
            return Instruction(stop=True, at_once=True)  # it was given up for lost, and another one is on its way
        self._reports[report.shard] = report
        caps = self._shares.exchange(report.shard, report.caps, report.in_flight, is_draining=report.is_draining)
        allowance = self._budget.exchange(report.shard, report.spent, report.allowance)
        return Instruction(caps, self._stop, self._at_once, self._orders, allowance)

    def set_orders(self, orders: Mapping[str, Any]) -> None:
        """What a person wants of all shards, for the driver, which repeats it with every look."""
        self._orders = orders
        self._budget.set_limits(orders.get("limits", {}))
        if "caps" in orders:
            self._shares.replace_caps(orders["caps"])

    def set_caps(self, caps: Mapping[str, int]) -> None:
        """Go on with other numbers for the same caps, for the driver, which repeats them with every look."""
        self._shares.set_caps(caps)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Collection[Report]:
        """The latest reports, for the driver, which says what it knows: attempts that are over, and whether to stop."""
        self._stop, self._at_once = stop, at_once
        for shard, attempt in over.items():
            if attempt > self._over.get(shard, 0):
                self._over[shard] = attempt
                self._shares.leave(shard)
                self._budget.leave(shard)
        return list(self._reports.values())


@dataclass
class _Member:
    place: int
    """Where it stands in line when what does not divide evenly is handed out."""
    granted: Caps = field(default_factory=dict)
    in_force: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    is_draining: bool = False

    def holds(self, name: str) -> int:
        return max(of.get(name, 0) for of in (self.granted, self.in_force, self.in_flight))


class CapShares:
    """Who may have how many rollouts in flight; what it does takes as long for ten thousand members as for ten."""

    def __init__(self, caps: Mapping[str, int]) -> None:
        self._caps = caps
        self._members: dict[Hashable, _Member] = {}
        self._line: list[Hashable] = []
        """The members by their place."""
        self._held: Counter[str] = Counter()
        self._draining = 0

    def exchange(
        self, member: Hashable, in_force: Mapping[str, int], in_flight: Mapping[str, int], *, is_draining: bool = False
    ) -> Caps:
        """What a member says of itself, and the caps it is to go by from now on; the first time it joins.

        One that is draining has nothing more to start: what it does not take up goes to the others.
        """
        if member not in self._members:
            self._members[member] = _Member(len(self._line))
            self._line.append(member)
        own = self._members[member]
        self._add_up(own, -1)
        own.is_draining = is_draining
        sharing = max(1, len(self._line) - self._draining - is_draining)
        for name, cap in self._caps.items():
            share = in_flight.get(name, 0) if is_draining else cap // sharing + (own.place < cap % sharing)
            own.granted[name] = max(0, min(share, cap - self._held[name]))
        own.in_force, own.in_flight = in_force, in_flight
        self._add_up(own, 1)
        return dict(own.granted)

    def set_caps(self, caps: Mapping[str, int]) -> None:
        """Go on with other numbers for the same caps; those that are lower hold once members have given enough up."""
        self._caps = {name: caps.get(name, cap) for name, cap in self._caps.items()}

    def replace_caps(self, caps: Mapping[str, int]) -> None:
        """Go on with other caps, of other agents too; the pace of the servers stays as it is."""
        pace = {name: cap for name, cap in self._caps.items() if name == PACE}
        self._caps = {**pace, **caps}
        for member in self._members.values():
            member.granted = {name: cap for name, cap in member.granted.items() if name in self._caps}
        self._held = Counter({name: sum(each.holds(name) for each in self._members.values()) for name in self._caps})

    def leave(self, member: Hashable) -> None:
        """Free what a member holds, if it is one."""
        own = self._members.pop(member, None)
        if own is None:
            return
        self._add_up(own, -1)
        last = self._line.pop()
        if last != member:  # it takes the place that has become free
            self._line[own.place] = last
            self._members[last].place = own.place

    def _add_up(self, member: _Member, sign: int) -> None:
        self._draining += sign * member.is_draining
        for name in self._caps:
            self._held[name] += sign * member.holds(name)


def caps_of(concurrency: Concurrency) -> Caps:
    """The caps of a run by name; what is not limited is not in it."""
    named = {TOTAL: concurrency.total, **concurrency.per_agent, DEFAULT_ENTRY: concurrency.each_other}
    return {name: cap for name, cap in named.items() if cap is not None}


def with_caps(own: Concurrency, caps: Mapping[str, int]) -> Concurrency:
    """`own` with the caps of that name wherever they are lower."""

    def lower(name: str, cap: int | None) -> int | None:
        given = caps.get(name)
        return cap if given is None else given if cap is None else min(given, cap)

    return Concurrency(
        total=lower(TOTAL, own.total),
        per_agent={agent: lower(agent, cap) for agent, cap in own.per_agent.items()},
        each_other=lower(DEFAULT_ENTRY, own.each_other),
    )


def in_flight_by_cap(concurrency: Concurrency, total: int, by_agent: Mapping[str, int]) -> Caps:
    """How much of each cap is taken up."""
    unlisted = [count for agent, count in by_agent.items() if agent not in concurrency.per_agent]
    taken = {TOTAL: total, DEFAULT_ENTRY: max(unlisted, default=0)}
    return taken | {agent: by_agent.get(agent, 0) for agent in concurrency.per_agent}
