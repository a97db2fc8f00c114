"""The hooks by which a server reports metrics of its own; light, because every server loads them.

numpy is loaded when metrics are first computed.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest

Response = dict[str, Any]
"""A verify response with its indices, as sent to `/aggregate_metrics`."""
Metrics = dict[str, Any]
ComputeMetrics = Callable[[list[list[Response]]], Metrics]
GetKeyMetrics = Callable[[Metrics], Metrics]


class AggregateMetricsMixin:
    """The hooks a resources server or an agent overrides to report metrics of its own."""

    def compute_metrics(self, tasks: list[list[Response]]) -> Metrics:
        """Metrics to add to `agent_metrics`.

        `tasks[i]` holds the verify responses of the i-th task in ascending task index, in the order they were sent.
        An entry `per_task_metrics` (dicts with `_ng_task_index`) is spread over the group metrics instead.
        """
        return {}

    def get_key_metrics(self, agent_metrics: Metrics) -> Metrics:
        """The headline subset of `agent_metrics`: by default the means."""
        return means_of(agent_metrics)

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Answer `POST /aggregate_metrics`. The work is done in a thread, so that the server keeps answering."""
        from nemo_gym.metrics.aggregate import compute_aggregate_metrics

        return await asyncio.to_thread(
            compute_aggregate_metrics, body.verify_responses, self.compute_metrics, self.get_key_metrics
        )


def means_of(agent_metrics: Mapping[str, Any]) -> Metrics:
    """The entries whose key starts with `mean/`."""
    return {key: value for key, value in agent_metrics.items() if key.startswith("mean/")}
