"""PUBLIC: metrics computed from rollouts.

The work is done in `nemo_gym.metrics`; programs and servers import the names from here. Histograms and data frames
are for those who work with them: W&B and pandas are loaded when one is asked for.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from nemo_gym.keys import AGENT_REF_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.metrics.columns import RolloutTable, SortedRollouts
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.metrics.pass_at_k import (
    add_avg_sample_std_dev,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    highest_k_metrics,
)
from nemo_gym.metrics.profile import STATISTICS, Record
from nemo_gym.metrics.profile import RewardProfiler as _RewardProfiler
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.schemas.cli_config import RewardProfileConfig

__all__ = [
    "AggregateMetrics",
    "AggregateMetricsMixin",
    "AggregateMetricsRequest",
    "RewardProfileConfig",
    "RewardProfiler",
    "add_avg_sample_std_dev",
    "compute_aggregate_metrics",
    "compute_pass_majority_metrics",
    "compute_subset_metrics",
    "highest_k_metrics",
    "reward_profile",
]

_SAMPLE = "sample"
_BINS = 64


class RewardProfiler(_RewardProfiler):
    """Profiles results against materialized rows, with a W&B histogram of every number (`histogram/<field>`)."""

    def profile_from_data(
        self,
        rows: Sequence[Record],
        results: Sequence[Record],
        allow_partial_rollouts: bool = False,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """As without histograms, and these after the statistics; they exist in memory only."""
        groups, agents = super().profile_from_data(rows, results, allow_partial_rollouts)
        pairs = self.align_rows_and_results(rows, results, allow_partial_rollouts)
        of_task: dict[Any, list[Any]] = {}
        of_agent: dict[Any, list[Any]] = {}
        for row, result in pairs:
            of_task.setdefault(result[TASK_INDEX_KEY_NAME], []).append(result)
            of_agent.setdefault((row.get(AGENT_REF_KEY_NAME) or {}).get("name"), []).append(result)
        return (
            [self._with_histograms(each, of_task[each[TASK_INDEX_KEY_NAME]], _SAMPLE) for each in groups],
            [
                self._with_histograms(each, of_agent[each[AGENT_REF_KEY_NAME]["name"]], AGENT_REF_KEY_NAME)
                for each in agents
            ],
        )

    def rollout_info_from_result(self, result: Record) -> dict[str, Any]:
        """What a profile tells about one rollout: its key, its reward and its other numbers."""
        table = RolloutTable()
        if not table.add(result):
            raise KeyError(f"a result needs {TASK_INDEX_KEY_NAME} and a rollout index, which must be integers")
        return next(SortedRollouts(table).iter_infos())

    def histogram(self, data: Any) -> Any:
        """A W&B histogram of the numbers in `data`; None when there are none."""
        from wandb import Histogram

        values = np.asarray(data, np.float64)
        values = values[np.isfinite(values)]
        if not len(values):
            return None
        try:
            counted = np.histogram(values, bins=_BINS)
        except ValueError:  # numbers too close together for so many
            counted = np.histogram(values, bins=[values.min(), np.nextafter(values.max(), np.inf)])
        return Histogram(np_histogram=counted)

    def describe_dataframe(self, df: Any) -> Any:
        """Rows of statistics (mean, max, min, median, std, histogram) over the columns of `df`.

        Where no column has a defined std, it is 0 for those without gaps.
        """
        from pandas import DataFrame

        described = {name: getattr(df, name)() for name in STATISTICS}
        if described["std"].isna().all():
            described["std"] = described["std"].where(df.isna().any(), 0.0)
        described["histogram"] = df.apply(lambda column: self.histogram(column.dropna()))
        return DataFrame(described).T

    def calculate_metrics_single_df(self, grouped_df: Any) -> list[dict[str, Any]]:
        """For every group the key it is grouped by, and `<statistic>/<column>` of its columns that have values."""
        metrics = []
        for key, group in grouped_df:
            names = grouped_df.grouper.names if hasattr(grouped_df, "grouper") else grouped_df._grouper.names
            keys = dict(zip(names, key if isinstance(key, tuple) else (key,), strict=True))
            described = self.describe_dataframe(
                group.drop(columns=list(keys), errors="ignore").dropna(axis=1, how="all")
            )
            numbers = {
                f"{statistic}/{column}": value
                for statistic, of_columns in described.iterrows()
                for column, value in of_columns.items()
                if value is not None and value == value
            }
            metrics.append({**keys, **numbers})
        return metrics

    def _with_histograms(self, profile: dict[str, Any], results: Sequence[Record], before: str) -> dict[str, Any]:
        table = RolloutTable()
        for result in results:
            table.add(result)
        histograms = {
            f"histogram/{column.name}": drawn
            for column in SortedRollouts(table).columns
            if (drawn := self.histogram(column.values)) is not None
        }
        rest = {key: profile.pop(key) for key in list(profile)[list(profile).index(before) :]}
        return {**profile, **histograms, **rest}


def reward_profile() -> None:
    """What `ng_reward_profile` does."""
    import_module("nemo_gym.cli").run_command("reward_profile")
