"""Runs that owe nothing more: what can be said about them without any server.

Everything here only reads: the files of the run stay as they are.
"""

from collections import Counter

from nemo_gym.rollouts.changes import find_changes
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.failure_table import FailureTable
from nemo_gym.rollouts.manifest import read_manifest
from nemo_gym.rollouts.materialized import is_complete
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.reconcile import input_fingerprint, prompt_fingerprint
from nemo_gym.rollouts.record import RolloutKey
from nemo_gym.rollouts.repair import sound_records
from nemo_gym.rollouts.resume import Plan, plan_resumed, read_gate
from nemo_gym.rollouts.rows import InputRows
from nemo_gym.rollouts.run import resumes


def plan_if_finished(config: RolloutCollectionConfig) -> Plan | None:
    """The plan of a run to resume that owes nothing; None when there is work to do, or that cannot be told."""
    if not (resumes(config) and _is_same_run(config)):
        return None
    gate = read_gate(config.paths, config.attempt_cap, retry_exhausted=config.retry_exhausted, repair=False)
    plan = plan_resumed(config.paths, gate, repair=False)
    return None if plan.owed else plan


def earlier_failures(plan: Plan, paths: RolloutPaths) -> FailureTable:
    """Why earlier runs gave up on rollouts."""
    table = FailureTable()
    given_up = set(plan.given_up_keys)
    if not given_up:
        return table
    seen: Counter[RolloutKey] = Counter()
    for key, _, failure in sound_records(paths.failures, paths.failures_corrupt, may_lack_key=True, repair=False):
        if key in given_up:
            seen[key] += 1
            table.add(failure, failure, is_final=seen[key] == plan.attempts[key].made)
    return table


def _is_same_run(config: RolloutCollectionConfig) -> bool:
    paths = config.paths
    manifest = read_manifest(paths.manifest)
    if manifest is None:
        return paths.materialized_inputs.exists()
    if not is_complete(paths.materialized_inputs, manifest.expected_rollouts):
        return False
    input_now, prompt_now = input_fingerprint(config), prompt_fingerprint(config)
    return not find_changes(manifest, config, input_now, prompt_now, lambda: InputRows(config).scan.rows)
