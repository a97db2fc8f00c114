"""What one rollout is called, what becomes of its result, and what a failure says about itself.

Three outcomes: a success goes to the rollouts file, a failure to the sidecar, and a discarded result nowhere, so
that the missing line makes it run again. A rollout that scored 0 is a success.

Keys of millions of rollouts are kept in little memory: a built-in set spends 60 to 100 bytes on an integer, those
here 8 to 24, so that a run with a million waiting rows needs hardly more memory than one with ten thousand.
"""

import gc
import math
from array import array
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from nemo_gym.http.run_answers import LEFT_OUT, VERIFY
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    ATTEMPT_INDEX_KEY_NAME,
    PARTIAL_RESPONSE_KEY_NAME,
    RESPONSE_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SKILLS_REF_KEY_NAME,
    TASK_INDEX_KEY_NAME,
    USAGE_KEY_NAME,
)

Row: TypeAlias = dict[str, Any]
"""One materialized input row, as sent to an agent's `/run`."""
Result: TypeAlias = dict[str, Any]
"""What the agent answered, plus the row's indices once it is stamped."""
REWARD_KEY = "reward"
NG_FAILURE_CLASS_KEY = "_ng_failure_class"
NG_NO_PERSIST_KEY = "_ng_no_persist"
NG_TERMINAL_KEY = "_ng_failure_terminal"
FAILURE_MESSAGE_KEY = "_ng_failure_message"
FAILURE_STATUS_KEY = "_ng_failure_status"
FAILURE_SERVER_KEY = "_ng_failure_server"
COUNTS_AS_ATTEMPT_KEY = "_ng_counts_as_attempt"
STARTED_AT_KEY = "_ng_started_at"
ENDED_AT_KEY = "_ng_ended_at"
PARTIAL_RESPONSE_KEY = PARTIAL_RESPONSE_KEY_NAME
"""What an agent had of the response when its rollout failed."""
FAILED_IN_KEY = "_ng_failed_in"
"""In which call it failed, if the agent said so: of what failed in `verify` the response is whole."""
PREVIOUS_VERDICT_KEY = "_ng_previous_verdict"
"""What a record that was scored again said before."""
MAX_FAILURE_MESSAGE_LENGTH = 2_000
_ALWAYS_STAMPED = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, AGENT_REF_KEY_NAME)
_STAMPED = (*_ALWAYS_STAMPED, ATTEMPT_INDEX_KEY_NAME, ROLLOUT_ID_KEY_NAME, SKILLS_REF_KEY_NAME)
_LARGEST = 2**64 - 2
_SIXTY_FOUR_BITS = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15
"""Spreads neighbouring integers over the table (2^64 divided by the golden ratio)."""
_FIRST_BITS = 10
_ROLLOUT_BITS = 24
_TASK_LIMIT = 2**39
_ROLLOUT_LIMIT = 2**_ROLLOUT_BITS


class RolloutKey(NamedTuple):
    """Identity of one rollout within a run."""

    task_index: Any
    """A whole number, unless the data set brought something else."""
    rollout_index: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "RolloutKey":
        """The key of a row or a result.

        Raises:
            KeyError: it carries no indices.
        """
        return cls(record[TASK_INDEX_KEY_NAME], record[ROLLOUT_INDEX_KEY_NAME])


def task_order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What to sort rows and results by: task, then repeat; numbers before text, records without indices last."""
    return (
        *_sortable(record.get(TASK_INDEX_KEY_NAME)),
        *_sortable(record.get(ROLLOUT_INDEX_KEY_NAME)),
    )


def _sortable(index: object) -> tuple[int, Any]:
    if isinstance(index, int | float):
        return 0, index
    return (1, index) if isinstance(index, str) else (2, 0)


def key_or_none(record: Any) -> RolloutKey | None:
    """The key of whatever stood on a line; None when it cannot be told which rollout it is."""
    key = plain_key(record)
    return None if key is None else tuple.__new__(RolloutKey, key)  # in half the time of RolloutKey(...)


def plain_key(record: Any) -> tuple[Any, Any] | None:
    """The same without names, which take longer than all else."""
    try:
        key = record[TASK_INDEX_KEY_NAME], record[ROLLOUT_INDEX_KEY_NAME]
        hash(key)
    except (KeyError, TypeError):
        return None
    return key


def agent_name_of(record: Mapping[str, Any]) -> str | None:
    """The agent a row goes to, or a result came from; None when the record does not say."""
    agent_ref = record.get(AGENT_REF_KEY_NAME)
    name = agent_ref.get("name") if isinstance(agent_ref, dict) else None
    return name if isinstance(name, str) else None


def stamp(row: Mapping[str, Any], result: Result) -> Result:
    """Write the row's identity onto its result, over whatever the agent put there; returns the same object."""
    for key in _STAMPED:
        if key in row:
            result[key] = row[key]
    return result


