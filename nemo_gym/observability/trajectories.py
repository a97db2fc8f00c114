"""One shape for every rollout as it went: the agent's own account, what it observed, and the calls that were captured.

What was captured counts for more than what an agent says of the same call, and an observed time of a tool for more than
the agent's. What nobody can tell is a gap in the trajectory. One that cannot be made leaves the rollout as it is.

The captured calls themselves go into the record, too, with their sums, and gaps for what is missing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.keys import CAPTURE_KEY, OBSERVATIONS_KEY, OBSERVED_KEYS, TRAJECTORY_KEY
from nemo_gym.observability.calls import ModelCallRecord, call_fields, summed
from nemo_gym.observability.store import PAYLOADS, CaptureStore
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ModelCallRef,
    ObservationGap,
    TrajectoryRecord,
    TrajectoryToolCall,
    TrajectoryTurn,
    join_model_call_observations,
)

logger = logging.getLogger(__name__)

_NO_RECORDS = "model_call_capture_no_records"
_RECORDS_UNREADABLE = "model_call_capture_records_unreadable"
_INCOMPLETE = "model_call_capture_incomplete"
_UNREADABLE = "model_call_capture_unreadable"
_JOIN_FAILED = "agent_observation_join_failed"
_COMPACTION_JOIN_FAILED = "compaction_model_call_join_failed"
Fields = dict[str, Any]
_UNKNOWN = "unknown"
_REDACTED = "multimodal_history_redacted"
_UNNAMED = b'{"model_call_id":null,'
_BEFORE_TOOLS = b'],"model_calls":[],"tool_calls":['
_SILENT = b'],"conversation":[]'


def keeps_history(record: Mapping[str, Any]) -> bool:
    """Whether what was asked and said may be kept: not if the agent says that it took something out of it."""
    for key in (TRAJECTORY_KEY, OBSERVATIONS_KEY):
        gaps = (record.get(key) or {}).get("gaps") if isinstance(record.get(key), dict) else None
        if any(isinstance(each, dict) and each.get("code") == _REDACTED for each in gaps or ()):
            return False
    return True


def attach_trajectory(record: Fields, task_id: str, rollout_id: str) -> None:
    """Give a record that has anything of the kind its trajectory."""
    if not any(record.get(key) is not None for key in OBSERVED_KEYS):
        return
    try:
        trajectory = trajectory_of(record, task_id, rollout_id)
    except Exception as error:  # noqa: BLE001 - it is made of what agents say; the rollout counts without it
        logger.warning("rollout %s has no trajectory: %r", rollout_id, error)
        _note_failure(record, gap("trajectory_projection_failed", type(error).__name__), task_id, rollout_id)
        return
    record[TRAJECTORY_KEY] = trajectory
    capture = record.get(CAPTURE_KEY)
    for call in capture.get("calls") or () if isinstance(capture, dict) else ():
        without_payloads(call)


def _note_failure(record: Fields, why: Fields, task_id: str, rollout_id: str) -> None:
    record.pop(TRAJECTORY_KEY, None)
    for key in (CAPTURE_KEY, OBSERVATIONS_KEY):
        if isinstance(record.get(key), dict):
            record[key]["gaps"] = [*(record[key].get("gaps") or ()), why]
            return
    record[TRAJECTORY_KEY] = _shape(task_id, rollout_id, gaps=[_whole_gap(why)])


def _shape(task_id: str, rollout_id: str, **fields: list[Fields]) -> Fields:
    names = ("invocations", "turns", "model_calls", "tool_calls", "gaps")
    head = {"schema_version": "1.0", "task_id": task_id, "rollout_id": rollout_id}
    return {**head, **{name: fields.get(name) or [] for name in names}}


def trajectory_of(record: Mapping[str, Any], task_id: str, rollout_id: str) -> Fields:
    """The trajectory of a record, in the shape of `TrajectoryRecord`."""
    gaps: list[Fields] = []
    producer = _producer(record.get(TRAJECTORY_KEY), task_id, rollout_id, gaps)
    observed = _observed(record.get(OBSERVATIONS_KEY), gaps)
    calls = _model_calls(producer["model_calls"], _captured(record.get(CAPTURE_KEY), gaps))
    known = {each["invocation_id"] for each in producer["invocations"]}
    invocations = [
        *producer["invocations"],
        *(each for each in _of_kind(observed, "agent_invocation") if each["invocation_id"] not in known),
    ]
    tools = _tool_calls(producer["tool_calls"], _of_kind(observed, "tool_call"), _outputs(invocations))
    turns = sorted(producer["turns"], key=lambda turn: (turn["timestamp"], turn["invocation_id"], turn["turn_no"]))
    _name_calls([*turns, *invocations], calls)
    is_silent = not any(each["conversation"] for each in invocations)
    lacking = {
        "model_calls_unavailable": not calls,
        "turns_unavailable": not turns,
        "conversation_unavailable": is_silent,
    }
    gaps += [gap(code) for code, is_so in lacking.items() if is_so]
    unique = {(each["code"], each["invocation_id"], each["detail"]): each for each in map(_whole_gap, gaps)}
    made: dict[str, list[Fields]] = {
        "invocations": invocations,
        "turns": turns,
        "model_calls": calls,
        "tool_calls": tools,
        "gaps": list(unique.values()),
    }
    return _shape(task_id, rollout_id, **made)


def _producer(given: Any, task_id: str, rollout_id: str, gaps: list[Fields]) -> Fields:
    """The agent's own account, under the name that the rollout has."""
    if given is None:
        return _shape(task_id, rollout_id)
    account: Fields = given
    if not _is_spelt_out(given):
        try:
            account = TrajectoryRecord.model_validate(given).model_dump(mode="json")
        except ValueError as error:
            gaps.append(gap("producer_trajectory_invalid", type(error).__name__))
            return _shape(task_id, rollout_id)
    names = {"rollout_id": rollout_id, "task_id": task_id}
    other = [name for name, value in names.items() if account[name] != value]
    if other:
        gaps.append(gap("producer_trajectory_identity_mismatch", ",".join(other)))
        for turn in account["turns"]:
            turn |= names
    gaps += account["gaps"]
    return account


