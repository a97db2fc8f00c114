"""PUBLIC: what agents can tell about a rollout: who called which model, which tools ran, what went missing.

Agents return an `AgentObservationBundle` or a `TrajectoryRecord` with their result. A model call is
named by its id, or by the server that answered and the id of its response. What could not be observed
is a gap with a code, never an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.config_types import ModelServerRef
from nemo_gym.keys import TASK_INDEX_KEY_NAME, TRAJECTORY_KEY
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseInputItem

__all__ = [
    "TRAJECTORY_KEY",
    "AgentEpisode",
    "AgentInvocation",
    "AgentObservationBundle",
    "AgentObservationRecord",
    "ContextCompactionObservation",
    "ModelCallRef",
    "ObservationGap",
    "ObservationModel",
    "SandboxObservation",
    "ToolCallObservation",
    "TrajectoryModelCall",
    "TrajectoryRecord",
    "TrajectoryResponseMetadata",
    "TrajectoryTokenStats",
    "TrajectoryToolCall",
    "TrajectoryTurn",
    "join_model_call_observations",
    "task_id_of",
]

_TASK_NAMES = ("task_id", "problem_id", "instance_id")

_NotNegative = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]


class ObservationModel(BaseModel):
    """Parent of all of them: unknown fields are refused, assignments checked."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, defer_build=True)


class ModelCallRef(ObservationModel):
    """Names one model call."""

    model_call_id: str | None = None
    model_ref: ModelServerRef | None = None
    response_id: str | None = None

    @model_validator(mode="after")
    def validate_join_key(self) -> "ModelCallRef":
        """A call must be named in one of the two ways."""
        if self.model_call_id is None and (self.model_ref is None or self.response_id is None):
            raise ValueError("a model call is named by model_call_id, or by model_ref and response_id together")
        return self


