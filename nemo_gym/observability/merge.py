"""What was captured of a rollout, put into its record: the calls with their sums, and gaps for what is missing."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.keys import CAPTURE_KEY, OBSERVATIONS_KEY
from nemo_gym.observability.calls import PAYLOADS, ModelCallRecord, call_fields, summed
from nemo_gym.observability.store import CaptureStore
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import AgentObservationBundle, join_model_call_observations

logger = logging.getLogger(__name__)

_NO_RECORDS = "model_call_capture_no_records"
_RECORDS_UNREADABLE = "model_call_capture_records_unreadable"
_INCOMPLETE = "model_call_capture_incomplete"
_UNREADABLE = "model_call_capture_unreadable"
_JOIN_FAILED = "agent_observation_join_failed"
_COMPACTION_JOIN_FAILED = "compaction_model_call_join_failed"


def gap(code: str, detail: str | None = None) -> dict[str, Any]:
    """Something that could not be observed, as records have it."""
    return {"code": code} if detail is None else {"code": code, "detail": detail}


def merge_model_call_capture_into_record(
    record: dict[str, Any],
    capture_dirs: Iterable[Path],
    *,
    include_payloads: bool = False,
    rollout_id: str | None = None,
) -> dict[str, Any]:
    """Put what was captured of a rollout into its record, which is returned; whatever is wrong with it is a gap there.

    `rollout_id` is that of the record, if it is known. What was asked and said is left out without `include_payloads`.
    """
    if rollout_id is None:
        rollout_id = rollout_id_of(record)
    folders = list(capture_dirs)
    if rollout_id is None or not folders:
        return record
    calls, gaps = _captured(rollout_id, folders)
    observations = record.get(OBSERVATIONS_KEY)
    if observations is not None:
        _join(record, observations, calls, gaps)
    if not include_payloads:
        for call in calls:
            without_payloads(call)
    capture: dict[str, Any] = {"rollout_id": rollout_id, "metrics": summed(calls), "calls": calls}
    record[CAPTURE_KEY] = {**capture, "gaps": gaps} if gaps else capture
    return record


def without_payloads(call: dict[str, Any]) -> None:
    """Take out of a call what was asked and said."""
    for name in PAYLOADS:
        call.pop(name, None)


def rollout_id_of(record: Mapping[str, Any]) -> str | None:
    """The id of the rollout of a record or row; None if it has none that can be part of a path."""
    try:
        return maybe_rollout_id_from_run_body(record)
    except ValueError as error:
        logger.warning("what was captured of a rollout is not looked for: %s", error)
        return None


def _captured(rollout_id: str, folders: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    for folder in folders:
        store = CaptureStore(folder)
        try:
            found, damaged = store.read_available(rollout_id)
            is_incomplete = store.is_incomplete(rollout_id)
        except (OSError, ValueError) as error:
            gaps.append(gap(_UNREADABLE, type(error).__name__))
            continue
        calls += [call_fields(exchange, index) for index, exchange in found]
        if damaged:
            gaps.append(gap(_RECORDS_UNREADABLE, f"count={damaged}"))
        if is_incomplete:
            gaps.append(gap(_INCOMPLETE))
    if not calls and not gaps:
        gaps.append(gap(_NO_RECORDS))
    return calls, gaps


def _join(record: dict[str, Any], observations: Any, calls: list[dict[str, Any]], gaps: list[dict[str, Any]]) -> None:
    """Let what an agent observed refer to the calls that were captured."""
    try:
        bundle = AgentObservationBundle.model_validate(observations)
    except ValueError as error:
        gaps.append(gap(_JOIN_FAILED, type(error).__name__))
        return
    try:
        names = [{name: value for name, value in call.items() if name not in PAYLOADS} for call in calls]
        joined = join_model_call_observations(bundle, [ModelCallRecord.model_validate(call) for call in names])
    except ValueError as error:
        has_compactions = any(each.kind == "context_compaction" for each in bundle.records)
        gaps.append(gap(_COMPACTION_JOIN_FAILED if has_compactions else _JOIN_FAILED, type(error).__name__))
        return
    record[OBSERVATIONS_KEY] = joined.model_dump(mode="json")
