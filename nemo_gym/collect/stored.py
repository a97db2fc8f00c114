"""Responses that are on disk already, found again by their rollout: those of finished ones, and of those that failed
only when they were to be scored.

Nothing of a response is kept in memory: a rollout costs some 70 bytes here, and is read again when it is its turn.
"""

from array import array
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from nemo_gym.errors import ConfigError
from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSE_KEY_NAME, TIMING_KEY_NAME
from nemo_gym.runs.facts import RolloutFilter, times_of
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import RecordIndex, RecordReader
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.runs.read import plain_records, records
from nemo_gym.runs.record import (
    FAILURE_MESSAGE_KEY,
    NG_FAILURE_CLASS_KEY,
    PREVIOUS_VERDICT_KEY,
    STARTED_AT_KEY,
    FailureClass,
    KeySet,
    Result,
    Row,
    agent_name_of,
    plain_key,
    unscored_response,
)
from nemo_gym.runs.rows import Repeats

_ROLLOUT_BITS = 24
_NOT_OF_A_VERDICT = frozenset({RESPONSE_KEY_NAME, TIMING_KEY_NAME, AGENT_REF_KEY_NAME, PREVIOUS_VERDICT_KEY})
_OURS = ("_ng", "ng_")
_OF_FAILURES = (NG_FAILURE_CLASS_KEY, FAILURE_MESSAGE_KEY)


