"""`+executor=local`: this process collects, from servers that run already or that it starts."""

from nemo_gym import runtime
from nemo_gym.collect.summary import RunSummary
from nemo_gym.executors.base import Job
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig


class LocalExecutor:
    """Everything on this machine."""

    def collect(self, config: RolloutCollectionConfig, job: Job) -> RunSummary:
        """Collect rollouts from servers that run already."""
        return runtime.run(RolloutCollectionHelper().collect(config, job.command))

    def collect_prepared(self, config: E2ERolloutCollectionConfig, job: Job) -> RunSummary | None:
        """Prepare the data, start the servers, collect, stop; None after a dry run."""
        from nemo_gym.launch.end_to_end import run_end_to_end  # with all that servers need

        return run_end_to_end(config, job.global_config, job.command)
