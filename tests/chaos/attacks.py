"""Attempts to break in, to break out or to cheat: each counts what it tried, and how much of it came to nothing.

An attack is a function with `@attack("what is attacked")` in a module that `command.py` imports. It gets a folder of
its own, tries, and returns a `Tried`.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Tried:
    """What became of the attempts of one attack."""

    tried: int = 0
    survived: int = 0
    problems: list[str] = field(default_factory=list)

    def count(self, name: str, problem: str | None) -> None:
        """Take down one attempt: what went wrong, or None when nothing did."""
        self.tried += 1
        if problem is None:
            self.survived += 1
        else:
            self.problems.append(f"{name}: {problem}")


@dataclass(frozen=True)
class Attack:
    """One row of the table."""

    name: str
    act: Callable[[Path], Tried]
    is_short: bool
    """Whether the short version has it, too."""


ATTACKS: list[Attack] = []


def attack(name: str, *, short: bool = False) -> Callable[[Callable[[Path], Tried]], Callable[[Path], Tried]]:
    """Add an attack to the list."""

    def add(act: Callable[[Path], Tried]) -> Callable[[Path], Tried]:
        ATTACKS.append(Attack(name, act, short))
        return act

    return add


@dataclass
class AttackRow:
    """One attack and its count."""

    name: str
    result: Tried

    @property
    def is_good(self) -> bool:
        """Something was tried, and all of it came to nothing."""
        return 0 < self.result.tried == self.result.survived and not self.result.problems

    def line(self) -> str:
        """For the terminal."""
        it = self.result
        problems = "".join(f"\n     {problem}" for problem in it.problems)
        mark = "ok  " if self.is_good else "FAIL"
        return f"{mark} {self.name:<74} {it.survived} of {it.tried} attempts survived{problems}"

    def cells(self) -> list[str]:
        """For the page."""
        return [self.name, str(self.result.tried), str(self.result.survived)]


def check_attacks(folder: Path, is_short: bool, add: Callable[[Any], None], is_wanted: Callable[[str], bool]) -> None:
    """Every attack, one after the other; one that breaks down is a problem of its own."""
    for it in ATTACKS:
        if (is_short and not it.is_short) or not is_wanted(f"attacks {it.name}"):
            continue
        place = folder / "attacks" / "".join(letter if letter.isalnum() else "_" for letter in it.name)
        place.mkdir(parents=True)
        try:
            result = it.act(place)
        except Exception:  # noqa: BLE001 - one broken attack must not hide the others
            result = Tried(problems=[traceback.format_exc()])
        add(AttackRow(it.name, result))
