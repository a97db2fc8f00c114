"""What holds for all shards of a run together: caps on rollouts in flight, budgets, and caps that adapt.

Caps and what is left of budgets are divided evenly among the shards that run. One that joins gets its share only as the
others give theirs up, so the limits hold at every moment. That rests on what each shard says of itself: which caps it
goes by, how many rollouts it has in flight, what it has used. `Board` is where it says so. What is said can be pickled.

Where caps adapt, the driver decides for all shards (`Leader`) and each only measures: what has become of its attempts,
added up over all shards, is what a run in one process would know of itself.
"""

import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from nemo_gym.collect.adaptive import AdaptiveConcurrency, Load, controllers_for, notice_of, with_adaptive_caps
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.progress import ProgressState
from nemo_gym.collect.summary import RunSummary
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.options import DEFAULT_ENTRY, Concurrency, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.options.steering import Bounds
from nemo_gym.runs.read import records
from nemo_gym.runs.rows import InputRows
from nemo_gym.runs.spending import Meter, prices_of

TOTAL = ""
"""The name of the cap over all agents; the others are called after their agent."""
PACE, WHOLE_PACE = "\0pace", 1_000_000
"""The pace of model servers, which is divided like a cap: its name, and of how many parts it is made."""
Caps = dict[str, int]


@dataclass(frozen=True)
class Budgets:
    """What all shards of a run may use together, and what they had used before; by option, as all amounts here."""

    limits: Mapping[str, float] = field(default_factory=dict)
    spent: Mapping[Shard, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class _Spender:
    spent: Mapping[str, float] = field(default_factory=dict)
    granted: dict[str, float] = field(default_factory=dict)
    in_force: Mapping[str, float] = field(default_factory=dict)
    is_here: bool = False

    def holds(self, name: str) -> float:
        used = self.spent.get(name, 0.0)
        return max(used, self.granted.get(name, 0.0), self.in_force.get(name, 0.0)) if self.is_here else used


class BudgetShares:
    """Who may use how much."""

    def __init__(self, budget: Budgets) -> None:
        self._limits = budget.limits
        self._spenders = {shard: _Spender(spent) for shard, spent in budget.spent.items()}

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Go on with other limits; what was granted beyond a lower one is not taken back, but no more is granted."""
        self._limits = {name: limits.get(name, limit) for name, limit in self._limits.items()}

    def exchange(self, shard: Shard, spent: Mapping[str, float], in_force: Mapping[str, float]) -> dict[str, float]:
        """What a shard says it has used and goes by, and what it may use from now on; the first time it joins."""
        own = self._spenders.setdefault(shard, _Spender())
        own.is_here = True
        own.spent, own.in_force = {**own.spent, **spent}, in_force
        here = sum(spender.is_here for spender in self._spenders.values())
        for name, limit in self._limits.items():
            used = own.spent.get(name, 0.0)
            left = limit - sum(spender.spent.get(name, 0.0) for spender in self._spenders.values())
            others = sum(spender.holds(name) for spender in self._spenders.values() if spender is not own)
            own.granted[name] = max(used, min(used + max(0.0, left) / here, limit - others))
        return dict(own.granted)

    def leave(self, shard: Shard) -> None:
        """A shard is over; what it has used stays used."""
        if shard in self._spenders:
            self._spenders[shard].is_here = False
            self._spenders[shard].granted = {}


def spent_before(config: RolloutCollectionConfig) -> dict[Shard, dict[str, float]]:
    """What the shards of a run to resume have used of its budgets: some of them may wait long before they start."""
    if not (config.budgets and config.resume_from_cache and config.num_shards):
        return {}
    found = {}
    for shard in (Shard(index, config.num_shards) for index in range(config.num_shards)):
        paths = RolloutPaths(shard.file(Path(config.output_jsonl_fpath)))
        manifest = read_manifest(paths.manifest)
        meter = Meter(prices_of(config.prices, () if manifest is None else manifest.models))
        for path in (paths.rollouts, paths.failures):
            for _, _, record in records(path, "skip", may_lack_key=True):
                meter.add(record)
        found[shard] = meter.amounts(config.budgets)
    return found


def add_spending(
    summary: RunSummary,
    config: RolloutCollectionConfig,
    ends: Mapping[Shard, Mapping[str, Any] | None],
    budget: Budgets,
) -> None:
    """What the shards have cost since this start, and used of the budgets in all, as the summaries of shards say."""
    summary.meter.prices = prices_of(config.prices)
    summary.budgets = dict(budget.limits)
    summary.counted_elsewhere = dict.fromkeys(config.budgets, 0.0)
    for shard, end in ends.items():
        if end is not None:
            summary.meter.cost_usd += end["cost_usd"] or 0.0
        for name in config.budgets:
            before = budget.spent.get(shard, {}).get(name, 0.0)
            summary.counted_elsewhere[name] += before if end is None else end["budgets"][name]["used"]


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
    """What a person wants; see `nemo_gym.executors.steering`."""
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


class Leader:
    """Decides on the caps of all shards together."""

    def __init__(self, bounds: Mapping[str, Bounds], agents: Iterable[str], now_s: float) -> None:
        self._controllers = controllers_for(bounds, agents, now_s)
        self._loads: dict[Hashable, Mapping[str, Load]] = {}

    @classmethod
    def of(cls, config: RolloutCollectionConfig) -> "Leader | None":
        """One for all agents that the rows of a run name; None where no cap adapts."""
        if not config.adaptive:
            return None
        return cls(config.adaptive, InputRows(config).scan.rows_of_agent, time.monotonic())

    @property
    def caps(self) -> dict[str, int]:
        """The caps that adapt, over all shards together."""
        return {agent: controller.cap for agent, controller in self._controllers.items()}

    def most(self, concurrency: Concurrency) -> Concurrency:
        """The caps of a run, those that adapt as high as they may become."""
        highest = {agent: controller.bounds.high for agent, controller in self._controllers.items()}
        return with_adaptive_caps(concurrency, highest)

    def look(self, reports: Iterable[Report], running: Collection[Shard]) -> dict[str, int]:
        """The caps to go by after these reports, of which those of `running` shards tell what is in flight."""
        in_flight: Counter[str] = Counter()
        for report in reports:
            self.note((report.shard, report.attempt), report.loads)
            if report.shard in running:
                in_flight.update(report.in_flight)
        self.step(time.monotonic(), in_flight)
        return self.caps

    def note(self, shard: Hashable, loads: Mapping[str, Load]) -> None:
        """What a shard says has become of its attempts; one that was started again counts as another."""
        self._loads[shard] = loads

    def step(self, now_s: float, in_flight: Mapping[str, int]) -> None:
        """Decide anew by what all shards have said."""
        for agent, controller in self._controllers.items():
            told = [loads[agent] for loads in self._loads.values() if agent in loads]
            controller.step(now_s, reduce(Load.plus, told, Load()), in_flight.get(agent, 0))

    def notice(self) -> str:
        """For the progress line."""
        return notice_of(self.caps)


def led_by_the_driver(dispatch: Dispatch) -> AdaptiveConcurrency | None:
    """What measures in this shard, if any cap adapts; from now on it decides nothing."""
    adaptive = next((each for each in dispatch.policies if isinstance(each, AdaptiveConcurrency)), None)
    if adaptive is not None:
        adaptive.is_led = True
    return adaptive
