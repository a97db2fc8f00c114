"""Conditions on a comparison, or on other numbers, for CI: `+fail_if='delta < -0.01'`.

A condition on `delta` or `relative` speaks of the true difference. It applies if the whole 95 % interval fulfils it,
does not apply if nothing of the interval does, and is undecided otherwise. All other names are compared as they are.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nemo_gym.compare.comparison import Compared, Comparison
from nemo_gym.runs.select import All, Any_, Compare, Expression, Holds, Literal, Node, Truth, Value, compared

NAMES = (
    "delta",
    "relative",
    "ci_low",
    "ci_high",
    "p",
    "base",
    "new",
    "tokens.delta",
    "cost.delta",
    "failed.delta",
    "coverage",
)


class Outcome(Enum):
    """What became of a condition."""

    DOES_NOT_APPLY = "does not apply"
    APPLIES = "applies"
    UNDECIDED = "cannot be decided with this much data"


@dataclass(frozen=True)
class Verdict:
    """One condition on one run."""

    condition: str
    run: str
    outcome: Outcome
    values: dict[str, float | None]
    """The names in the condition, and what they were."""

    @property
    def line(self) -> str:
        """The verdict in one line."""
        shown = ", ".join(
            f"{name} = {'unknown' if value is None else f'{value:.4g}'}" for name, value in self.values.items()
        )
        return f"{self.run}: {self.condition} {self.outcome.value} ({shown})"


def parse_condition(text: str, names: Collection[str] = NAMES) -> Expression:
    """Understand a condition before anything is read.

    Raises:
        SelectError: it is no expression, or uses a name that a comparison, or whoever has `names`, does not have.
    """
    expression = Expression.parse(text, "+fail_if")
    expression.require_known(names)
    return expression


def judge(comparison: Comparison, conditions: Sequence[Expression]) -> list[Verdict]:
    """Every condition on every run but the baseline."""
    return [
        verdict
        for run in comparison.runs[1:]
        for verdict in judge_numbers(run.name, numbers_of(comparison, run.name), conditions)
    ]


def judge_numbers(name: str, numbers: "Mapping[str, Number]", conditions: Sequence[Expression]) -> list[Verdict]:
    """Every condition on what is known of a run."""
    verdicts = []
    for condition in conditions:
        truth = _truth(condition.node, numbers)
        outcome = {True: Outcome.APPLIES, False: Outcome.DOES_NOT_APPLY, None: Outcome.UNDECIDED}[truth]
        values = {name: _point(numbers[name]) for name in condition.names()}
        verdicts.append(Verdict(condition.text, name, outcome, values))
    return verdicts


def exit_code(verdicts: Sequence[Verdict], on_undecided: str) -> int:
    """1 if a condition applies, 3 if one is undecided and that is not to count otherwise, else 0."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.APPLIES in outcomes:
        return 1
    if Outcome.UNDECIDED not in outcomes:
        return 0
    return {"undecided": 3, "pass": 0, "fail": 1}[on_undecided]


Number = float | tuple[float, float, float] | None
"""A value as it is, or (low, value, high) of one that is only estimated."""


def numbers_of(comparison: Comparison, name: str) -> dict[str, Number]:
    """What conditions can name."""
    main = comparison.main(name)
    found = main.found
    base, new = comparison.base, next(run for run in comparison.runs if run.name == name)
    tokens: Compared | None = comparison.tokens.get(name)
    numbers: dict[str, Number] = dict.fromkeys(NAMES)
    if found is not None:
        numbers |= {"delta": (found.ci_low, found.delta, found.ci_high), "ci_low": found.ci_low}
        numbers |= {"ci_high": found.ci_high, "p": found.p, "base": found.base, "new": found.new}
        if found.relative is not None and found.relative_ci is not None:
            numbers["relative"] = found.relative_ci[0], found.relative, found.relative_ci[1]
    if tokens is not None and tokens.found is not None:
        numbers["tokens.delta"] = tokens.found.delta
    cost = comparison.cost.get(name)
    if cost is not None and cost.found is not None:
        numbers["cost.delta"] = cost.found.delta
    numbers["failed.delta"] = float(new.failed.total() - base.failed.total())
    asked = max(new.asked, new.rollouts + new.failed.total())
    numbers["coverage"] = new.rollouts / asked if asked else None
    return numbers


def _truth(node: Node, numbers: Mapping[str, Number]) -> Truth:
    """Whether a condition holds; None where that is undecided."""
    if isinstance(node, All):
        truths = [_truth(part, numbers) for part in node.parts]
        return False if False in truths else None if None in truths else True
    if isinstance(node, Any_):
        truths = [_truth(part, numbers) for part in node.parts]
        return True if True in truths else None if None in truths else False
    if isinstance(node, Compare):
        return _compared_over_interval(node, numbers)
    if isinstance(node, Holds):
        return node.value.value if isinstance(node.value, Literal) and isinstance(node.value.value, bool) else None
    truth = _truth(node.part, numbers)
    return None if truth is None else not truth


def _compared_over_interval(node: Compare, numbers: Mapping[str, Number]) -> Truth:
    left, right = _ends(node.left, numbers), _ends(node.right, numbers)
    truths = {compared(node.sign, one, other) for one in left for other in right}
    is_equality = node.sign in ("==", "!=")
    if is_equality and (len(left) > 1 or len(right) > 1):
        apart = max(left) < min(right) or max(right) < min(left)
        return (node.sign == "!=") if apart else None
    return truths.pop() if len(truths) == 1 else None


def _ends(value: Value, numbers: Mapping[str, Number]) -> tuple[Any, ...]:
    """Both ends of an interval, or the one value."""
    if isinstance(value, Literal):
        return (value.value,)
    number = numbers[value.name]
    if number is None:
        return (None,)
    ends = (number[0], number[2]) if isinstance(number, tuple) else (number,)
    return tuple(value.sign * end for end in ends)


def _point(number: Number) -> float | None:
    point = number[1] if isinstance(number, tuple) else number
    return None if point is None or not math.isfinite(point) else point