class Stored(NamedTuple):
    """One record with the response in it."""

    record: Result
    response: dict[str, Any]
    is_failure: bool

    def verdict(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the record says beside its row: the reward and what the environment had to say about it."""
        if self.is_failure:
            return {key: self.record[key] for key in _OF_FAILURES if key in self.record}
        told = self.record.items()
        return {key: value for key, value in told if not (key in row or key in _NOT_OF_A_VERDICT or key[:3] in _OURS)}

    def added(self) -> dict[str, Any]:
        """What agent and collector added to the verdict, and no environment repeats: observations, why it stopped."""
        return {key: value for key, value in self.record.items() if key.startswith("ng_")}

    def times(self) -> dict[str, Any]:
        """When the rollout was made, and how long that took; empty if nobody knows."""
        timing, took = self.record.get(TIMING_KEY_NAME), times_of(self.record)[0]
        if isinstance(timing, dict) and timing:
            return timing
        if not self.is_failure or took is None:
            return {}
        return {"started_at": self.record[STARTED_AT_KEY], "duration_s": round(took, 6)}


class StoredResponses(AbstractContextManager["StoredResponses"]):
    """The rollouts of one run that have a response: `with StoredResponses(paths) as stored:`."""

    def __init__(
        self,
        paths: RolloutPaths,
        *,
        finished: bool = True,
        classes: frozenset[str] | None = None,
        only_failures: bool = False,
    ) -> None:
        """Read the rollouts, if `finished`, and the failures, of these classes only where any are named.

        With `only_failures` the rollouts are not even looked at: whether there is a verdict by now is not known then.

        Raises:
            ConfigError: a line of the rollouts is no record.
        """
        self._index = RecordIndex([paths.rollouts, paths.failures])
        self._packed, self._numbers = array("q"), array("q")
        self._odd: dict[tuple[Any, Any], int] = {}
        self.done = KeySet()
        """The rollouts that have a verdict."""
        self.without_response = 0
        """Those among them that have no response beside it."""
        for key, line, record in () if only_failures else plain_records(paths.rollouts, "raise"):
            assert key is not None
            if self.done.add(key) and finished:
                if isinstance(record.get(RESPONSE_KEY_NAME), dict):
                    self._add(key, line, record, 0)
                else:
                    self.without_response += 1
        self.unscored = KeySet()
        """The rollouts that failed only when they were to be scored."""
        for key, line, record in plain_records(paths.failures, "skip"):
            assert key is not None
            is_wanted = classes is None or record.get(NG_FAILURE_CLASS_KEY) in classes
            if is_wanted and key not in self.done and unscored_response(record) is not None:
                self.unscored.add(key)
                self._add(key, line, record, 1)
        order = np.argsort(np.frombuffer(self._packed, np.int64), kind="stable") if self._packed else np.empty(0, int)
        self._sorted = np.frombuffer(self._packed, np.int64)[order] if self._packed else np.empty(0, np.int64)
        self._number_at = np.frombuffer(self._numbers, np.int64)[order] if self._packed else np.empty(0, np.int64)
        self._reader = RecordReader(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return self._number_of(row) is not None

    def agents(self) -> list[str]:
        """The names of the agents that made the rollouts."""
        return [agent for agent in self._index.agents if agent is not None]

    def find(self, row: Mapping[str, Any]) -> Stored | None:
        """What there is of the rollout of a row; of several failed attempts the last one."""
        number = self._number_of(row)
        if number is None:
            return None
        record = self._reader.record(number)
        is_failure = self._index.files[number] == 1
        response = unscored_response(record) if is_failure else record.get(RESPONSE_KEY_NAME)
        return Stored(record, response or {}, is_failure)

    def _number_of(self, row: Mapping[str, Any]) -> int | None:
        key = plain_key(row)
        packed = None if key is None else _packed(key)
        if packed is None:
            return None if key is None else self._odd.get(key)
        place = int(np.searchsorted(self._sorted, packed, side="right")) - 1
        return int(self._number_at[place]) if place >= 0 and self._sorted[place] == packed else None

    def _add(self, key: tuple[Any, Any], line: Any, record: Result, file: int) -> None:
        number = len(self._index)
        self._index.add(key, line, record, file)
        packed = _packed(key)
        if packed is None:
            self._odd[key] = number
        else:
            self._packed.append(packed)
            self._numbers.append(number)


def _packed(key: tuple[Any, Any]) -> int | None:
    task, rollout = key
    fits = type(task) is int and type(rollout) is int and 0 <= task < 2**38 and 0 <= rollout < 2**_ROLLOUT_BITS
    return task << _ROLLOUT_BITS | rollout if fits else None


class ChosenRows:
    """The rows of what a reverification is about, in file order; each iteration reads the files again."""

    def __init__(self, config: RolloutReverificationConfig, stored: StoredResponses) -> None:
        """What `where` and `limit` leave of them is to be scored; verdicts that are kept are in the output, too."""
        self._config, self._stored = config, stored
        self.to_score = KeySet()
        self.repeats: dict[str, int] = {}
        """The most rollouts of a task, by agent."""

    def choose(self) -> None:
        """Find out which rollouts are to be scored.

        Raises:
            ConfigError: a rollout that is to be scored has no row, or no row has what `where` asks about.
        """
        config, stored = self._config, self._stored
        where = None if config.where is None else RolloutFilter(config.where)
        matched = matched_failures = 0
        for key, _, row in records(config.materialized_inputs, "raise"):
            matched += key in stored.done
            matched_failures += key in stored.unscored
            if row not in stored:
                continue
            found = stored.find(row) if where is not None else None
            is_wanted = where is None or (found is not None and where.holds(found.record, row))
            if is_wanted and (config.limit is None or len(self.to_score) < config.limit):
                self.to_score.add(key)
        if where is not None:
            where.require_met()
        failures = RolloutPaths(config.rollouts).failures
        for count, of_file, path in (
            (matched, stored.done, config.rollouts),
            (matched_failures, stored.unscored, failures),
        ):
            if count < len(of_file):
                raise ConfigError(
                    f"{len(of_file) - count} of the {len(of_file)} rollouts of {path} have no row in "
                    f"{config.materialized_inputs}: name the rows of this run with +materialized_inputs_jsonl_fpath"
                )

    def __iter__(self) -> Iterator[Repeats]:
        """What will be in the output, as lines of its materialized file."""
        keeps = self._config.keeps_verdicts
        for key, line, row in records(self._config.materialized_inputs, "raise"):
            if key in self.to_score or (keeps and key in self._stored.done):
                agent = agent_name_of(row) or ""
                self.repeats[agent] = max(self.repeats.get(agent, 0), key.rollout_index + 1)
                yield Repeats(agent, key.rollout_index, [line.content + b"\n"])

    def agents(self) -> set[str]:
        """Whose rollouts are to be scored."""
        rows = records(self._config.materialized_inputs, "raise")
        return {agent_name_of(row) or "" for key, _, row in rows if key in self.to_score}


def classes_wanted(config: RolloutReverificationConfig) -> frozenset[str] | None:
    """The failures that are scored; None: all that have their response."""
    return frozenset({FailureClass.JUDGE_FAILED.value}) if config.judge_failed_only else None


def lines_to_keep(path: Path, present: KeySet) -> Iterator[bytes]:
    """The lines of finished rollouts as they are, once each, but for those that are `present` already."""
    for key, line, _ in plain_records(path, "raise"):
        if key is not None and present.add(key):
            yield line[3] + b"\n"


def scored_again(row: Row, stored: Stored, verdict: Result) -> Result:
    """A verdict as a record: what the agent had added stays, and what was said before stands beside it."""
    for key, value in stored.added().items():
        verdict.setdefault(key, value)
    verdict[PREVIOUS_VERDICT_KEY] = stored.verdict(row)
    return verdict
