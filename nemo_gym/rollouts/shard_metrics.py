"""From what was kept of the shards to every agent's metrics."""

import logging
from typing import TYPE_CHECKING, Any

from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import REWARD, RolloutTable
from nemo_gym.metrics.coverage import compute_coverage
from nemo_gym.metrics.hooks import GetKeyMetrics, Metrics, means_of
from nemo_gym.metrics.ordered import SortedRollouts
from nemo_gym.metrics.profile import pooled_statistics, task_profiles
from nemo_gym.rollouts.aggregate import AgentRecords, AggregationError, ask_agents
from nemo_gym.rollouts.metrics_file import AgentAnswer
from nemo_gym.rollouts.record import Result
from nemo_gym.rollouts.shard_expectations import Expectations
from nemo_gym.rollouts.shard_intake import Intake
from nemo_gym.schemas.metrics import AggregateMetrics

if TYPE_CHECKING:
    from nemo_gym.rollouts.aggregation import MetricsSource

logger = logging.getLogger(__name__)

_SCORE = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, REWARD)


async def compute_answers(intake: Intake, source: "MetricsSource", expectations: Expectations) -> list[AgentAnswer]:
    """The metrics of every agent, sorted by name; none when no agent has any record.

    Raises:
        AggregationError: agents could not say what their metrics are; all of them are named.
    """
    if not intake.scored:
        return []
    # Before anybody is asked: a hook may change the records it is given.
    coverage_of = {agent: _coverage(agent, group, intake, expectations) for agent, group in intake.groups.items()}
    to_ask = {
        agent: AgentRecords(group.records) for agent, group in intake.groups.items() if agent not in intake.numbers
    }
    asked = {of_agent.agent: of_agent.metrics for of_agent in await ask_agents(to_ask, source.ask)}
    answers = []
    for agent in sorted(intake.groups):
        table, coverage = intake.numbers.get(agent), coverage_of[agent]
        if table is not None:
            answers.append(_from_numbers(agent, table, source.key_metrics_hook(agent), coverage))
        else:
            metrics = asked.get(agent) or AggregateMetrics()
            answers.append(
                AgentAnswer(agent, metrics.agent_metrics, metrics.key_metrics, metrics.group_level_metrics, coverage)
            )
    return answers


def _coverage(agent: str, group: AgentRecords, intake: Intake, expectations: Expectations) -> dict[str, Any]:
    expected = expectations.of(agent)
    rollouts, tasks = (None, None) if expected is None else (expected.rollouts, expected.tasks)
    table = intake.numbers.get(agent)
    scored = map(_score, group.records) if table is None else table
    return compute_coverage(scored, group.failed, rollouts, tasks)


def _score(record: Result) -> Result:
    """The part of a record that coverage rests on; reading only that is three times as fast."""
    return {name: record[name] for name in _SCORE if name in record}


def _from_numbers(agent: str, table: RolloutTable, hook: GetKeyMetrics | None, coverage: dict[str, Any]) -> AgentAnswer:
    """What `compute_aggregate_metrics` answers, with the tasks' profiles made only when they are written."""
    rollouts = SortedRollouts(table)
    agent_metrics: Metrics = pooled_statistics(rollouts) if len(rollouts) else {}
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(agent, hook or means_of, agent_metrics, rollouts) if len(rollouts) else {}
    return AgentAnswer(agent, agent_metrics, key_metrics, task_profiles(rollouts), coverage)


def _headline(agent: str, hook: GetKeyMetrics, agent_metrics: Metrics, rollouts: SortedRollouts) -> Metrics:
    try:
        return hook(agent_metrics)
    except Exception as error:
        if not rollouts.bad.count:
            raise AggregationError(f"get_key_metrics of agent {agent!r} failed: {error!r}") from error
        logger.warning("get_key_metrics failed on records of which some are bad (%r); reporting the means", error)
        return means_of(agent_metrics)