class Outcome(StrEnum):
    """What becomes of a result."""

    SUCCESS = "success"
    FAILURE = "failure"
    DISCARDED = "discarded"


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    """Where a result belongs; any failure class counts, also an empty one."""
    if result.get(NG_NO_PERSIST_KEY):
        return Outcome.DISCARDED
    if result.get(NG_FAILURE_CLASS_KEY) is not None:
        return Outcome.FAILURE
    return Outcome.SUCCESS


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value can be a reward; true and false are 1 and 0."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def has_usable_reward(result: Mapping[str, Any]) -> bool:
    """Whether the reward of a result, if it has one, is a finite number."""
    return REWARD_KEY not in result or is_finite_number(result[REWARD_KEY])


class FailureClass(StrEnum):
    """Failures that the collector itself detects; agents report classes of their own."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    AUTH = "auth"
    MODEL_NOT_FOUND = "model_not_found"
    HTTP_4XX = "http_4xx"
    AGENT_ERROR = "agent_error"
    INVALID_RESPONSE = "invalid_response"
    INVALID_REWARD = "invalid_reward"
    SERVER_GONE = "server_gone"
    JUDGE_FAILED = "judge_failed"
    NOT_RECORDED = "not_recorded"
    CANCELLED = "cancelled"
    STRAGGLER = "straggler"

    @property
    def is_infrastructure(self) -> bool:
        """Whether it says nothing about the rollout, so that it never counts towards the cap on resume."""
        return self in _INFRASTRUCTURE

    @property
    def tells_of_run(self) -> bool:
        """Whether it says something about how the run goes; nothing does that somebody else put an end to."""
        return self not in _TELLS_NOTHING_OF_RUN

    @property
    def is_terminal(self) -> bool:
        """Whether it must not be tried again, not even by a run that resumes this one."""
        return self is FailureClass.NOT_RECORDED

    @property
    def dooms_agent(self) -> bool:
        """Whether an agent whose first rollouts all fail like this cannot succeed at all."""
        return self in _DOOMS_AGENT


_INFRASTRUCTURE = {
    FailureClass.CONNECT,
    FailureClass.TIMEOUT,
    FailureClass.RATE_LIMITED,
    FailureClass.SERVER_GONE,
    FailureClass.CANCELLED,
    FailureClass.STRAGGLER,
}
_TELLS_NOTHING_OF_RUN = {FailureClass.CANCELLED, FailureClass.STRAGGLER}
_DOOMS_AGENT = {FailureClass.AUTH, FailureClass.MODEL_NOT_FOUND}
_OF_A_VERIFIER = (FailureClass.AGENT_ERROR, FailureClass.JUDGE_FAILED)
_CANNOT_SUCCEED = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Statuses with which the same request will be answered again."""


@dataclass(frozen=True)
class Failure:
    """A failed `/run`, as far as the collector can tell."""

    failure_class: FailureClass
    message: str
    status: int | None = None
    """The HTTP status of the innermost failure, if there was an answer."""
    server: str | None = None
    """The server in which it happened, if known."""
    partial_response: dict[str, Any] | None = None
    """What there was of the response by then, if the agent said so."""
    failed_in: str | None = None
    """In which call it happened, if the agent said so."""
    raised: str | None = None
    """The path, the class and the line of code of an exception that nobody expected, if a server said so."""

    usage: dict[str, Any] | None = None
    """What model servers say that the attempt used, as it is stored."""
    is_asked_again: bool = False
    """Whether the agent has asked the environment for the verdict several times."""

    @property
    def is_final_in_run(self) -> bool:
        """Whether nothing is tried again in this run: it would fail again, or the verifier has failed repeatedly."""
        return self.is_hopeless or (self.is_asked_again and self.failure_class in _OF_A_VERIFIER)

    @property
    def is_hopeless(self) -> bool:
        """Whether the same request would fail again: only somebody who changes something can help."""
        if self.failure_class is FailureClass.HTTP_4XX:
            return self.status in _CANNOT_SUCCEED
        return self.failure_class.dooms_agent or self.failure_class.is_terminal


def failure_record(row: Mapping[str, Any], failure: Failure, started_at: datetime, ended_at: datetime) -> Result:
    """The sidecar line for a failure that the collector detected; it never holds a reward.

    What is hopeless is tried once in a run, and once more in every run that resumes it, so it does not count.
    """
    record: Result = {
        NG_FAILURE_CLASS_KEY: failure.failure_class.value,
        FAILURE_MESSAGE_KEY: failure.message[:MAX_FAILURE_MESSAGE_LENGTH],
        FAILURE_STATUS_KEY: failure.status,
        FAILURE_SERVER_KEY: failure.server,
    }
    if failure.failure_class.is_infrastructure or failure.is_hopeless:
        record[COUNTS_AS_ATTEMPT_KEY] = False
    if failure.failure_class.is_terminal:
        record[NG_TERMINAL_KEY] = True
    if failure.usage is not None:
        record[USAGE_KEY_NAME] = failure.usage
    if failure.partial_response is not None:
        record[PARTIAL_RESPONSE_KEY] = failure.partial_response
        if failure.failed_in is not None:
            record[FAILED_IN_KEY] = failure.failed_in
    record[STARTED_AT_KEY] = utc_text(started_at)
    record[ENDED_AT_KEY] = utc_text(ended_at)
    return stamp(row, record)


