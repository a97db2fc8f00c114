"""Rows on their way to the agents and back: what is sent again, how often, and when it is given up.

A row whose request failed in the infrastructure is sent again, up to its budget, without its siblings. So is one
that came back with NaN log-probs, up to a budget of its own. A failure of any other kind dooms the group at once,
unless a group may be partial: then the row is left out as long as enough others remain.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from nemo_gym.rl.failures import (
    FailureClass,
    GymTransportError,
    RolloutDataFailure,
    RolloutFailure,
    classify_rollout_failure,
)
from nemo_gym.rl.samples import MASK_REASON
from nemo_gym.rl.tensors import has_nan
from nemo_gym.runs import record
from nemo_gym.runs.record import Outcome, Result, Row, outcome_of

logger = logging.getLogger(__name__)

ROW_INDEX_KEY = "_rowidx"


class RowDispatch:
    """The rows of one group: those that are back, and those still owed."""

    def __init__(
        self,
        rows: Sequence[Row],
        post_process: Callable[[Result], dict[str, Any]],
        *,
        max_sends: int,
        max_nan_runs: int,
        min_rows: int | None = None,
    ) -> None:
        """`min_rows` are to come back; without a number, all of them."""
        self._rows = list(rows)
        self._post_process = post_process
        self._max_sends = max_sends
        self._max_nan_runs = max_nan_runs
        self._min_rows = len(self._rows) if min_rows is None else min_rows
        self._left_out = 0
        self._results: dict[int, dict[str, Any]] = {}
        self._lost: Counter[int] = Counter()
        self._nan_runs: Counter[int] = Counter()
        self._last_loss: Exception | None = None
        _check_indices(self._rows)

    @property
    def owed(self) -> list[Row]:
        """The rows that are to be sent now."""
        return [row for row in self._rows if row[ROW_INDEX_KEY] not in self._results]

    @property
    def redispatches(self) -> int:
        """Rows sent again because they never came back."""
        return sum(min(count, self._max_sends - 1) for count in self._lost.values())

    @property
    def nan_retries(self) -> int:
        """Rows sent again because of NaN log-probs."""
        return self._nan_runs.total()

    def arrived(self, row: Row, result: Result) -> None:
        """Take a result in.

        Raises:
            RolloutFailure: it cannot be used, and the row is not to be sent again.
        """
        failure = _reported_failure(row, result)
        if failure is not None:
            self.failed(row, failure)
            return
        try:
            processed = self._post_process(result)
        except RolloutDataFailure as error:
            self._leave_out(row, type(error)(f"row {row[ROW_INDEX_KEY]}: {error}"), error)
            return
        if any(map(has_nan, [processed["message_log"], *processed.get("branches", ())])):
            self._note_nan(row)
        else:
            self._results[row[ROW_INDEX_KEY]] = processed

    def failed(self, row: Row, error: Exception) -> None:
        """Note that a row did not come back.

        Raises:
            RolloutFailure: it is not to be sent again.
        """
        if classify_rollout_failure(error) is FailureClass.DATA:
            failure = RolloutDataFailure(f"row {row[ROW_INDEX_KEY]} failed: {_words(error)}")
            self._leave_out(row, failure, error)
            return
        index = row[ROW_INDEX_KEY]
        self._lost[index] += 1
        self._last_loss = error
        if self._lost[index] >= self._max_sends:
            self._leave_out(row, self.never_came_back(f"after {self._lost[index]} dispatches"), error)
            return
        logger.warning("row %d did not come back and is sent again: %s", index, _words(error))

    def never_came_back(self, when: str) -> GymTransportError:
        """An error that names every row still owed."""
        missing = [row[ROW_INDEX_KEY] for row in self.owed]
        last = "" if self._last_loss is None else f"; the last of them failed with {_words(self._last_loss)}"
        return GymTransportError(f"rows {missing} of {len(self._rows)} never came back {when}{last}")

    def results(self) -> list[dict[str, Any]]:
        """What came back, in row order."""
        return [self._results[index] for index in range(len(self._rows))]

    def _note_nan(self, row: Row) -> None:
        index = row[ROW_INDEX_KEY]
        if self._nan_runs[index] + 1 >= self._max_nan_runs:
            failure = RolloutDataFailure(
                f"row {index} came back with NaN log-probs {self._nan_runs[index] + 1} times; look for overflow in the "
                "policy's logits, or raise rollout_max_attempts_to_avoid_lp_nan"
            )
            self._leave_out(row, failure)
            return
        self._nan_runs[index] += 1
        logger.warning("row %d came back with NaN log-probs and is sent again", index)

    def _leave_out(self, row: Row, failure: RolloutFailure, cause: Exception | None = None) -> None:
        """Go on without a row.

        Raises:
            RolloutFailure: too few would be left.
        """
        self._left_out += 1
        if len(self._rows) - self._left_out < self._min_rows:
            raise failure from cause
        logger.warning("a row is left out of its group, which may do without it: %s", failure)
        empty: dict[str, Any] = {"message_log": [], "input_message_log": [], "full_result": None}
        self._results[row[ROW_INDEX_KEY]] = {**empty, MASK_REASON: str(failure)}


def _check_indices(rows: Sequence[Row]) -> None:
    if not rows:
        raise ValueError("there are no rows to run; pass at least one")
    indices = [row.get(ROW_INDEX_KEY) for row in rows]
    if indices != list(range(len(rows))):
        raise ValueError(f"the rows have the {ROW_INDEX_KEY} {indices}; it must be each row's own position")


def _reported_failure(row: Row, result: Mapping[str, Any]) -> RolloutFailure | None:
    """The failure that an agent reports in place of a result."""
    if not isinstance(result, dict):
        return RolloutDataFailure(f"the agent answered with {type(result).__name__}, not with an object")
    outcome = outcome_of(result)
    if outcome is Outcome.SUCCESS:
        return None
    name = result.get(record.NG_FAILURE_CLASS_KEY)
    words = f"the agent reported {name!r}: {result.get(record.FAILURE_MESSAGE_KEY) or 'no message'}"
    if outcome is Outcome.DISCARDED:
        return GymTransportError(f"the agent was cut short from outside; {words}")
    known = {kind.value: kind for kind in record.FailureClass}
    is_infra = name in known and known[name].is_infrastructure
    return GymTransportError(words) if is_infra else RolloutDataFailure(words)


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError | RolloutFailure):
        return str(error)
    return f"{type(error).__name__}: {error}"