def _is_spelt_out(given: Any) -> bool:
    """Whether an account is plainly one, every field of it written out: then it need not be read and written again.

    Checks what the rest relies on. What is not plain is left to the types.
    """
    if type(given) is not dict or given.keys() != _FIELDS_OF_RECORD or given["schema_version"] != "1.0":
        return False
    if given["model_calls"] or not isinstance(given["task_id"], str) or not isinstance(given["rollout_id"], str):
        return False
    for name, fields in _FIELDS.items():
        if type(given[name]) is not list:
            return False
        for part in given[name]:
            if type(part) is not dict or part.keys() != fields or not all(_KINDS[key](part[key]) for key in fields):
                return False
    turns = {(turn["invocation_id"], turn["turn_no"]) for turn in given["turns"]}
    return len(turns) == len(given["turns"]) and len(given["invocations"]) == 1


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_text_or_null(value: Any) -> bool:
    return value is None or type(value) is str


def _is_number_or_null(value: Any) -> bool:
    return value is None or (type(value) is float and value >= 0)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_objects(value: Any) -> bool:
    return type(value) is list and all(type(each) is dict for each in value)


def _are_refs(value: Any) -> bool:
    return _are_objects(value) and all(each.keys() == _FIELDS_OF_REF and each["response_id"] for each in value)


def _is_anything(value: Any) -> bool:
    return True


_KINDS: dict[str, Callable[[Any], bool]] = {
    "kind": _is_text,
    "invocation_id": _is_text_or_null,
    "parent_invocation_id": _is_text_or_null,
    "spawned_by_tool_call_id": _is_text_or_null,
    "status": frozenset({"completed", "failed", "incomplete", "unknown"}).__contains__,
    "duration_ms": _is_number_or_null,
    "error_type": _is_text_or_null,
    "model_calls": _are_refs,
    "conversation": _are_objects,
    "task_id": _is_text,
    "rollout_id": _is_text,
    "turn_no": _is_count,
    "timestamp": lambda value: type(value) is float,
    "question": _is_anything,
    "answer": _is_anything,
    "reasoning_content": _is_anything,
    "resolved": lambda value: value is None or type(value) is bool,
    "step_count": _is_count,
    "tool_call_id": _is_text,
    "sandbox_id": _is_text_or_null,
    "tool_name": _is_text_or_null,
    "started_at": _is_number_or_null,
    "completed_at": _is_number_or_null,
    "timing_source": lambda value: value == "executor",
    "output": _is_anything,
    "code": _is_text,
    "detail": _is_text_or_null,
}
_FIELDS_OF_RECORD = TrajectoryRecord.model_fields.keys()
_FIELDS_OF_REF = ModelCallRef.model_fields.keys()
_FIELDS = {
    "invocations": AgentInvocation.model_fields.keys(),
    "turns": TrajectoryTurn.model_fields.keys(),
    "tool_calls": TrajectoryToolCall.model_fields.keys(),
    "gaps": ObservationGap.model_fields.keys(),
}


def _observed(given: Any, gaps: list[Fields]) -> list[Fields]:
    if given is None:
        return []
    try:
        bundle = AgentObservationBundle.model_validate(given).model_dump(mode="json")
    except ValueError as error:
        gaps.append(gap("agent_observations_invalid", type(error).__name__))
        return []
    gaps += bundle["gaps"]
    records: list[Fields] = bundle["records"]
    return records