def unscored_response(failure: Mapping[str, Any]) -> dict[str, Any] | None:
    """The whole response in the sidecar line of a rollout that failed only when it was to be scored; else None."""
    if failure.get(NG_FAILURE_CLASS_KEY) == FailureClass.JUDGE_FAILED and isinstance(
        failure.get(RESPONSE_KEY_NAME), dict
    ):
        whole: dict[str, Any] = failure[RESPONSE_KEY_NAME]
        return whole
    partial = failure.get(PARTIAL_RESPONSE_KEY)
    is_whole = failure.get(FAILED_IN_KEY) == VERIFY and isinstance(partial, dict) and LEFT_OUT not in partial
    return partial if is_whole else None


def utc_text(moment: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_text_of(seconds: float) -> str:
    """The same of a time in seconds since the epoch."""
    whole = int(seconds)
    microseconds = round((seconds - whole) * 1_000_000)  # as `datetime` rounds
    if microseconds == 1_000_000:
        whole, microseconds = whole + 1, 0
    return f"{_text_of_second(whole)}.{microseconds // 1000:03d}Z"


@lru_cache(64)
def _text_of_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


class SeenFilter:
    """Tells, for hashes that come one after the other, which may have come before.

    It never misses one. For a number of hashes as announced it is wrong about one in a hundred.
    """

    def __init__(self, expected: int) -> None:
        self._mask = (1 << (expected * 8).bit_length() + 3) - 1
        self._bits = bytearray((self._mask + 1) // 8)

    def came_before(self, hashed: int) -> bool:
        """Whether `hashed` may have been asked about before."""
        position = hashed & self._mask
        byte, bit = position >> 3, 1 << (position & 7)
        if self._bits[byte] & bit:
            return True
        self._bits[byte] |= bit
        return False


class IntSet:
    """A set of integers from 0 to 2^64 - 2 that can only grow: open addressing in one flat array."""

    def __init__(self) -> None:
        self._bits = _FIRST_BITS
        self._table = _empty_table(self._bits)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, value: int) -> bool:
        return self._size > 0 and self._table[self._slot_of(value + 1)] != 0

    def add(self, value: int) -> bool:
        """Put `value` in; False when it was there already."""
        if not 0 <= value <= _LARGEST:
            raise ValueError(f"{value} does not fit into 64 bits")
        stored = value + 1  # 0 marks an empty slot
        slot = self._slot_of(stored)
        if self._table[slot]:
            return False
        self._table[slot] = stored
        self._size += 1
        if self._size * 3 > len(self._table) * 2:
            self._grow()
        return True

    def _slot_of(self, stored: int) -> int:
        """Where `stored` is, or the empty slot where it would be."""
        table = self._table
        slot = (stored * _MIX & _SIXTY_FOUR_BITS) >> (64 - self._bits)
        found = table[slot]
        while found and found != stored:
            slot = slot + 1 & len(table) - 1
            found = table[slot]
        return slot

    def _grow(self) -> None:
        old = self._table
        self._bits += 1
        self._table = _empty_table(self._bits)
        for stored in old:
            if stored:
                self._table[self._slot_of(stored)] = stored


class IndexSet:
    """A set of task indices: whole numbers compactly, whatever else a data set uses (text, null) as it is."""

    def __init__(self) -> None:
        self._integers = IntSet()
        self._others: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._integers) + len(self._others)

    def __contains__(self, index: Any) -> bool:
        return index in self._integers if _fits(index) else index in self._others

    def add(self, index: Any) -> bool:
        """Put `index` in; False when it was there already."""
        if _fits(index):
            return self._integers.add(index)
        if index in self._others:
            return False
        self._others.add(index)
        return True


class KeySet:
    """A set of rollout keys."""

    def __init__(self) -> None:
        self._packed = IntSet()
        self._others: set[tuple[Any, Any]] = set()

    def __len__(self) -> int:
        return len(self._packed) + len(self._others)

    def __contains__(self, key: tuple[Any, Any]) -> bool:
        packed = _pack(key)
        return key in self._others if packed is None else packed in self._packed

    def add(self, key: tuple[Any, Any]) -> bool:
        """Put `key` in; False when it was there already."""
        packed = _pack(key)
        if packed is not None:
            return self._packed.add(packed)
        if key in self._others:
            return False
        self._others.add(key)
        return True


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For building a long list of rows: looking for garbage among them takes several times as long as parsing them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _empty_table(bits: int) -> "array[int]":
    return array("Q", (0,)) * (1 << bits)


def _fits(index: Any) -> bool:
    return type(index) is int and 0 <= index <= _LARGEST


def _pack(key: tuple[Any, Any]) -> int | None:
    task, rollout = key
    if type(task) is int and type(rollout) is int and 0 <= task < _TASK_LIMIT and 0 <= rollout < _ROLLOUT_LIMIT:
        return task << _ROLLOUT_BITS | rollout
    return None
