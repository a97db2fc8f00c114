"""Data sets: `ng_prepare_data`, `ng_prepare_benchmark`, `ng_materialize_prompts`, and those of the Hugging Face hub."""

from nemo_gym import prompt
from nemo_gym.benchmarks import prepare_benchmarks
from nemo_gym.cli.config import whole_config
from nemo_gym.cli.workloads import NotOfferedConfig
from nemo_gym.data.hub import Hub, download_dataset, upload_dataset
from nemo_gym.errors import ConfigError
from nemo_gym.prompt import MaterializePromptsConfig
from nemo_gym.schemas.data_config import (
    DownloadJsonlDatasetHuggingFaceConfig,
    PrepareBenchmarkConfig,
    TrainDataProcessorConfig,
    UploadJsonlDatasetHuggingFaceConfig,
)
from nemo_gym.train_data_utils import TrainDataProcessor


def prepare_data(config: TrainDataProcessorConfig) -> None:
    """`ng_prepare_data`."""
    from nemo_gym.launch.server_checks import OfflineRowCheck  # with aiohttp

    everything = whole_config()
    for path in TrainDataProcessor(row_check=OfflineRowCheck(everything)).run(everything):
        print(path)


def prepare_benchmark(config: PrepareBenchmarkConfig) -> None:
    """`ng_prepare_benchmark`."""
    for name, path in prepare_benchmarks(whole_config(), config).items():
        print(f"{name}: {path}")


def materialize_prompts(config: MaterializePromptsConfig) -> None:
    """`ng_materialize_prompts`."""
    count = prompt.materialize_prompts(config.input_jsonl_fpath, config.prompt_config, config.output_jsonl_fpath)
    print(f"{count} rows with their prompts are in {config.output_jsonl_fpath}")


def download_dataset_from_hf(config: DownloadJsonlDatasetHuggingFaceConfig) -> None:
    """`ng_download_dataset_from_hf`."""
    for path in download_dataset(config, Hub(token=config.hf_token)):
        print(path)


def upload_dataset_to_hf(config: UploadJsonlDatasetHuggingFaceConfig) -> None:
    """`ng_upload_dataset_to_hf`."""
    print(upload_dataset(config, Hub(token=config.hf_token)))


def no_gitlab(config: NotOfferedConfig) -> None:
    """`gym dataset`."""
    raise ConfigError(
        "data sets are not uploaded to or downloaded from GitLab here; use --storage hf, or fetch the file yourself "
        "and name it as jsonl_fpath (gym dataset rm and gym dataset migrate do speak to a registry)"
    )
