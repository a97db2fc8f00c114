"""What an aggregation came to, for its last lines and for `+json=true`."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.errors import listed
from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.shard_sets import ShardSet
from nemo_gym.rollouts.shards import ShardFiles

if TYPE_CHECKING:
    from nemo_gym.rollouts.shard_expectations import Expectations
    from nemo_gym.rollouts.shard_index import ShardIndex
    from nemo_gym.rollouts.shard_intake import Intake
    from nemo_gym.rollouts.shard_merge import Merged

logger = logging.getLogger(__name__)


@dataclass
class AggregationSummary:
    """The end of one aggregation."""

    paths: RolloutPaths
    files: ShardFiles
    shards: ShardSet = field(default_factory=lambda: ShardSet({}, []))
    """Those of the files that are shards of one run."""
    differences: list[str] = field(default_factory=list)
    """Between the settings of the shards, one line each."""
    is_offline: bool = False
    """Whether the metrics were computed here instead of by servers."""
    is_merged: bool = False
    """Whether the merged file was written."""
    records: int = 0
    """In the merged file."""
    identical_duplicates: int = 0
    different_duplicates: int = 0
    torn: list[str] = field(default_factory=list)
    without_agent: int = 0
    without_key: int = 0
    expectations: "Expectations | None" = None
    metrics: list[AgentMetrics] = field(default_factory=list)
    """Without their per-task part, which is in the file only."""
    metrics_path: Path | None = None

    @property
    def missing(self) -> int:
        """Rollouts that the shards' inputs ask for and that have no result."""
        return 0 if self.expectations is None else self.expectations.missing.number + self.expectations.missing_unnamed

    def note_records(self, index: "ShardIndex", merged: "Merged", intake: "Intake") -> None:
        """Take over what reading the shards found."""
        self.records = len(merged.order)
        self.identical_duplicates, self.different_duplicates = merged.identical, merged.different
        self.torn = [str(tail) for tail in index.torn]
        self.without_agent, self.without_key = intake.without_agent, index.without_key

    def report(self) -> None:
        """Log everything that is not as it should be."""
        for line in self.remarks():
            logger.warning("%s", line)

    def remarks(self) -> list[str]:
        """What a reader of the metrics should know, one line each."""
        remarks = list(self.torn)
        for paths in self.files.without_rollouts:
            remarks.append(
                f"{paths.materialized_inputs} is there, but {paths.rollouts} is not: no rollout was collected"
            )
        if self.shards.missing:
            remarks.append(f"{len(self.shards.missing)} shards are not there: {listed(self.shards.missing)}")
        if self.identical_duplicates:
            remarks.append(f"{self.identical_duplicates} records are there more than once and count once")
        if self.different_duplicates:
            remarks.append(f"{self.different_duplicates} records gave way to another one of the same rollout")
        if self.without_agent:
            remarks.append(f"{self.without_agent} records name no agent (agent_ref.name) and are part of no metrics")
        if self.without_key:
            remarks.append(f"{self.without_key} records do not say which rollout they are (_ng_task_index)")
        if self.missing:
            remarks.append(self._missing_text())
        return remarks

    def _missing_text(self) -> str:
        assert self.expectations is not None
        keys = ", ".join(str(tuple(key)) for key in self.expectations.missing.first)
        named = "" if not keys else f" (task, rollout): {keys}" + (", …" if self.missing > keys.count("(") else "")
        return f"{self.missing} of the rollouts that were asked for have no result{named}"

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        known = self.expectations is not None and self.expectations.is_known
        return {
            "output_jsonl_fpath": str(self.paths.rollouts) if self.is_merged else None,
            "aggregate_metrics_fpath": None if self.metrics_path is None else str(self.metrics_path),
            "shards": [str(path) for path in self.files.shards],
            "excluded": {str(path): reason for path, reason in self.files.excluded},
            "records": self.records,
            "identical_duplicates": self.identical_duplicates,
            "different_duplicates": self.different_duplicates,
            "torn_tails": self.torn,
            "missing": self.missing if known else None,
            "missing_shards": [str(path) for path in self.shards.missing],
            "different_configs": self.differences,
            "remarks": self.remarks(),
            "offline": self.is_offline,
            "key_metrics": {of_agent.agent: of_agent.metrics.key_metrics for of_agent in self.metrics},
            "coverage": {of_agent.agent: of_agent.coverage for of_agent in self.metrics},
        }
