"""PUBLIC facade: metrics computed from rollouts.

The work is done in `nemo_gym.metrics`; programs and servers import the names from here.
"""

from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.metrics.pass_at_k import (
    add_avg_sample_std_dev,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    highest_k_metrics,
)
from nemo_gym.metrics.profile import RewardProfiler
from nemo_gym.schemas.metrics import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.schemas.reward_profile_config import RewardProfileConfig

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
]
