"""What is known of one record: the columns that lists filter and sort by, its other plain fields; and choosing by them.

Records come from files that anybody may have written, so nothing is taken for granted: whatever is not as expected is
as if it were not there, and a line that is no JSON at all is a record with the outcome `damaged`.

Tasks are chosen in the same language, by their statistics and their rows: `0 < mean < 1 and level == "hard"`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TypeAlias

import orjson

from nemo_gym.jsonl import cut_levels
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    OBSERVED_KEYS,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.metrics.columns import REWARD
from nemo_gym.metrics.profile import STATISTICS
from nemo_gym.runs.record import (
    ENDED_AT_KEY,
    NG_FAILURE_CLASS_KEY,
    REWARD_KEY,
    STARTED_AT_KEY,
    agent_name_of,
    utc_text,
)
from nemo_gym.runs.select import EXPECTED_COMPARISON, Expression, Holds, Lookup, Name, field_of

PLACES = ("offset", "length", "line")
COLUMNS = (
    "task",
    "repeat",
    "agent",
    "model",
    "reward",
    "outcome",
    "failure_class",
    "incomplete",
    "incomplete_reason",
    "tools",
    "tool_calls",
    "steps",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "duration_s",
    "started_at",
    "ended_at",
)
"""What is known of every record, in this order; times are seconds since 1970, tools are names with newlines between."""
TIMES = ("started_at", "ended_at")
SCORED, UNSCORED, FAILED, DAMAGED = OUTCOMES = ("scored", "unscored", "failed", "damaged")
TIMING_KEY = "_ng_timing"
LONGEST_TEXT = 500
DEEPEST_FIELD = 4
MOST_FIELDS = 500
_LEVELS = 200
_BULK = frozenset(
    {
        RESPONSE_KEY_NAME,
        RESPONSES_CREATE_PARAMS_KEY_NAME,
        AGENT_REF_KEY_NAME,
        TASK_INDEX_KEY_NAME,
        ROLLOUT_INDEX_KEY_NAME,
        REWARD_KEY,
        TIMING_KEY,
        *OBSERVED_KEYS,
    }
)
"""What has a column of its own, or is too large for one."""
_LARGEST = 2.0**53
_REQUEST, _RESPONSE = b'{"responses_create_params":{', b',"response":{'
_NOTHING: dict[str, Any] = {}
_DAMAGED = (None, None, None, None, None, DAMAGED, *(None,) * (len(COLUMNS) - 6))
_OF_ROW = "row."
Profile: TypeAlias = Mapping[str, Any]
"""One task of a reward profile."""
PASS_RATE = "pass_rate"
_COUNTS = ("num_rollouts", "expected_num_rollouts", "missing_num_rollouts", "reward_profile_completion_pct")


def read_leniently(content: bytes) -> Any:
    """The value of a line, also where it is nested too deeply or has NaN in it.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)
    except RecursionError:
        return json.loads(cut_levels(content, _LEVELS))


def read_for_facts(content: bytes) -> Any:
    """The same without the request, where a line begins with it: nothing in it is a fact.

    It ends where the response begins. Should that be a place inside the request, what follows is no JSON, and all of
    the line is read.
    """
    if content.startswith(_REQUEST):
        start = content.find(_RESPONSE)
        if start > 0:
            try:
                return orjson.loads(b"{" + content[start + 1 :])
            except orjson.JSONDecodeError:
                pass
    return read_leniently(content)


def facts_of(record: Any, *, is_failure: bool) -> tuple[Any, ...]:
    """The values of `COLUMNS` for one record; `is_failure` for those of a failures file."""
    if not isinstance(record, dict):
        return _DAMAGED
    get = record.get
    response = get(RESPONSE_KEY_NAME)
    answer = response if isinstance(response, dict) else _NOTHING
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        usage = _NOTHING
    tools, calls, steps = _steps(answer.get("output"))
    failure_class = get(NG_FAILURE_CLASS_KEY)
    reward = number(get(REWARD_KEY))
    if is_failure or failure_class is not None:
        outcome, failure_class = FAILED, _text(failure_class) or "unknown"
    else:
        outcome = UNSCORED if reward is None else SCORED
    incomplete, reason = _incompleteness(answer)
    duration, start, end = times_of(record)
    return (
        _index(get(TASK_INDEX_KEY_NAME)),
        _index(get(ROLLOUT_INDEX_KEY_NAME)),
        agent_name_of(record),
        _text(answer.get("model")),
        reward,
        outcome,
        failure_class,
        incomplete,
        reason,
        tools,
        calls,
        steps,
        number(usage.get("input_tokens")),
        number(usage.get("output_tokens")),
        number(usage.get("total_tokens")),
        duration,
        start,
        end,
    )


def number(value: Any) -> float | None:
    """A finite number, or None; true and false are 1 and 0."""
    kind = type(value)
    if kind is float:
        return value if isfinite(value) else None
    if kind is int:
        return value if -_LARGEST <= value <= _LARGEST else _float(value)
    return float(value) if kind is bool else None


def _float(value: int) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _index(value: Any) -> Any:
    """A task or repeat: a whole number, or what the data set brought instead, as text."""
    if type(value) is int and -_LARGEST <= value <= _LARGEST:
        return value
    return None if value is None else _text(value if isinstance(value, str) else str(value)[:LONGEST_TEXT])


