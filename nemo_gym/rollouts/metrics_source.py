"""Where an agent's metrics come from: its server, or hooks of its class that are at hand."""

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import orjson

from nemo_gym.metrics.hooks import ComputeMetrics, GetKeyMetrics
from nemo_gym.rollouts.record import Result
from nemo_gym.rollouts.stored import sendable


class Hooks(NamedTuple):
    """What a class adds to the metrics that every agent has."""

    compute_metrics: ComputeMetrics | None = None
    """None when it has no metrics of its own: then the numbers of its records are enough."""
    get_key_metrics: GetKeyMetrics | None = None
    """None for the means."""


class MetricsSource(Protocol):
    """Whoever knows how the agents' metrics are computed."""

    def hooks_of(self, agent: str) -> Hooks | None:
        """The hooks of an agent's class; None when it has to be asked."""

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """What the agent's `/aggregate_metrics` answers to these records."""


def needs_records(source: MetricsSource, agent: str) -> bool:
    """Whether whole records are needed to compute the agent's metrics."""
    hooks = source.hooks_of(agent)
    return hooks is None or hooks.compute_metrics is not None


def request_of(records: Collection[Result]) -> dict[str, Any]:
    """The request for metrics, as an HTTP client takes it."""
    body = b'{"verify_responses":[' + b",".join(map(sendable, records)) + b"]}"
    return {"data": body, "headers": {"Content-Type": "application/json"}}


def as_sent(record: Result) -> Result:
    """A record as it arrives at a server."""
    try:
        orjson.dumps(record)
    except orjson.JSONEncodeError:
        arrived: Result = orjson.loads(sendable(record))
        return arrived
    return record
