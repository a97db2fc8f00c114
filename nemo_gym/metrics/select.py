"""Choosing tasks by their statistics: `0 < mean < 1 and std/output_tokens > 100`.

The language is comparisons (chained as in mathematics), `and`, `or`, `not` and parentheses over numbers and
names. A name is a statistic of the reward (`mean`), a count (`num_rollouts`), or `<statistic>/<field>`; a
field whose name is not plain is put in quotes with its statistic, `"mean/my field"`. The text is parsed with
Python's grammar and never executed.

A statistic that a task does not have makes a comparison neither true nor false: whatever depends on it does
not hold, and neither does its opposite.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from nemo_gym.errors import ConfigError, listed, similar_names
from nemo_gym.metrics.columns import REWARD
from nemo_gym.metrics.grouping import STATISTICS

Profile = Mapping[str, Any]
"""One task of a reward profile."""
Truth = bool | None
"""None: it depends on a statistic the task does not have."""
Condition = Callable[[Profile], Truth]
Value = Callable[[Profile], float | None]

PASS_RATE = "pass_rate"
_COUNTS = ("num_rollouts", "expected_num_rollouts", "missing_num_rollouts", "reward_profile_completion_pct")
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class SelectError(ConfigError, ValueError):
    """An expression that cannot be understood."""


def select_tasks(expression: str, profiles: Sequence[Profile]) -> list[int]:
    """The positions of the profiles for which `expression` holds.

    Raises:
        SelectError: it is not an expression, or uses a name that no profile has.
    """
    condition = _Reader(expression, known_names(profiles)).condition()
    return [position for position, profile in enumerate(profiles) if condition(profile) is True]


def known_names(profiles: Iterable[Profile]) -> list[str]:
    """Every name an expression may use."""
    keys = {key for profile in profiles for key in profile if key.partition("/")[0] in STATISTICS and "/" in key}
    of_reward = [statistic for statistic in STATISTICS if f"{statistic}/{REWARD}" in keys]
    return [*of_reward, *([PASS_RATE] if of_reward else []), *_COUNTS, *sorted(keys)]


def pass_rate(profile: Profile) -> float | None:
    """The share of a task's scored rollouts with a reward of at least 1; None when none is scored."""
    rewards = [info[REWARD] for info in profile.get("rollout_infos", ()) if isinstance(info.get(REWARD), int | float)]
    return sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else None


class _Reader:
    """Turns one expression into a function of a profile."""

    def __init__(self, expression: str, names: list[str]) -> None:
        self._text = " ".join(expression.split())
        self._names = names

    def condition(self) -> Condition:
        try:
            return self._condition(ast.parse(self._text, mode="eval").body)
        except SyntaxError as error:
            self._refuse(error.offset or len(self._text) + 1, f"this is not an expression ({error.msg})")
        except (ValueError, MemoryError, RecursionError) as error:
            if isinstance(error, SelectError):
                raise
            self._refuse(1, f"this is not an expression ({type(error).__name__})")

    def _condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(part) for part in node.values]
            return _all_of(parts) if isinstance(node.op, ast.And) else _any_of(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _opposite(self._condition(node.operand))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        return self._refuse_node(node, "expected a comparison, such as mean > 0.5")

    def _comparison(self, node: ast.Compare) -> Condition:
        values = [self._value(part) for part in (node.left, *node.comparators)]
        steps = []
        for place, kind in enumerate(node.ops):
            if type(kind) not in _COMPARISONS:
                self._refuse_node(node.comparators[place], "compare with <, <=, >, >=, == or !=")
            steps.append(_compared(_COMPARISONS[type(kind)], values[place], values[place + 1]))
        return _all_of(steps)

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            number = node.value
            return lambda profile: number
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner, sign = self._value(node.operand), -1 if isinstance(node.op, ast.USub) else 1
            return lambda profile: None if (found := inner(profile)) is None else sign * found
        name = _name_in(node)
        if name is None:
            return self._refuse_node(node, "expected a number or a name")
        if name not in self._names:
            close = similar_names(name, self._names)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            self._refuse_node(node, f"there is no {name!r}{meant}. Known names: {listed(self._names, 30)}")
        return _getter(name)

    def _refuse_node(self, node: ast.expr, problem: str) -> NoReturn:
        self._refuse(len(self._text.encode()[: node.col_offset].decode()) + 1, problem)

    def _refuse(self, column: int, problem: str) -> NoReturn:
        pointer = " " * (column - 1) + "^"
        raise SelectError(f"+select, position {column}: {problem}\n  {self._text}\n  {pointer}")


def _name_in(node: ast.expr) -> str | None:
    """`mean`, `mean/reward`, `mean/usage.reward` or `"mean/any text"`; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _name_in(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = [_name_in(node.left), _name_in(node.right)]
        return None if None in parts else "/".join(map(str, parts))
    return None


def _getter(name: str) -> Value:
    if name == PASS_RATE:
        return pass_rate
    key = f"{name}/{REWARD}" if name in STATISTICS else name
    return lambda profile: profile.get(key)


def _compared(compare: Callable[[float, float], bool], left: Value, right: Value) -> Condition:
    def holds(profile: Profile) -> Truth:
        one, other = left(profile), right(profile)
        return None if one is None or other is None else compare(one, other)

    return holds


def _all_of(parts: Sequence[Condition]) -> Condition:
    def holds(profile: Profile) -> Truth:
        truths = [part(profile) for part in parts]
        return False if False in truths else None if None in truths else True

    return holds


def _any_of(parts: Sequence[Condition]) -> Condition:
    def holds(profile: Profile) -> Truth:
        truths = [part(profile) for part in parts]
        return True if True in truths else None if None in truths else False

    return holds


def _opposite(part: Condition) -> Condition:
    def holds(profile: Profile) -> Truth:
        truth = part(profile)
        return None if truth is None else not truth

    return holds
