"""The answer of `/aggregate_metrics`: statistics of verify responses plus whatever a server's own hooks add."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice, pairwise
from typing import Any

import numpy as np
import orjson

from nemo_gym.jsonl import array_portions
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import REWARD, Column, RolloutTable, SortedRollouts, is_index
from nemo_gym.metrics.hooks import ComputeMetrics, GetKeyMetrics, Metrics, Response, means_of
from nemo_gym.metrics.profile import pooled_statistics, task_profiles
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest

logger = logging.getLogger(__name__)

_PER_TASK_METRICS = "per_task_metrics"
_REQUEST_START, _REQUEST_END = b'{"verify_responses":[', b"]}"
ANSWER_START = b'{"group_level_metrics":['
"""How the JSON of metrics begins."""
_GROUPS = slice(len(ANSWER_START), -len(b'],"agent_metrics":{},"key_metrics":{}}'))
_GROUPS_AT_A_TIME = 512
_OF_K_REPEATS = re.compile(r"(?:@|\bavg-of-)(\d+)")
"""As in `pass@4`, `pass@1[avg-of-4]` and `majority@4`."""


def compute_aggregate_metrics(
    verify_responses: Sequence[Response],
    compute_metrics_fn: ComputeMetrics | None = None,
    get_key_metrics_fn: GetKeyMetrics | None = None,
) -> AggregateMetrics:
    """Statistics per task and over all `verify_responses`, with the hooks' metrics merged in.

    A bad record never fails the call. It is left out of the numbers it cannot take part in, and `agent_metrics` then
    ends with `bad_records` (how many) and `bad_records_by_reason` (why, and which). Of several records with one
    rollout key the first counts. A hook sees every record that is an object with a rollout key; if it raises and some
    of these have a reward that is no number, it is asked again without them.
    """
    table = RolloutTable()
    usable = [response for response in verify_responses if table.add(response)]
    return aggregate_table(table, usable, compute_metrics_fn, get_key_metrics_fn)


def aggregated_json(
    request: bytes,
    read: Callable[[bytes], AggregateMetricsRequest],
    compute_metrics_fn: ComputeMetrics | None = None,
    get_key_metrics_fn: GetKeyMetrics | None = None,
) -> bytes:
    """The JSON of `compute_aggregate_metrics` of the records in a request, without holding all of either in memory.

    `read` is for a request that must be read as a whole. Records are kept only for a `compute_metrics_fn`.
    """
    table = RolloutTable()
    kept: list[Response] = []
    try:
        for portion in _records_in(request):
            for record in portion:
                if table.add(record) and compute_metrics_fn is not None:
                    kept.append(record)
    except ValueError:
        whole = read(request).verify_responses
        table = RolloutTable()
        kept = [record for record in whole if table.add(record)]
    return _written(table, kept, compute_metrics_fn, get_key_metrics_fn)


def _records_in(request: bytes) -> Iterator[list[Response]]:
    if not (request.startswith(_REQUEST_START) and request.endswith(_REQUEST_END)):
        raise ValueError
    return array_portions(request, len(_REQUEST_START), len(request) - len(_REQUEST_END), exact=True)


def _written(
    table: RolloutTable,
    records: Sequence[Response],
    compute_metrics_fn: ComputeMetrics | None,
    get_key_metrics_fn: GetKeyMetrics | None,
) -> bytes:
    rollouts = SortedRollouts(table)
    if not len(rollouts):
        return _json(AggregateMetrics(agent_metrics=rollouts.bad.summary()))
    agent_metrics: Metrics = pooled_statistics(rollouts)
    added: dict[int, list[Mapping[str, Any]]] = {}
    if compute_metrics_fn is not None:
        custom = dict(_ask(compute_metrics_fn, rollouts, records) or {})
        for entry in custom.pop(_PER_TASK_METRICS, None) or ():
            task = entry.get(TASK_INDEX_KEY_NAME) if isinstance(entry, Mapping) else None
            if is_index(task):
                added.setdefault(task, []).append(entry)
        agent_metrics |= custom
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(get_key_metrics_fn or means_of, agent_metrics, rollouts)
    rest = AggregateMetrics.model_construct(agent_metrics=agent_metrics, key_metrics=key_metrics)
    written = BytesIO()
    written.write(ANSWER_START)
    groups = task_profiles(rollouts)
    while portion := list(islice(groups, _GROUPS_AT_A_TIME)):
        for group in portion if added else ():
            for entry in added.get(group[TASK_INDEX_KEY_NAME], ()):
                group.update(entry)
        if written.tell() > len(ANSWER_START):
            written.write(b",")
        written.write(_json_of_groups(portion, is_plain=not added))
    written.write(_json(rest)[len(ANSWER_START) :])
    return written.getvalue()  # which is no copy


def _json_of_groups(groups: list[dict[str, Any]], *, is_plain: bool) -> bytes:
    """The entries of tasks as they stand between brackets; plain ones hold nothing that a hook has made."""
    if is_plain:
        try:
            return orjson.dumps(groups)[1:-1]  # the same to the byte, in a third of the time
        except TypeError:  # numbers of more than 64 bits
            pass
    return _json(AggregateMetrics.model_construct(group_level_metrics=groups))[_GROUPS]


def _json(metrics: AggregateMetrics) -> bytes:
    return metrics.__pydantic_serializer__.to_json(metrics, by_alias=True, warnings=False)


def aggregate_table(
    table: RolloutTable,
    records: Sequence[Response] = (),
    compute_metrics_fn: ComputeMetrics | None = None,
    get_key_metrics_fn: GetKeyMetrics | None = None,
) -> AggregateMetrics:
    """As `compute_aggregate_metrics`, for records already read into `table`.

    `records` are those the table accepted, in that order; they are needed only for `compute_metrics_fn`.
    """
    rollouts = SortedRollouts(table)
    if not len(rollouts):
        return AggregateMetrics(agent_metrics=rollouts.bad.summary())
    groups = list(task_profiles(rollouts))
    agent_metrics: Metrics = pooled_statistics(rollouts)
    if compute_metrics_fn is not None:
        custom = dict(_ask(compute_metrics_fn, rollouts, records) or {})
        _spread(custom.pop(_PER_TASK_METRICS, None) or (), rollouts, groups)
        agent_metrics |= custom
    agent_metrics |= rollouts.bad.summary()
    key_metrics = _headline(get_key_metrics_fn or means_of, agent_metrics, rollouts)
    # Built here from checked parts: validating a hundred thousand groups again would cost more than computing them.
    return AggregateMetrics.model_construct(
        group_level_metrics=groups, agent_metrics=agent_metrics, key_metrics=key_metrics
    )


def _ask(hook: ComputeMetrics, rollouts: SortedRollouts, records: Sequence[Response]) -> Metrics:
    tasks = _grouped(rollouts, records)
    try:
        return hook(tasks)
    except Exception as error:
        scored = [[record for record in task if _may_have_score(record)] for task in tasks]
        if all(map(_same_length, scored, tasks)):
            raise
        logger.warning(
            "compute_metrics failed (%r); asking again without the records whose reward is not a number", error
        )
        return hook([task for task in scored if task])


def _same_length(some: Sequence[Response], others: Sequence[Response]) -> bool:
    return len(some) == len(others)


def _headline(hook: GetKeyMetrics, agent_metrics: Metrics, rollouts: SortedRollouts) -> Metrics:
    try:
        return hook(agent_metrics)
    except Exception as error:
        if not rollouts.bad.count:
            raise
        logger.warning("get_key_metrics failed on records of which some are bad (%r); reporting the means", error)
        return means_of(agent_metrics)


def _may_have_score(record: Response) -> bool:
    return REWARD not in record or isinstance(record[REWARD], (int, float))


def _grouped(rollouts: SortedRollouts, records: Sequence[Response]) -> list[list[Response]]:
    """The records of each task, ascending, in the order they came."""
    in_order = np.lexsort((rollouts.rows, rollouts.tasks))
    ordered = [records[row] for row in rollouts.rows[in_order].tolist()]
    starts = [*rollouts.starts.tolist(), len(rollouts)]
    return [ordered[start:end] for start, end in pairwise(starts)]


def _spread(per_task: Iterable[Any], rollouts: SortedRollouts, groups: list[dict[str, Any]]) -> None:
    """Copy each entry of `per_task_metrics` into the group of its task; entries for no known task are ignored."""
    group_of = dict(zip(rollouts.task_ids.tolist(), groups, strict=True))
    for entry in per_task:
        task = entry.get(TASK_INDEX_KEY_NAME) if isinstance(entry, Mapping) else None
        if is_index(task) and task in group_of:
            group_of[task].update(entry)


def for_uneven_repeats(metrics: AggregateMetrics, table: RolloutTable, stops_when: str) -> AggregateMetrics:
    """Metrics of a run whose repeats stop when a task is decided, as far as such a run can have them.

    Means are those of the tasks' means. What rests on k repeats is null for every k that some task does not have, and
    `agent_metrics` then ends with `why_null`.
    """
    rollouts = SortedRollouts(table)
    if not len(rollouts):
        return metrics
    means = {f"mean/{column.name}": _mean_of_tasks(column, rollouts) for column in rollouts.columns}
    least = int(np.bincount(rollouts.task_ordinals).min())
    agent = {**metrics.agent_metrics, **{name: means[name] for name in means if name in metrics.agent_metrics}}
    headline = {**metrics.key_metrics, **{name: means[name] for name in means if name in metrics.key_metrics}}
    too_large = {name for name in [*agent, *headline] if any(int(k) > least for k in _OF_K_REPEATS.findall(name))}
    agent = {name: None if name in too_large else value for name, value in agent.items()}
    headline = {name: None if name in too_large else value for name, value in headline.items()}
    if too_large:
        agent["why_null"] = (
            f"repeats stop when {stops_when}, and some task has only {least}: what rests on more repeats is not known"
        )
    return metrics.model_copy(update={"agent_metrics": agent, "key_metrics": headline})


def _mean_of_tasks(column: Column, rollouts: SortedRollouts) -> float | None:
    known = np.isfinite(column.values)
    _, places = np.unique(rollouts.tasks[column.ranks[known]], return_inverse=True)
    if not len(places):
        return None
    return float(np.mean(np.bincount(places, column.values[known]) / np.bincount(places)))
