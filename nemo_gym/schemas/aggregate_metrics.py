"""What travels to and from `POST /aggregate_metrics`: scored rollouts in, numbers out."""

from typing import Any, ClassVar

from pydantic import BaseModel, Field


class AggregateMetricsRequest(BaseModel):
    """The results of one agent, over which metrics are to be computed."""

    MOST_LEVELS: ClassVar[int] = 100
    """What is nested more deeply is read as null: one odd record must not cost all others their metrics."""

    verify_responses: list[dict[str, Any]]
    """One per rollout: its indices, `reward`, the verifier's fields and, when known, `response.usage`."""


class AggregateMetrics(BaseModel):
    """Numbers over all rollouts of one agent; empty when there were none."""

    group_level_metrics: list[dict[str, Any]] = Field(default_factory=list)
    """One entry per task, in ascending task order."""
    agent_metrics: dict[str, Any] = Field(default_factory=dict)
    """Over all rollouts, under flat keys such as `mean/reward`."""
    key_metrics: dict[str, Any] = Field(default_factory=dict)
    """The headline subset of `agent_metrics`."""
