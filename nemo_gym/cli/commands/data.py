"""Data sets: `ng_prepare_data`, `ng_prepare_benchmark`, `ng_materialize_prompts`, those of the Hugging Face hub.

`ng_export` makes one of rollouts, for training.
"""

import json
import logging

from nemo_gym import prompt
from nemo_gym.benchmarks import prepare_benchmarks
from nemo_gym.cli.config import whole_config
from nemo_gym.cli.workloads import NotOfferedConfig
from nemo_gym.data.hub import Hub, download_dataset, push_file, upload_dataset
from nemo_gym.errors import ConfigError
from nemo_gym.prompt import MaterializePromptsConfig
from nemo_gym.runs.export import export_rollouts
from nemo_gym.schemas.cli_config import ExportConfig
from nemo_gym.schemas.data_config import (
    DownloadJsonlDatasetHuggingFaceConfig,
    PrepareBenchmarkConfig,
    TrainDataProcessorConfig,
    UploadJsonlDatasetHuggingFaceConfig,
)
from nemo_gym.train_data_utils import TrainDataProcessor

logger = logging.getLogger(__name__)

_CHOOSING = ("where", "filter", "min_reward")


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


def export(config: ExportConfig) -> None:
    """`ng_export`."""
    summary = export_rollouts(config)
    if config.push_to_hub is not None:
        summary.pushed_to = push_file(Hub(token=config.hf_token), config.push_to_hub, summary.path, config.hub_split)
    if not summary.examples:
        asked = {f"+{name}={getattr(config, name)}" for name in _CHOOSING if getattr(config, name) is not None}
        why = f"nothing passed {' and '.join(sorted(asked))}" if asked else "there was nothing to export"
        logger.warning("%s: %s is empty", why, summary.path)
    if config.json_format:
        print(json.dumps(summary.as_json()))
        return
    if config.format == "dataset":
        print(f"{summary.tasks} tasks are in {summary.path}")
    else:
        print(f"{summary.examples} examples of {summary.tasks} tasks are in {summary.path}")
    for reason, count in summary.left_out.most_common():
        print(f"Left out: {count} rollouts ({reason})")
    for note, count in summary.notes.most_common():
        print(f"Changed: {count} rollouts ({note})")
    if summary.pushed_to is not None:
        print(f"Uploaded: {summary.pushed_to}")