class TrajectoryTokenStats(ObservationModel):
    """Tokens of one model call; what is unknown is null, not 0."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None
    total_tokens: _Count | None = None
    cached_tokens: _Count | None = None


class TrajectoryResponseMetadata(ObservationModel):
    """What answered, and how it ended."""

    response_id: str | None = None
    model_ref: ModelServerRef | None = None
    model: str | None = None
    dialect: str | None = None
    status_code: int | None = None
    response_status: str | None = None
    finish_reason: str | None = None
    error_category: str | None = None
    latency_ttft_ms: _NotNegative | None = None


class TrajectoryModelCall(ObservationModel):
    """One call of a model."""

    model_call_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: _NotNegative | None = None
    request: Any | None = None
    response: Any | None = None
    response_metadata: TrajectoryResponseMetadata = Field(default_factory=TrajectoryResponseMetadata)
    token_stats: TrajectoryTokenStats = Field(default_factory=TrajectoryTokenStats)


class TrajectoryTurn(ObservationModel):
    """One question to a model and its answer."""

    invocation_id: str
    task_id: str
    rollout_id: str
    turn_no: int = Field(ge=1)
    timestamp: float
    question: Any | None = None
    answer: Any | None = None
    reasoning_content: Any | None = None
    resolved: bool | None = None
    step_count: int = Field(ge=0)
    model_calls: list[ModelCallRef] = Field(default_factory=list)


class AgentInvocation(ObservationModel):
    """One agent at work, or one that another has started."""

    kind: Literal["agent_invocation"] = "agent_invocation"
    invocation_id: str
    parent_invocation_id: str | None = None
    spawned_by_tool_call_id: str | None = None
    status: Literal["completed", "failed", "incomplete", "unknown"] = "unknown"
    duration_ms: _NotNegative | None = None
    error_type: str | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    conversation: list[NeMoGymResponseInputItem] = Field(default_factory=list)


class ToolCallObservation(ObservationModel):
    """One call of a tool, and how long it took."""

    kind: Literal["tool_call"] = "tool_call"
    invocation_id: str
    tool_call_id: str
    sandbox_id: str | None = None
    tool_name: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: _NotNegative | None = None
    timing_source: Literal["executor", "artifact", "harness"] | None = None
    status: Literal["completed", "failed", "timeout", "cancelled", "incomplete", "unknown"] = "unknown"
    error_type: str | None = None

    @model_validator(mode="after")
    def validate_timing(self) -> "ToolCallObservation":
        """Nothing ends before it began."""
        if self.started_at is not None and self.completed_at is not None and self.completed_at < self.started_at:
            raise ValueError(f"completed_at ({self.completed_at}) is before started_at ({self.started_at})")
        return self


class TrajectoryToolCall(ToolCallObservation):
    """The same, with what the tool said."""

    output: Any | None = None


class SandboxObservation(ObservationModel):
    """What a sandbox used, and how it ended."""

    kind: Literal["sandbox"] = "sandbox"
    role: Literal["agent", "verifier", "environment"]
    provider: str | None = None
    sandbox_id: str | None = None
    outcome: Literal["completed", "failed", "timeout", "oom", "sandbox_error", "cancelled", "unknown"] = "unknown"
    exit_code: int | None = None
    wall_time_s: _NotNegative | None = None
    cpu_time_s: _NotNegative | None = None
    peak_memory_mib: _NotNegative | None = None
    resource_usage_source: str | None = None
    error_type: str | None = None


class ContextCompactionObservation(ObservationModel):
    """An agent shortened its conversation."""

    kind: Literal["context_compaction"] = "context_compaction"
    invocation_id: str
    observed_at: float | None = None
    trigger: str | None = None
    tokens_before: _Count | None = None
    tokens_after: _Count | None = None
    outcome: Literal["completed", "failed", "aborted", "unknown"] = "unknown"
    summary: str | None = None
    first_kept_item_id: str | None = None
    before_model_call: ModelCallRef | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    after_model_call: ModelCallRef | None = None


class ObservationGap(ObservationModel):
    """Something that could not be observed."""

    code: str
    invocation_id: str | None = None
    detail: str | None = None


AgentObservationRecord = Annotated[
    AgentInvocation | ToolCallObservation | ContextCompactionObservation | SandboxObservation,
    Field(discriminator="kind"),
]


class AgentObservationBundle(ObservationModel):
    """All that one agent observed."""

    source: str
    records: list[AgentObservationRecord] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def validate_identity(self) -> "AgentObservationBundle":
        """Invocations have ids of their own, and none is its own ancestor."""
        invocations = [record for record in self.records if isinstance(record, AgentInvocation)]
        _require_unique([each.invocation_id for each in invocations], "invocation_id")
        _require_no_cycle({each.invocation_id: each.parent_invocation_id for each in invocations})
        return self


class TrajectoryRecord(ObservationModel):
    """A whole rollout as it went."""

    schema_version: Literal["1.0"] = "1.0"
    task_id: str
    rollout_id: str
    invocations: list[AgentInvocation] = Field(default_factory=list)
    turns: list[TrajectoryTurn] = Field(default_factory=list)
    model_calls: list[TrajectoryModelCall] = Field(default_factory=list)
    tool_calls: list[TrajectoryToolCall] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def validate_identity(self) -> "TrajectoryRecord":
        """Ids are unique, and every turn is one of this rollout."""
        _require_unique([each.invocation_id for each in self.invocations], "invocation_id")
        _require_unique([each.model_call_id for each in self.model_calls if each.model_call_id], "model_call_id")
        _require_unique([(each.invocation_id, each.turn_no) for each in self.turns], "invocation_id and turn_no")
        strange = [each.turn_no for each in self.turns if not self._owns(each)]
        if strange:
            raise ValueError(f"turns {strange} are of another task or rollout than {self.task_id}, {self.rollout_id}")
        return self

    def _owns(self, turn: TrajectoryTurn) -> bool:
        return (turn.task_id, turn.rollout_id) == (self.task_id, self.rollout_id)


@dataclass(frozen=True)
class AgentEpisode:
    """An agent's answer with what it observed on the way."""

    response: NeMoGymResponse
    observations: AgentObservationBundle


def task_id_of(*sources: Mapping[str, Any]) -> str:
    """The name of a task: its own, else its number."""
    for name in (*_TASK_NAMES, TASK_INDEX_KEY_NAME):
        for source in sources:
            if source.get(name) is not None:
                return str(source[name])
    return "unknown"


def _require_unique(values: list[Any], what: str) -> None:
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{what} must be unique: {', '.join(repeated)}")


def _require_no_cycle(parents: dict[str, str | None]) -> None:
    for start in parents:
        seen, at = {start}, parents[start]
        while at is not None and at in parents:
            if at in seen:
                raise ValueError(f"invocation {start!r} is its own ancestor")
            seen.add(at)
            at = parents[at]


class CapturedCall(Protocol):
    """A model call as the model server recorded it."""

    model_call_id: str | None
    model_ref: ModelServerRef | None
    response_id: str | None
    call_index: int


_UNMATCHED = "model_call_reference_unmatched"
_AMBIGUOUS = "model_call_reference_ambiguous"
_CONFLICT = "model_call_reference_conflict"
_NO_OWNER = "model_call_ownership_unavailable"
_JOIN_GAPS = {_UNMATCHED, _AMBIGUOUS, _CONFLICT, _NO_OWNER}


