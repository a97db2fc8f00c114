"""Caps on rollouts in flight that hold for all shards together, divided evenly among those that run.

A shard that joins gets its share only as the others give theirs up, so the caps hold at every moment. That rests on
what each shard says of itself: which caps it goes by, and how many rollouts it has in flight.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from nemo_gym.rollouts.config import DEFAULT_ENTRY, Concurrency

TOTAL = ""
"""The name of the cap over all agents; the others are called after their agent."""

Caps = dict[str, int]


@dataclass
class _Member:
    granted: Caps = field(default_factory=dict)
    in_force: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)

    def holds(self, name: str) -> int:
        return max(of.get(name, 0) for of in (self.granted, self.in_force, self.in_flight))


class CapShares:
    """Who may have how many rollouts in flight."""

    def __init__(self, caps: Mapping[str, int]) -> None:
        self._caps = caps
        self._members: dict[Hashable, _Member] = {}

    def exchange(self, member: Hashable, in_force: Mapping[str, int], in_flight: Mapping[str, int]) -> Caps:
        """What a member says of itself, and the caps it is to go by from now on; the first time it joins."""
        own = self._members.setdefault(member, _Member())
        own.in_force, own.in_flight = in_force, in_flight
        rank = list(self._members).index(member)
        for name, cap in self._caps.items():
            share = cap // len(self._members) + (rank < cap % len(self._members))
            others = sum(other.holds(name) for other in self._members.values() if other is not own)
            own.granted[name] = max(0, min(share, cap - others))
        return dict(own.granted)

    def leave(self, member: Hashable) -> None:
        """Free what a member holds, if it is one."""
        self._members.pop(member, None)


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