def _text(value: Any) -> str | None:
    return value[:LONGEST_TEXT] if isinstance(value, str) else None


def _steps(output: Any) -> tuple[str | None, int | None, int | None]:
    """The tools that were called, how many calls there were, and how many turns the model had."""
    if not isinstance(output, list):
        return None, None, None
    calls = steps = 0
    names: list[str] = []
    of_model = False
    for item in output:
        kind = item.get("type") if type(item) is dict else None
        if type(kind) is not str:
            kind = "message"
        if kind[-7:] == "_output":
            of_model = False
            continue
        if not of_model:
            if kind == "message" and type(item) is dict and item.get("role", "assistant") != "assistant":
                continue
            steps += 1
            of_model = True
        if kind[-5:] == "_call":
            calls += 1
            name = item.get("name")
            name = name if type(name) is str else kind
            if name not in names:
                names.append(name)
    names = [name[:LONGEST_TEXT].replace("\n", " ") for name in names]
    return ("\n".join(sorted(names)) if names else ""), calls, steps


def _incompleteness(answer: Mapping[str, Any]) -> tuple[bool | None, str | None]:
    if not answer:
        return None, None
    details = answer.get("incomplete_details")
    reason = _text(details.get("reason")) if isinstance(details, dict) else None
    return answer.get("status") == "incomplete" or reason is not None, reason


def times_of(record: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    """How long it took, when it began and when it ended, as far as the record tells."""
    timing = record.get(TIMING_KEY)
    if type(timing) is dict:
        start, end, duration = seconds_of(timing.get("started_at")), None, number(timing.get("duration_s"))
    elif STARTED_AT_KEY in record or ENDED_AT_KEY in record:
        start, end, duration = seconds_of(record.get(STARTED_AT_KEY)), seconds_of(record.get(ENDED_AT_KEY)), None
    else:
        return None, None, None
    if duration is None and start is not None and end is not None:
        duration = end - start
    if end is None and start is not None and duration is not None:
        end = start + duration
    return duration, start, end


def seconds_of(moment: Any) -> float | None:
    """Seconds since 1970 of a number or an ISO 8601 text."""
    if not isinstance(moment, str):
        return number(moment)
    try:
        parsed = datetime.fromisoformat(moment)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def moment_of(seconds: float | None) -> str | None:
    """ISO 8601 for seconds since 1970."""
    if seconds is None:
        return None
    try:
        return utc_text(datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def visit_fields(record: Mapping[str, Any], visit: Callable[[str, Any], object], prefix: str = "") -> None:
    """Hand over every plain field (number, text, boolean) of a record that has no column of its own."""
    for key, value in record.items():
        kind = type(value)
        if kind is str or kind is float or kind is int or kind is bool:
            if prefix:
                visit(prefix + key, value)
            elif key not in _BULK:
                visit(key, value)
        elif kind is dict and value and (prefix or key not in _BULK) and prefix.count(".") < DEEPEST_FIELD - 1:
            visit_fields(value, visit, f"{prefix}{key}.")


def plain(value: Any) -> Any:
    """A field's value as it is kept: texts are cut, and numbers that are none are not there."""
    if type(value) is str:
        return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT]
    return number(value) if type(value) is float else value


class RolloutFilter:
    """A condition on rollouts, `reward < 1 and level == "hard"`: `where.holds(record, row)`.

    A name is one of `COLUMNS`, else a field of the record, else of its row; `row.level` is the row's for certain. Times
    are text here, as records have them.
    """

    def __init__(self, text: str, option: str = "+where") -> None:
        """Understand `text`, which was given as `option`.

        Raises:
            SelectError: it is not an expression.
        """
        self.expression = Expression.parse(text, option)
        self._needs_facts = not set(COLUMNS).isdisjoint(self.expression.names())
        self._never_met = set(self.expression.names()) - set(COLUMNS)
        self._fields: set[str] = set()

    def holds(self, record: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> bool:
        """Whether it is true for a rollout; `row` is what it was made of, where the record may not say all of it."""
        facts = dict(zip(COLUMNS, facts_of(record, is_failure=False), strict=True)) if self._needs_facts else _NOTHING

        def value(name: str) -> Any:
            if name in COLUMNS:
                return moment_of(facts[name]) if name in TIMES else facts[name]
            found = None if name.startswith(_OF_ROW) else field_of(record, name)
            if found is None:
                found = field_of(record if row is None else row, name.removeprefix(_OF_ROW))
            if found is not None:
                self._never_met.discard(name)
            return found

        if self._never_met and len(self._fields) < MOST_FIELDS:
            self._fields.update(name for name in record if not name.startswith("_"))
        return self.expression.holds(value)

    def require_met(self) -> None:
        """After all rollouts were looked at: refuse a name that none of them has.

        Raises:
            SelectError: pointing at it.
        """
        if self._never_met:
            known = {*COLUMNS, *self._fields, *self.expression.names()} - self._never_met
            self.expression.require_known(known, [*COLUMNS, *sorted(self._fields - {*COLUMNS})])


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
