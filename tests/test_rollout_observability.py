from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.config_types import ModelServerRef
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ContextCompactionObservation,
    ModelCallRef,
    ObservationGap,
    ToolCallObservation,
    TrajectoryRecord,
    TrajectoryTurn,
    join_model_call_observations,
)

POLICY = ModelServerRef(type="responses_api_models", name="policy")


@dataclass
class Call:
    model_call_id: str | None
    call_index: int
    model_ref: ModelServerRef | None = field(default_factory=lambda: POLICY)
    response_id: str | None = None


def invocation(name: str, *calls: ModelCallRef, parent: str | None = None) -> AgentInvocation:
    return AgentInvocation(invocation_id=name, parent_invocation_id=parent, model_calls=list(calls))


def bundle(*records: Any, **more: Any) -> AgentObservationBundle:
    return AgentObservationBundle(source="pi", records=list(records), **more)


def turn(number: int, rollout: str = "0-0") -> TrajectoryTurn:
    return TrajectoryTurn(
        invocation_id="root", task_id="0", rollout_id=rollout, turn_no=number, timestamp=1.0, step_count=0
    )


@pytest.mark.parametrize("given", [{}, {"model_ref": POLICY}, {"response_id": "r"}])
def test_a_reference_names_a_call_in_one_of_two_ways(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="model_call_id, or by model_ref and response_id"):
        ModelCallRef(**given)
    assert ModelCallRef(model_call_id="a")
    assert ModelCallRef(model_ref=POLICY, response_id="r")


def test_nothing_ends_before_it_began_not_even_later_on() -> None:
    with pytest.raises(ValidationError, match="is before started_at"):
        ToolCallObservation(invocation_id="root", tool_call_id="t", started_at=2, completed_at=1)
    call = ToolCallObservation(invocation_id="root", tool_call_id="t", started_at=2)
    with pytest.raises(ValidationError):
        call.completed_at = 1
    with pytest.raises(ValidationError):
        call.duration_ms = -1


def test_unknown_fields_are_refused_and_records_are_told_apart_by_kind() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        ObservationGap(code="x", why="because")  # type: ignore[call-arg]
    given = {"source": "pi", "records": [{"kind": "sandbox", "role": "agent"}, {"kind": "agent_invocation"}]}
    with pytest.raises(ValidationError, match="invocation_id"):
        AgentObservationBundle.model_validate(given)
    given["records"] = [{"kind": "sandbox", "role": "agent"}]
    assert AgentObservationBundle.model_validate(given).model_dump()["records"][0]["outcome"] == "unknown"


def test_invocations_have_ids_of_their_own_and_no_cycles() -> None:
    with pytest.raises(ValidationError, match="invocation_id must be unique: a"):
        bundle(invocation("a"), invocation("a"))
    with pytest.raises(ValidationError, match="its own ancestor"):
        bundle(invocation("a", parent="b"), invocation("b", parent="a"))
    assert bundle(invocation("a", parent="elsewhere"), invocation("b", parent="a"))


def test_the_turns_of_a_trajectory_are_its_own() -> None:
    assert TrajectoryRecord(task_id="0", rollout_id="0-0", turns=[turn(1), turn(2)]).schema_version == "1.0"
    with pytest.raises(ValidationError, match="another task or rollout"):
        TrajectoryRecord(task_id="0", rollout_id="0-0", turns=[turn(1, "0-1")])
    with pytest.raises(ValidationError, match="invocation_id and turn_no must be unique"):
        TrajectoryRecord(task_id="0", rollout_id="0-0", turns=[turn(1), turn(1)])


def test_references_become_those_of_the_recorded_calls() -> None:
    given = bundle(
        invocation("a", ModelCallRef(model_ref=POLICY, response_id="r1")),
        ContextCompactionObservation(
            invocation_id="a",
            model_calls=[ModelCallRef(model_call_id="1")],
            before_model_call=ModelCallRef(model_call_id="2"),
        ),
    )

    joined = join_model_call_observations(given, [Call("1", 0, response_id="r1"), Call("2", 1, response_id="r2")])

    whole = ModelCallRef(model_call_id="1", model_ref=POLICY, response_id="r1")
    assert joined.records[0].model_calls == [whole]  # type: ignore[union-attr]
    assert joined.records[1].model_calls == [whole]  # type: ignore[union-attr]
    assert joined.records[1].before_model_call.response_id == "r2"  # type: ignore[union-attr]
    assert [(gap.code, gap.detail) for gap in joined.gaps] == [
        ("model_call_ownership_unavailable", "capture:2:call_index=1")
    ]
    assert given.records[0].model_calls[0].model_call_id is None  # type: ignore[union-attr]


def test_references_that_fit_no_call_stay_as_they_are_and_leave_a_gap() -> None:
    same = ModelCallRef(model_ref=POLICY, response_id="twice")
    given = bundle(
        invocation("a", ModelCallRef(model_call_id="none"), same, ModelCallRef(model_call_id="1")),
        invocation("b", ModelCallRef(model_call_id="1")),
        ContextCompactionObservation(
            invocation_id="b",
            model_calls=[ModelCallRef(model_call_id="1"), ModelCallRef(model_call_id="2")],
            after_model_call=ModelCallRef(model_call_id="1"),
        ),
        gaps=[ObservationGap(code="model_call_reference_unmatched"), ObservationGap(code="kept")],
    )
    calls = [Call("1", 0, response_id="r1"), Call("2", 1, response_id="twice"), Call("3", 2, response_id="twice")]

    joined = join_model_call_observations(given, calls)
    again = join_model_call_observations(joined, calls)

    assert [(gap.code, gap.invocation_id, gap.detail) for gap in joined.gaps] == [
        ("kept", None, None),
        ("model_call_reference_unmatched", "a", "none"),
        ("model_call_reference_ambiguous", "a", "twice"),
        ("model_call_reference_conflict", "b", "1"),
        ("model_call_reference_conflict", "b", "model_calls:1"),
        ("model_call_ownership_unavailable", "b", "model_calls:2"),
        ("model_call_reference_conflict", "b", "after_model_call:1"),
        ("model_call_ownership_unavailable", None, "capture:2:call_index=1"),
        ("model_call_ownership_unavailable", None, "capture:3:call_index=2"),
    ]
    assert joined.records[0].model_calls[1] == same  # type: ignore[union-attr]
    assert again.gaps == joined.gaps
