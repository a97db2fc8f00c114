"""The list of scenarios: each says what it does in its name, and returns a tally."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.lab import Lab
from tests.chaos.ledger import Tally

Act = Callable[[Lab], Tally]


class SkippedError(Exception):
    """This machine cannot have this fault; the message says why."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    name: str
    act: Act
    is_short: bool
    """Whether the short version has it, too."""


SCENARIOS: list[Scenario] = []


def scenario(name: str, *, short: bool = False) -> Callable[[Act], Act]:
    """Add a scenario to the list."""

    def add(act: Act) -> Act:
        SCENARIOS.append(Scenario(name, act, short))
        return act

    return add