def _captured(capture: Any, gaps: list[Fields]) -> list[Fields]:
    if not isinstance(capture, dict):
        return []
    for each in capture.get("gaps") or ():
        try:
            gaps.append(ObservationGap.model_validate(each).model_dump())
        except ValueError:
            gaps.append(gap("model_call_capture_gap_invalid"))
    return [_as_trajectory_call(call) for call in capture.get("calls") or ()]


def _as_trajectory_call(call: Mapping[str, Any]) -> Fields:
    request, response, request_raw, response_raw = (call.get(name) for name in PAYLOADS)
    return _call_with(call, request_raw if request is None else request, response_raw if response is None else response)


def _call_with(call: Mapping[str, Any], request: Any, response: Any) -> Fields:
    get = call.get
    return {
        "model_call_id": get("model_call_id"),
        "started_at": get("started_at"),
        "completed_at": get("completed_at"),
        "duration_ms": get("latency_total_ms"),
        "request": request,
        "response": response,
        "response_metadata": {
            "response_id": get("response_id"),
            "model_ref": get("model_ref"),
            "model": get("model"),
            "dialect": get("dialect"),
            "status_code": get("status_code"),
            "response_status": get("response_status"),
            "finish_reason": get("finish_reason"),
            "error_category": get("error_category"),
            "latency_ttft_ms": get("latency_ttft_ms"),
        },
        "token_stats": {
            "prompt_tokens": get("tokens_in"),
            "completion_tokens": get("tokens_out"),
            "reasoning_tokens": get("tokens_reasoning"),
            "total_tokens": get("tokens_total"),
            "cached_tokens": get("cached_tokens"),
        },
    }


def _model_calls(told: list[Fields], captured: list[Fields]) -> list[Fields]:
    """What was captured, completed by what the agent tells of the same calls, and its other calls."""
    by_id = {call["model_call_id"]: call for call in told if call["model_call_id"] is not None}
    merged = [_filled(call, by_id.pop(call["model_call_id"], None)) for call in captured]
    left = {id(call) for call in by_id.values()}
    return merged + [call for call in told if call["model_call_id"] is None or id(call) in left]


def _filled(call: Fields, other: Fields | None) -> Fields:
    """A call with fields of another where it has none."""
    if other is None:
        return call
    filled = {}
    for name, value in call.items():
        is_nested = isinstance(value, dict) and name in ("response_metadata", "token_stats")
        filled[name] = _filled(value, other[name]) if is_nested else other.get(name) if value is None else value
    return filled


def _of_kind(records: Iterable[Fields], kind: str) -> list[Fields]:
    return [record for record in records if record["kind"] == kind]


def _outputs(invocations: Iterable[Mapping[str, Any]]) -> Fields:
    """What tools said, by the ids of their calls."""
    items = (item for each in invocations for item in each["conversation"])
    return {item["call_id"]: item.get("output") for item in items if item.get("type") == "function_call_output"}


def _tool_calls(told: list[Fields], observed: list[Fields], outputs: Mapping[str, Any]) -> list[Fields]:
    merged = {(call["invocation_id"], call["tool_call_id"]): call for call in told}
    for call in observed:
        key = call["invocation_id"], call["tool_call_id"]
        known = merged.get(key, {"output": None})
        says = {name: value for name, value in call.items() if value is not None or name not in known}
        if says.get("status") == _UNKNOWN and known.get("status") not in (None, _UNKNOWN):
            del says["status"]
        merged[key] = {**known, **says}
    for call in merged.values():
        if call.get("output") is None:
            call["output"] = outputs.get(call["tool_call_id"])
    return list(merged.values())


def _name_calls(referring: Iterable[Fields], calls: list[Fields]) -> None:
    """Let references by server and response name the call itself, too, where there is exactly one."""
    named: dict[tuple[Any, Any], list[Any]] = {}
    for call in calls:
        about = call["response_metadata"]
        server = (about["model_ref"] or {}).get("name")
        named.setdefault((server, about["response_id"]), []).append(call["model_call_id"])
    for each in referring:
        for ref in each["model_calls"]:
            fits = named.get(((ref["model_ref"] or {}).get("name"), ref["response_id"]), ())
            if ref["model_call_id"] is None and len(fits) == 1:
                ref["model_call_id"] = fits[0]


def _whole_gap(given: Mapping[str, Any]) -> Fields:
    return {name: given.get(name) for name in ("code", "invocation_id", "detail")}


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
    calls, gaps = _calls_kept_of(rollout_id, folders)
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


def _calls_kept_of(rollout_id: str, folders: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
