"""Caps on rollouts in flight that hold for all shards together, divided evenly among those that run.

A shard that joins gets its share only as the others give theirs up, so the caps hold at every moment. That rests on
what each shard says of itself: which caps it goes by, and how many rollouts it has in flight.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from nemo_gym.rollouts.config import DEFAULT_ENTRY, Concurrency

TOTAL = ""
"""The name of the cap over all agents; the others are called after their agent."""

Caps = dict[str, int]


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
