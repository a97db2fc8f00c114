"""PUBLIC: preparing the data sets that agents declare, as a story.

`TrainDataProcessor.run` finds the data sets in scope, gets what is missing, checks and measures every
row, and writes one file per kind of data. Rows that cannot be rolled out end it before anything is
written. The steps live in `nemo_gym.data`.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, PrivateAttr

from nemo_gym.data.accumulators import AvgMinMax, DatasetMetrics, StringMetrics
from nemo_gym.data.collation import by_type, collate, write_dataset_metrics
from nemo_gym.data.declared import TYPES_OF_MODE, DataType, DeclaredDataset, agents_in_scope, datasets_of
from nemo_gym.data.metrics_files import MetricsConflictError, MetricsFiles
from nemo_gym.data.missing import MissingDatasetError, missing_of, obtain, validate_backend_credentials
from nemo_gym.data.samples import OffendingRowsError, examine, refuse_offences
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.data_config import TrainDataProcessorConfig
from nemo_gym.schemas.server_config import ServerInstanceConfig

__all__ = [
    "AvgMinMax",
    "DatasetMetrics",
    "MetricsConflictError",
    "MissingDatasetError",
    "OffendingRowsError",
    "StringMetrics",
    "TrainDataProcessor",
    "TrainDataProcessorConfig",
    "validate_backend_credentials",
]

logger = logging.getLogger(__name__)

MetricsByType = dict[DataType, DatasetMetrics]


class NoDatasetsError(ConfigError, ValueError):
    """No agent declares a data set of the kind that is wanted."""


class TrainDataProcessor(BaseModel):
    """Prepares data sets; its steps may be called one by one."""

    types: tuple[DataType, ...] | None = None
    """Only data sets of these types; those of the mode when unset."""
    agent_name: str | None = None
    """Only data sets of this agent; of all when unset."""
    prompt_config: str | None = None
    """A prompt file that takes the place of those the data sets declare; their metrics files are then left aside."""
    replaces_output: bool = False
    """Forget the combined metrics of an earlier preparation instead of comparing with them."""
    _written: list[Path] = PrivateAttr(default_factory=list)

    def run(self, global_config: Any) -> list[Path]:
        """Prepare the data sets of a configuration, which also holds the options; every file written.

        Raises:
            ConfigError: a data set is missing or rows cannot be rolled out, and nothing was written; or metrics are in
                conflict with those of an earlier preparation.
        """
        config = TrainDataProcessorConfig.model_validate(_options(global_config))
        logger.info("== Load and validate server instance configs")
        agents = self.load_and_validate_server_instance_configs(config, global_config)
        logger.info("== Load datasets")
        self.load_datasets(config, agents)
        logger.info("== Validate samples and aggregate metrics")
        metrics = self.validate_samples_and_aggregate_metrics(
            agents, config.overwrite_metrics_conflicts, config.keep_offending_rows
        )
        logger.info("== Collate samples")
        self.collate_samples(config, agents, metrics)
        return self._written

    def load_and_validate_server_instance_configs(
        self, config: TrainDataProcessorConfig, global_config: Any
    ) -> list[ServerInstanceConfig]:
        """The agents with a data set in scope, and with no others."""
        types = self.types or TYPES_OF_MODE[config.mode]
        agents = agents_in_scope(global_config, types)
        wanted = [agent for agent in agents if self.agent_name in (None, agent.name)]
        if not wanted:
            of_agent = f" of the agent {self.agent_name!r}" if self.agent_name else ""
            raise NoDatasetsError(
                f"the configuration declares no data set{of_agent} of the type {' or '.join(types)}; name the config "
                "of an environment or benchmark that does, or add one to `datasets` of an agent"
            )
        return wanted

    def load_datasets(self, config: TrainDataProcessorConfig, agents: Sequence[ServerInstanceConfig]) -> None:
        """Make sure that every data set is there, getting what is missing if that is allowed."""
        missing = missing_of(list(self._datasets(agents)))
        obtain(missing, config.mode, should_download=config.should_download, data_source=config.data_source)

    def validate_samples_and_aggregate_metrics(
        self,
        agents: Sequence[ServerInstanceConfig],
        overwrite_metrics_conflicts: bool = False,
        keep_offending_rows: bool = False,
    ) -> MetricsByType:
        """Check and measure all rows, then write the metrics beside each data set; the metrics by type.

        Raises:
            OffendingRowsError: rows cannot be rolled out; nothing was written.
            MetricsConflictError: metrics files say something else, and are not to be overwritten.
        """
        datasets = list(self._datasets(agents))
        examined = [examine(dataset) for dataset in datasets]
        refuse_offences(examined, keep=keep_offending_rows)
        files = MetricsFiles(overwrite_metrics_conflicts)
        metrics: MetricsByType = {}
        for dataset, of_dataset in zip(datasets, examined, strict=True):
            if of_dataset.offending:
                logger.warning("%d rows of %s are kept but not measured", of_dataset.offending, dataset)
            if self.prompt_config is None:
                write_dataset_metrics(dataset, of_dataset.metrics, files)
            metrics.setdefault(dataset.config.type, DatasetMetrics()).add(of_dataset.metrics)
        self._written += files.written
        files.settle()
        return metrics

    def collate_samples(
        self,
        config: TrainDataProcessorConfig,
        agents: Sequence[ServerInstanceConfig],
        metrics: MetricsByType,
    ) -> None:
        """Write one file of rows per type, and what each data set contributes to it.

        Raises:
            MetricsConflictError: the metrics of a type say something else than before; its rows were not written.
        """
        files = MetricsFiles(config.overwrite_metrics_conflicts)
        folder = Path(config.output_dirpath).expanduser()
        for data_type, group in by_type(self._datasets(agents), get_args(DataType)).items():
            if data_type not in metrics:
                continue
            if self.replaces_output:
                (folder / f"{data_type}_metrics.json").unlink(missing_ok=True)
            self._written += collate(data_type, group, metrics[data_type], folder, files)
        self._written += files.written
        files.settle()

    def _datasets(self, agents: Iterable[ServerInstanceConfig]) -> Iterable[DeclaredDataset]:
        return datasets_of(agents, self.prompt_config)


def _options(global_config: Any) -> dict[str, Any]:
    return {name: global_config[name] for name in TrainDataProcessorConfig.model_fields if name in global_config}
