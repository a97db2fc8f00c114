"""Feeding a trainer: prompts in, groups of scored completions with token ids and log-probs out.

Importing this package does nothing but define names; everything is loaded on first use, torch only where
tensors are made.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "AsyncNemoGymRolloutImpl": "rollout_manager",
    "AsyncRolloutImpl": "rollout_manager",
    "RolloutManager": "rollout_manager",
    "Completion": "interfaces",
    "DatumSpec": "interfaces",
    "EnvironmentInterface": "interfaces",
    "EnvironmentReturn": "interfaces",
    "GenerationConfig": "interfaces",
    "GenerationInterface": "interfaces",
    "PromptGroupRecord": "interfaces",
    "Timer": "interfaces",
    "NemoGym": "environment",
    "NemoGymConfig": "environment",
    "setup_nemo_gym_config": "environment",
    "RolloutOverrides": "interfaces",
    "GenerationUnavailable": "failures",
    "GymTransportError": "failures",
    "NoHealthyShards": "failures",
    "RolloutDataFailure": "failures",
    "RolloutFailure": "failures",
    "RolloutOutcome": "failures",
    "RolloutRedispatchExhausted": "failures",
    "RolloutStall": "failures",
    "BufferedGroup": "buffer",
    "BufferFullError": "buffer",
    "RolloutBuffer": "buffer",
    "RolloutInfraFailure": "failures",
    "RolloutTimeout": "failures",
    "classify_rollout_failure": "failures",
    "RolloutRetryPolicy": "failures",
    "RolloutStats": "failures",
    "RolloutTimeouts": "failures",
    "calculate_rewards": "rewards",
    "completion_of_capture": "samples",
    "collate": "batches",
    "collate_packed": "batches",
    "importance_weights": "batches",
    "mismatch_metrics": "batches",
    "StalenessPolicy": "batches",
    "TokenSequence": "batches",
    "token_sequence": "batches",
    "BatchCollector": "curriculum",
    "CurriculumSampler": "curriculum",
    "drop_zero_variance": "curriculum",
    "prompt_groups": "groups",
    "group_advantages": "groups",
    "has_signal": "groups",
    "with_signal": "groups",
    "export_rollouts": "export",
}

__all__ = sorted(_EXPORTS)  # noqa: PLE0605, RUF100


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nemo_gym.rl.{_EXPORTS[name]}"), name)
