"""Runs that owe nothing more: what can be said about them without any server.

Everything here only reads: the files of the run stay as they are.
"""

from collections import Counter

from nemo_gym.rollouts.aggregate import current_metrics
from nemo_gym.rollouts.changes import find_changes
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.failure_table import FailureTable
from nemo_gym.rollouts.manifest import read_manifest
from nemo_gym.rollouts.materialized import is_complete
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.reconcile import input_fingerprint, prompt_fingerprint
from nemo_gym.rollouts.record import RolloutKey
from nemo_gym.rollouts.repair import sound_records
from nemo_gym.rollouts.resume import Plan, plan_resumed, read_attempts, read_gate
from nemo_gym.rollouts.rows import InputRows
from nemo_gym.rollouts.run import resumes
from nemo_gym.rollouts.summary import RunSummary


def summary_of(plan: Plan, paths: RolloutPaths) -> RunSummary:
    """Of a run that is about to begin; it knows why earlier runs gave up on rollouts."""
    summary = RunSummary(
        paths,
        expected=plan.total,
        finished_before=plan.done,
        given_up_before=plan.given_up,
        given_up=plan.given_up,
        owed=plan.owed,
    )
    _add_earlier_failures(summary.failures, plan, paths)
    return summary


def count_given_up(summary: RunSummary, cap: int) -> int:
    """How many rollouts the next run would leave out, now that this one is over."""
    if not summary.missing:
        return 0
    attempts = read_attempts(summary.paths).values()
    return min(summary.missing, sum(of_key.is_terminal or of_key.counted >= cap for of_key in attempts))


def is_settled(summary: RunSummary, config: RolloutCollectionConfig) -> bool:
    """Whether there is nothing to do, not even metrics to compute; those on disk are then part of the summary."""
    if summary.owed:
        return False
    if config.disable_aggregation:
        return True
    metrics = current_metrics(summary.paths)
    if metrics:
        summary.metrics, summary.metrics_path = metrics, summary.paths.aggregate_metrics
    return metrics is not None


def summary_if_settled(config: RolloutCollectionConfig) -> RunSummary | None:
    """Of a run to resume in which there is nothing to do; None when there is, or when that cannot be told."""
    if not (resumes(config) and _is_same_run(config)):
        return None
    gate = read_gate(config.paths, config.attempt_cap, retry_exhausted=config.retry_exhausted, repair=False)
    summary = summary_of(plan_resumed(config.paths, gate, repair=False), config.paths)
    return summary if is_settled(summary, config) else None


def _add_earlier_failures(table: FailureTable, plan: Plan, paths: RolloutPaths) -> None:
    given_up = set(plan.given_up_keys)
    if not given_up:
        return
    seen: Counter[RolloutKey] = Counter()
    for key, _, failure in sound_records(paths.failures, paths.failures_corrupt, may_lack_key=True, repair=False):
        if key in given_up:
            seen[key] += 1
            table.add(failure, failure, is_final=seen[key] == plan.attempts[key].made)


def _is_same_run(config: RolloutCollectionConfig) -> bool:
    paths = config.paths
    manifest = read_manifest(paths.manifest)
    if manifest is None:
        return paths.materialized_inputs.exists()
    if not is_complete(paths.materialized_inputs, manifest.expected_rollouts):
        return False
    input_now, prompt_now = input_fingerprint(config), prompt_fingerprint(config)
    return not find_changes(manifest, config, input_now, prompt_now, lambda: InputRows(config).scan.rows)
