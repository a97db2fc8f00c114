"""Choosing tasks by their statistics and their rows: `0 < mean < 1 and std/output_tokens > 100 and level == "hard"`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from nemo_gym.metrics.columns import REWARD
from nemo_gym.metrics.profile import STATISTICS
from nemo_gym.runs.select import EXPECTED_COMPARISON, Expression, Holds, Lookup, Name, field_of

Profile: TypeAlias = Mapping[str, Any]
"""One task of a reward profile."""
PASS_RATE = "pass_rate"
_COUNTS = ("num_rollouts", "expected_num_rollouts", "missing_num_rollouts", "reward_profile_completion_pct")


def parse_for_tasks(expression: str, option: str) -> Expression:
    """An expression about tasks, in which a quoted text that begins with a statistic and a slash is a name."""
    return Expression.parse(expression, option, is_name=_is_statistic)


def _is_statistic(name: str) -> bool:
    return "/" in name and name.partition("/")[0] in STATISTICS


def select_tasks(
    expression: str,
    profiles: Sequence[Profile],
    rows: Sequence[Mapping[str, Any]] | None = None,
    option: str = "+select",
) -> list[int]:
    """The positions of the profiles for which `expression` holds.

    Names are statistics of the reward (`mean`), counts, `<statistic>/<field>`, and fields of the task's row: those of
    `rows`, else of the profile's sample.

    Raises:
        SelectError: it is not an expression, or uses a name that no profile has.
    """
    parsed = parse_for_tasks(expression, option)
    statistics = known_names(profiles)
    if rows is None:
        rows = [profile.get("sample") or {} for profile in profiles]
    of_rows = {name for name in parsed.names() if any(field_of(row, bare_name(name)) is not None for row in rows)}
    parsed.require_known({*statistics, *of_rows}, statistics)
    for node, value in parsed.values():
        if isinstance(node, Holds) and isinstance(value, Name) and value.name in statistics:
            parsed.refuse(value.position, EXPECTED_COMPARISON)
    own = frozenset(statistics)
    return [place for place, both in enumerate(zip(profiles, rows, strict=True)) if parsed.holds(_of_task(*both, own))]


def _of_task(profile: Profile, row: Mapping[str, Any], statistics: frozenset[str]) -> Lookup:
    def value(name: str) -> Any:
        if name == PASS_RATE:
            return pass_rate(profile)
        if name in statistics:
            return profile.get(f"{name}/{REWARD}" if name in STATISTICS else name)
        return field_of(row, bare_name(name))

    return value


def bare_name(name: str) -> str:
    """The field that a name means when it means a field of the row."""
    return name.removeprefix("record.").removeprefix("row.")


def known_names(profiles: Iterable[Profile]) -> list[str]:
    """Every statistic and count an expression may use."""
    keys = {key for profile in profiles for key in profile if _is_statistic(key)}
    of_reward = [statistic for statistic in STATISTICS if f"{statistic}/{REWARD}" in keys]
    return [*of_reward, *([PASS_RATE] if of_reward else []), *_COUNTS, *sorted(keys)]


def pass_rate(profile: Profile) -> float | None:
    """The share of a task's scored rollouts with a reward of at least 1; None when none is scored."""
    rewards = [info[REWARD] for info in profile.get("rollout_infos", ()) if isinstance(info.get(REWARD), int | float)]
    return sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else None