def join_model_call_observations(
    bundle: AgentObservationBundle, calls: Iterable[CapturedCall]
) -> AgentObservationBundle:
    """A copy of `bundle` whose references to model calls are those that model servers recorded.

    A reference that fits no recorded call, or several, or a call that belongs to another invocation, stays as it
    is, and a gap says so; so does a recorded call that no invocation refers to.
    """
    joined = bundle.model_copy(deep=True)
    join = _Join(list(calls), [gap for gap in joined.gaps if gap.code not in _JOIN_GAPS])
    for record in joined.records:
        if isinstance(record, AgentInvocation):
            record.model_calls = [join.owned(record.invocation_id, ref) for ref in record.model_calls]
    for record in joined.records:
        if isinstance(record, ContextCompactionObservation):
            record.model_calls = [join.of_compaction(record.invocation_id, ref) for ref in record.model_calls]
            record.before_model_call = join.beside(record, "before_model_call")
            record.after_model_call = join.beside(record, "after_model_call")
    join.note_calls_without_owner()
    joined.gaps = list({(gap.code, gap.invocation_id, gap.detail): gap for gap in join.gaps}.values())
    return joined


class _Join:
    """Recorded calls, who refers to them, and what does not fit."""

    def __init__(self, calls: list[CapturedCall], gaps: list[ObservationGap]) -> None:
        self.gaps = gaps
        self._calls = calls
        self._owner: dict[int, str] = {}

    def owned(self, invocation_id: str, ref: ModelCallRef) -> ModelCallRef:
        """The call an invocation says it made, which from now on is its own."""
        position = self._find(ref, invocation_id, _name(ref))
        if position is None:
            return ref
        if position in self._owner:
            return self._gap(_CONFLICT, invocation_id, _name(ref), ref)
        self._owner[position] = invocation_id
        return self._canonical(position)

    def of_compaction(self, invocation_id: str, ref: ModelCallRef) -> ModelCallRef:
        """The call by which an invocation shortened its conversation."""
        detail = f"model_calls:{_name(ref)}"
        position = self._find(ref, invocation_id, detail)
        if position is None:
            return ref
        owner = self._owner.get(position)
        if owner != invocation_id:
            return self._gap(_NO_OWNER if owner is None else _CONFLICT, invocation_id, detail, ref)
        return self._canonical(position)

    def beside(self, record: ContextCompactionObservation, field: str) -> ModelCallRef | None:
        """The call before or after the conversation was shortened."""
        ref: ModelCallRef | None = getattr(record, field)
        if ref is None:
            return None
        detail = f"{field}:{_name(ref)}"
        position = self._find(ref, record.invocation_id, detail)
        if position is None:
            return ref
        if self._owner.get(position, record.invocation_id) != record.invocation_id:
            return self._gap(_CONFLICT, record.invocation_id, detail, ref)
        return self._canonical(position)

    def note_calls_without_owner(self) -> None:
        """A gap for every recorded call that no invocation refers to."""
        for position, call in enumerate(self._calls):
            if position not in self._owner:
                name = call.model_call_id or call.response_id
                detail = f"capture:{name}:call_index={call.call_index}"
                self.gaps.append(ObservationGap(code=_NO_OWNER, detail=detail))

    def _find(self, ref: ModelCallRef, invocation_id: str, detail: str) -> int | None:
        found = [position for position, call in enumerate(self._calls) if _fits(ref, call)]
        if len(found) == 1:
            return found[0]
        self._gap(_AMBIGUOUS if found else _UNMATCHED, invocation_id, detail, ref)
        return None

    def _gap(self, code: str, invocation_id: str, detail: str, ref: ModelCallRef) -> ModelCallRef:
        self.gaps.append(ObservationGap(code=code, invocation_id=invocation_id, detail=detail))
        return ref

    def _canonical(self, position: int) -> ModelCallRef:
        call = self._calls[position]
        return ModelCallRef(model_call_id=call.model_call_id, model_ref=call.model_ref, response_id=call.response_id)


def _fits(ref: ModelCallRef, call: CapturedCall) -> bool:
    """Whether everything a reference says is so."""
    said = [(name, value) for name in ("model_call_id", "model_ref", "response_id") if (value := getattr(ref, name))]
    return all(getattr(call, name) == value for name, value in said)


def _name(ref: ModelCallRef) -> str:
    return str(ref.model_call_id or ref.response_id)
