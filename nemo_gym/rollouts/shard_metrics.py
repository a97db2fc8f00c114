"""From what was kept of the shards to every agent's metrics."""

import logging
from typing import TYPE_CHECKING, Any

from nemo_gym.metrics.columns import RolloutTable
from nemo_gym.metrics.coverage import compute_coverage
from nemo_gym.metrics.hooks import GetKeyMetrics, Metrics, means_of
from nemo_gym.metrics.ordered import SortedRollouts
from nemo_gym.metrics.profile import pooled_statistics, task_profiles
from nemo_gym.rollouts.aggregate import AgentRecords, ask_agents
from nemo_gym.rollouts.metrics_file import AgentAnswer
from nemo_gym.rollouts.shard_expectations import Expectations
from nemo_gym.rollouts.shard_intake import Intake

if TYPE_CHECKING:
    from nemo_gym.rollouts.aggregation import MetricsSource

logger = logging.getLogger(__name__)


async def compute_answers(intake: Intake, source: "MetricsSource", expectations: Expectations) -> list[AgentAnswer]:
    """The metrics of every agent, sorted by name; none when no agent has any record.

    Raises:
        AggregationError: agents could not say what their metrics are; all of them are named.
    """
    if not intake.scored:
        return []
    to_ask = {
        agent: AgentRecords(group.records) for agent, group in intake.groups.items() if agent not in intake.numbers
    }
    asked = {of_agent.agent: of_agent.metrics for of_agent in await ask_agents(to_ask, source.ask)}
    answers = []
    for agent, group in sorted(intake.groups.items()):
        table = intake.numbers.get(agent)
        coverage = _coverage(agent, group, table, expectations)
        if table is not None:
            answers.append(_from_numbers(agent, table, source.key_metrics_hook(agent), coverage))
        else:
            parts = asked[agent].model_dump() if agent in asked else {}
            groups = parts.get("group_level_metrics", [])
            answers.append(
                AgentAnswer(agent, parts.get("agent_metrics", {}), parts.get("key_metrics", {}), groups, coverage)
            )
    return answers


def _coverage(
    agent: str, group: AgentRecords, table: RolloutTable | None, expectations: Expectations
) -> dict[str, Any]:
    expected = expectations.of(agent)
    scored = group.records if table is None else table
    rollouts, tasks = (None, None) if expected is None else (expected.rollouts, expected.tasks)
    return compute_coverage(scored, group.failed, rollouts, tasks)


def _from_numbers(agent: str, table: RolloutTable, hook: GetKeyMetrics | None, coverage: dict[str, Any]) -> AgentAnswer:
    """What `compute_aggregate_metrics` answers, with the tasks' profiles made only when they are written."""
    rollouts = SortedRollouts(table)
    agent_metrics: Metrics = pooled_statistics(rollouts) if len(rollouts) else {}
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(hook or means_of, agent_metrics, rollouts) if len(rollouts) else {}
    return AgentAnswer(agent, agent_metrics, key_metrics, task_profiles(rollouts), coverage)


def _headline(hook: GetKeyMetrics, agent_metrics: Metrics, rollouts: SortedRollouts) -> Metrics:
    try:
        return hook(agent_metrics)
    except Exception as error:
        if not rollouts.bad.count:
            raise
        logger.warning("get_key_metrics failed on records of which some are bad (%r); reporting the means", error)
        return means_of(agent_metrics)
