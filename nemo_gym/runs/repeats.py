"""What rollouts that have ended say of their task: whether it is decided, and how long others of it will take.

A task is decided when no more of its repeats are needed: `stop_repeats_when='pass_rate_ci_width < 0.2'`. The condition
is asked after every scored rollout of a task, in the order in which they end, and once it has held the task stays
decided. The rollouts file has that order, too: a run that is resumed, even after it was killed, asks again and comes to
the same decisions.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from nemo_gym.errors import ConfigError
from nemo_gym.keys import TIMING_KEY_NAME
from nemo_gym.runs.read import records
from nemo_gym.runs.record import REWARD_KEY, is_finite_number
from nemo_gym.runs.select import Expression
from nemo_gym.runs.spending import duration_s

NotNeeded: TypeAlias = dict[str, dict[Any, list[int]]]
"""By agent and task, the repeats that are not made because the task is decided."""


@dataclass(slots=True)
class Tally:
    """The scored rollouts of one task."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """The sum of squared deviations from the mean."""
    low: float = math.inf
    high: float = -math.inf
    passed: int = 0

    def add(self, reward: float) -> None:
        """Count the reward of one more repeat."""
        self.n += 1
        before = reward - self.mean
        self.mean += before / self.n
        self.squares += before * (reward - self.mean)
        self.low, self.high = min(self.low, reward), max(self.high, reward)
        self.passed += reward >= 1

    def statistics(self, repeats: int | None) -> dict[str, float | int | None]:
        """What a condition may ask for; `repeats` is how many were asked for."""
        from nemo_gym.metrics.intervals import binomial_interval  # with numpy, which reading a run does without

        rate = self.passed / self.n
        low, high = binomial_interval(rate, self.n)
        return {
            "n": self.n,
            "mean": self.mean,
            "std": math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else None,
            "min": self.low,
            "max": self.high,
            "pass_rate": rate,
            "pass_rate_ci_low": low,
            "pass_rate_ci_high": high,
            "pass_rate_ci_width": high - low,
            "repeats": repeats,
        }


@dataclass
class RepeatRule:
    """Which tasks of a run are decided."""

    text: str
    repeats: int | None = None
    """How many rollouts of each task were asked for, if that is one number."""
    decided: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    """By task, what was known of it when it was."""
    _tallies: dict[Hashable, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expression = Expression.parse(self.text, "+stop_repeats_when")

    def add(self, task: Hashable, result: Mapping[str, Any]) -> None:
        """Count a rollout that has ended well; one without a score says nothing."""
        reward = result.get(REWARD_KEY)
        if task in self.decided or not is_finite_number(reward):
            return
        tally = self._tallies.setdefault(task, Tally())
        tally.add(float(reward))
        known = tally.statistics(self.repeats)
        if self._expression.holds(known.get):
            self.decided[task] = {name: known[name] for name in ("n", "mean", "pass_rate")}
            del self._tallies[task]


def keys_of(not_needed: NotNeeded, agent: str) -> set[tuple[int, int]]:
    """The rollouts of one agent that are not needed; those of tasks with numbers."""
    tasks = not_needed.get(agent, {})
    return {(task, repeat) for task, repeats in tasks.items() if isinstance(task, int) for repeat in repeats}


def told_of(not_needed: NotNeeded, rule: RepeatRule | None) -> dict[str, Any] | None:
    """For the manifest: by agent and task which repeats were not made, and what was known of the task."""
    if rule is None or not not_needed:
        return None
    return {
        agent: {
            str(task): {"not_made": sorted(repeats), **rule.decided.get(task, {})} for task, repeats in tasks.items()
        }
        for agent, tasks in not_needed.items()
    }


def not_needed_in(told: Mapping[str, Any] | None) -> dict[str, set[tuple[int, int]]]:
    """The keys of rollouts that a manifest says were not needed, by agent; those of tasks with numbers."""
    found: dict[str, set[tuple[int, int]]] = {}
    for agent, tasks in (told or {}).items():
        keys = found.setdefault(agent, set())
        for task, entry in tasks.items():
            if task.isdecimal():
                keys.update((int(task), rollout) for rollout in entry["not_made"])
    return found


def earlier_durations(path: Path) -> dict[Hashable, float]:
    """By task, the mean of what its rollouts took in an earlier run.

    Raises:
        ConfigError: there is no such file, or it does not say how long anything took.
    """
    if not path.is_file():
        raise ConfigError(f"+durations_from={path}: there is no such file; name the rollouts of an earlier run")
    found = durations_in(path)
    if not found:
        raise ConfigError(
            f"+durations_from={path}: none of its records says how long it took ({TIMING_KEY_NAME}.duration_s); name "
            "the rollouts of an earlier run of the same rows"
        )
    return found


def durations_in(path: Path) -> dict[Hashable, float]:
    """By task, the mean of what the rollouts in a file took, of those that say so."""
    took: dict[Hashable, tuple[float, int]] = {}
    for key, _, record in records(path, "skip"):
        seconds = duration_s(record)
        if seconds is not None:
            so_far, count = took.get(key.task_index, (0.0, 0))
            took[key.task_index] = (so_far + seconds, count + 1)
    return {task: seconds / count for task, (seconds, count) in took.items()}
