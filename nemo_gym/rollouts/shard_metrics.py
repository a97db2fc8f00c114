"""From what was kept of the shards to every agent's metrics."""

import logging
from collections.abc import Sequence
from typing import Any

import orjson

from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.aggregate import aggregate_table
from nemo_gym.metrics.columns import REWARD, RolloutTable
from nemo_gym.metrics.coverage import compute_coverage
from nemo_gym.metrics.hooks import Metrics, means_of
from nemo_gym.metrics.ordered import SortedRollouts
from nemo_gym.metrics.profile import pooled_statistics, task_profiles
from nemo_gym.rollouts.aggregate import AgentRecords, AggregationError, ask_agents
from nemo_gym.rollouts.metrics_file import AgentAnswer
from nemo_gym.rollouts.metrics_source import Hooks, MetricsSource, as_sent
from nemo_gym.rollouts.record import Result
from nemo_gym.rollouts.shard_expectations import Expectations
from nemo_gym.rollouts.shard_intake import Intake
from nemo_gym.schemas.metrics import AggregateMetrics

logger = logging.getLogger(__name__)

_SCORE = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, REWARD)
_PER_TASK_METRICS = "per_task_metrics"


async def compute_answers(intake: Intake, source: MetricsSource, expectations: Expectations) -> list[AgentAnswer]:
    """The metrics of every agent, sorted by name; none when no agent has any record.

    Raises:
        AggregationError: agents could not say what their metrics are; all of them are named.
    """
    if not intake.scored:
        return []
    hooks_of = {agent: source.hooks_of(agent) for agent in intake.groups}
    to_ask = {agent: AgentRecords(intake.groups[agent].records) for agent, hooks in hooks_of.items() if hooks is None}
    answers = {of_agent.agent: of_agent.metrics for of_agent in await ask_agents(to_ask, source.ask)}
    return [
        _from_answer(agent, answers.get(agent), intake, expectations)
        if hooks is None
        else _from_hooks(agent, hooks, intake, expectations)
        for agent, hooks in sorted(hooks_of.items(), key=lambda item: item[0])
    ]


def _from_answer(
    agent: str, answer: AggregateMetrics | None, intake: Intake, expectations: Expectations
) -> AgentAnswer:
    metrics = answer or AggregateMetrics()
    group = intake.groups[agent]
    coverage = _coverage(agent, _read(list(map(_score, group.records)))[0], group, expectations)
    return AgentAnswer(agent, metrics.agent_metrics, metrics.key_metrics, metrics.group_level_metrics, coverage)


def _from_hooks(agent: str, hooks: Hooks, intake: Intake, expectations: Expectations) -> AgentAnswer:
    group, table = intake.groups[agent], intake.numbers.get(agent)
    usable: list[Result] = []
    if table is None:
        table, usable = _read([as_sent(record) for record in group.records])
    coverage = _coverage(agent, table, group, expectations)
    try:
        if hooks.compute_metrics is None:
            return _from_numbers(agent, table, hooks, coverage)
        return _from_records(agent, table, usable, hooks, coverage)
    except Exception as error:
        raise AggregationError(f"agent {agent!r}: its class failed to compute its metrics: {error!r}") from error


def _read(records: Sequence[Result]) -> tuple[RolloutTable, list[Result]]:
    """The numbers of the records, and those records that have any."""
    table = RolloutTable()
    return table, [record for record in records if table.add(record)]


def _score(record: Result) -> Result:
    """The part of a record that coverage rests on."""
    return {name: record[name] for name in _SCORE if name in record}


def _coverage(agent: str, table: RolloutTable, group: AgentRecords, expectations: Expectations) -> dict[str, Any]:
    expected = expectations.of(agent)
    rollouts, tasks = (None, None) if expected is None else (expected.rollouts, expected.tasks)
    return compute_coverage(table, group.failed, rollouts, tasks)


def _from_records(
    agent: str, table: RolloutTable, records: list[Result], hooks: Hooks, coverage: dict[str, Any]
) -> AgentAnswer:
    returned: list[Metrics] = []

    def compute(tasks: list[list[Result]]) -> Metrics:
        assert hooks.compute_metrics is not None
        returned.append(dict(hooks.compute_metrics(tasks) or {}))
        return returned[-1]

    metrics = aggregate_table(table, records, compute, hooks.get_key_metrics)
    groups = metrics.group_level_metrics
    if any(_PER_TASK_METRICS in custom for custom in returned):
        groups = _as_over_http(AggregateMetrics.model_construct(group_level_metrics=groups)).group_level_metrics
    rest = _as_over_http(
        AggregateMetrics.model_construct(agent_metrics=metrics.agent_metrics, key_metrics=metrics.key_metrics)
    )
    return AgentAnswer(agent, rest.agent_metrics, rest.key_metrics, groups, coverage)


def _from_numbers(agent: str, table: RolloutTable, hooks: Hooks, coverage: dict[str, Any]) -> AgentAnswer:
    """What `compute_aggregate_metrics` answers, with the tasks' profiles made only when they are written."""
    rollouts = SortedRollouts(table)
    agent_metrics: Metrics = pooled_statistics(rollouts) if len(rollouts) else {}
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(hooks, agent_metrics, rollouts) if len(rollouts) else {}
    plain = _as_over_http(AggregateMetrics.model_construct(agent_metrics=agent_metrics, key_metrics=key_metrics))
    return AgentAnswer(agent, plain.agent_metrics, plain.key_metrics, task_profiles(rollouts), coverage)


def _headline(hooks: Hooks, agent_metrics: Metrics, rollouts: SortedRollouts) -> Metrics:
    try:
        return (hooks.get_key_metrics or means_of)(agent_metrics)
    except Exception as error:
        if not rollouts.bad.count:
            raise
        logger.warning("get_key_metrics failed on records of which some are bad (%r); reporting the means", error)
        return means_of(agent_metrics)


def _as_over_http(metrics: AggregateMetrics) -> AggregateMetrics:
    """Metrics as they arrive when a server sends them, whatever an author's hooks put into them."""
    sent = metrics.model_dump_json(by_alias=True, warnings=False)
    return AggregateMetrics.model_construct(**orjson.loads(sent))
