"""PUBLIC: stored rollouts scored again, by the environments as they are now.

The steps live in `nemo_gym.collect.reverify`, the options in `nemo_gym.runs.options.reverify`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from nemo_gym.collect.environments import ChosenRows
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.collect.reverify import Reverification, ReverifySummary, stored_rollouts
from nemo_gym.collect.run_servers import announce_head
from nemo_gym.http.client import ServerClient, setup_server_client
from nemo_gym.rollout_collection import tracker_of_process
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.runs.read import records
from nemo_gym.runs.record import FailureClass, Result, task_order

__all__ = [
    "JUDGE_FAILED_FAILURE_CLASS",
    "CacheKeysByStatus",
    "InputRolloutPair",
    "OutputPaths",
    "RolloutReverificationConfig",
    "RolloutReverificationHelper",
    "summarize_cache_usage",
]

logger = logging.getLogger(__name__)

JUDGE_FAILED_FAILURE_CLASS = FailureClass.JUDGE_FAILED.value


@dataclass
class InputRolloutPair:
    """A stored rollout with the row it was made of."""

    input: dict[str, Any]
    rollout: dict[str, Any]


@dataclass
class OutputPaths:
    """Where new verdicts go, and those that could not be had."""

    output: Path
    failures: Path


@dataclass
class CacheKeysByStatus:
    """The rollouts, by task and rollout index, that an earlier run of the same output settled, and how."""

    successful_keys: set[tuple[int, int]]
    terminal_keys: set[tuple[int, int]]
    maxed_out_keys: set[tuple[int, int]]


def summarize_cache_usage(
    cache: CacheKeysByStatus, all_payloads: list[dict[str, Any]], filtered_payloads: list[dict[str, Any]]
) -> None:
    """Say how much of what is asked for an earlier run has settled already."""
    logger.info(
        "%d of %d rollouts are left to be scored: %d are scored, %d must not be tried again, %d were tried too often",
        len(filtered_payloads),
        len(all_payloads),
        len(cache.successful_keys),
        len(cache.terminal_keys),
        len(cache.maxed_out_keys),
    )


class RolloutReverificationHelper(BaseModel):
    """Scores stored rollouts again."""

    retry_pauses: ClassVar[RetryPauses] = RetryPauses()
    """How long a verdict that failed waits before it is tried again."""
    environment_of: dict[str, str] = Field(default_factory=dict)
    """The environments of agents that do not run, by the agent's name."""

    async def reverify(self, config: RolloutReverificationConfig, command: Sequence[str] = ()) -> ReverifySummary:
        """Score what `config` asks for into its files, without keeping any of it in memory.

        Raises:
            ConfigError: something the user can correct; nothing has been written then.
        """
        with stored_rollouts(config) as chosen:
            return await self.score(config, chosen, command)

    async def score(
        self, config: RolloutReverificationConfig, chosen: ChosenRows, command: Sequence[str] = ()
    ) -> ReverifySummary:
        """Do the same with rollouts that are chosen already.

        Raises:
            ConfigError: as `reverify` does.
        """
        client = self.setup_server_client()
        announce_head(client)
        with tracker_of_process() as tracker:
            run = Reverification(
                config,
                chosen,
                client,
                command,
                pauses=self.retry_pauses,
                tracker=tracker,
                environment_of=self.environment_of,
            )
            return await run.run()

    async def run_from_config(self, config: RolloutReverificationConfig) -> list[Result]:
        """The same; every record of the output, in task order, with the verdicts that could not be had last."""
        summary = await self.reverify(config)
        paths: RolloutPaths = summary.run.paths
        scored = [record for _, _, record in records(paths.rollouts, "skip")]
        failed = [record for _, _, record in records(paths.failures, "skip")]
        return sorted(scored, key=task_order) + failed

    def setup_server_client(self) -> ServerClient:
        """A client for the servers of the configured run."""
        return setup_server_client()
