"""Arguments of the commands that prepare data sets and benchmarks."""

from typing import Any, Literal

from pydantic import Field

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig

DataMode = Literal["train_preparation", "example_validation"]
DataBackend = Literal["gitlab", "huggingface"]


class TrainDataProcessorConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_prepare_data`."""

    output_dirpath: str = Field(min_length=1)
    """Folder for one file of rows and one of metrics per kind of data set."""
    mode: DataMode
    """train_preparation takes the train, validation and benchmark data sets of the configured agents,
    example_validation their examples."""
    should_download: bool = False
    """Get what is missing: download data sets from their source, run the prepare script of benchmarks."""
    data_source: DataBackend = "huggingface"
    """Where to download a data set from that names both sources."""
    overwrite_metrics_conflicts: bool = False
    """Replace metrics files that disagree with the data instead of ending with an error."""
    keep_offending_rows: bool = False
    """Write rows that cannot be rolled out like all others, and only leave them out of the metrics."""


class ListBenchmarksConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_list_benchmarks`."""

    query: str | None = None
    """Show only benchmarks whose name, domain, description, agent or environment is like this."""
    json_format: bool = Field(False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON list instead of a table."""


class PrepareBenchmarkConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_prepare_benchmark`."""

    use_cached_prepared_benchmarks: bool = False
    """Leave benchmarks alone whose data is there already."""
    num_prepare_benchmark_processes: int = Field(1, ge=1)
    """How many benchmarks are prepared at the same time."""
    prepare_script_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the `prepare` function of the scripts."""
    source: str | None = None
    """Prepare from this local file instead of downloading; for one benchmark at a time."""
