"""What was observed of a rollout, folded into its record when it ends: captured model calls and its trajectory."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.jsonl import Unread, parse
from nemo_gym.keys import CAPTURE_KEY, OBSERVATIONS_KEY, OBSERVED_KEYS, TRAJECTORY_KEY
from nemo_gym.observability.store import CaptureStore, clear_in, model_call_capture_dirs_from_config

Row = dict[str, Any]
Post = Callable[[Row], Awaitable[Any]]
_TOLD_BY_AGENTS = frozenset({TRAJECTORY_KEY, OBSERVATIONS_KEY})
_PAYLOADS = ("request", "response", "request_raw", "response_raw")


class Observing:
    """Goes along with rollouts whose model calls are captured, or whose agents tell how they went."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._stores = [CaptureStore(folder) for folder in folders]

    @classmethod
    def of(cls, config: Mapping[Any, Any]) -> "Observing":
        """As the config of a run's servers says.

        Raises:
            ConfigError: calls are to be captured, and it does not say where to.
        """
        return cls(model_call_capture_dirs_from_config(config))

    def begin(self, post: Post) -> Post:
        """`post`, before which what earlier runs have captured of the same rollout is forgotten."""
        if not self._folders:
            return post

        async def posted(row: Row) -> Any:
            clear_in(self._stores, [row])
            return await post(row)

        return posted

    def fold(self, row: Row, record: Row) -> None:
        """Put into the record of a rollout that has ended what was observed of it, if anything was."""
        if not self._folders and _TOLD_BY_AGENTS.isdisjoint(record):
            return
        for key in OBSERVED_KEYS & row.keys():  # the row is a rollout of an earlier run, of which this tells
            if record.get(key) == row[key]:
                del record[key]
        from nemo_gym.observability import merge, trajectories  # runs that observe nothing need none of it
        from nemo_gym.rollout_observability import task_id_of

        rollout_id = merge.rollout_id_of(row)
        if rollout_id is None:
            return
        task_id = task_id_of(row, record)
        if isinstance(account := record.get(TRAJECTORY_KEY), Unread):
            if trajectories.fold_unread(record, self._stores, task_id, rollout_id):
                return
            record[TRAJECTORY_KEY] = parse(account.written)
        with_payloads = trajectories.keeps_history(record)
        merge.merge_model_call_capture_into_record(
            record, self._folders, include_payloads=with_payloads, rollout_id=rollout_id
        )
        trajectories.attach_trajectory(record, task_id, rollout_id)


def without_history(record: Row) -> Row:
    """A record for an experiment tracker: without its trajectory, and what was asked of models and said by them."""
    kept = {name: value for name, value in record.items() if name != TRAJECTORY_KEY}
    capture = kept.get(CAPTURE_KEY)
    calls = capture.get("calls") if isinstance(capture, dict) else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        kept.pop(CAPTURE_KEY, None)
        return kept
    for call in calls:
        for name in _PAYLOADS:
            call.pop(name, None)
    return kept
