"""Data sets whose file is not there: refused with the command that makes it, or obtained."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.data.declared import DeclaredDataset
from nemo_gym.data.hub import Hub
from nemo_gym.data.prepare_scripts import Preparation, check_scripts, run_scripts
from nemo_gym.data.transfer import fetch_file, write_jsonl
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.keys import HF_TOKEN_KEY_NAME
from nemo_gym.paths import candidates
from nemo_gym.schemas.data_config import DataBackend, DataMode
from nemo_gym.schemas.datasets import BenchmarkDatasetConfig, DatasetConfig

logger = logging.getLogger(__name__)

_GITLAB_KEYS = ("mlflow_tracking_uri", "mlflow_tracking_token")


class MissingDatasetError(ConfigError, AssertionError):
    """Data sets that are declared but not there."""


def validate_backend_credentials(backend: DataBackend) -> tuple[bool, str]:
    """Whether the configuration has what a place to download from asks for, and if not, what is missing.

    Public data sets of the hub need no token.
    """
    config = _config()
    wanted = (HF_TOKEN_KEY_NAME,) if backend == "huggingface" else _GITLAB_KEYS
    lacking = [key for key in wanted if not config.get(key)]
    if not lacking:
        return True, ""
    name = "HuggingFace" if backend == "huggingface" else "GitLab"
    return False, f"{name} backend selected but missing credentials: set {', '.join(lacking)} in env.yaml"


def missing_of(datasets: Sequence[DeclaredDataset]) -> list[DeclaredDataset]:
    """Those whose file is not there, each file once."""
    missing = {str(dataset.config.jsonl_fpath): dataset for dataset in datasets if not dataset.path.is_file()}
    found = [dataset for dataset in datasets if str(dataset.config.jsonl_fpath) not in missing]
    for dataset in found:
        logger.info("Found: %s", dataset)
    return list(missing.values())


def obtain(
    missing: Sequence[DeclaredDataset], mode: DataMode, *, should_download: bool, data_source: DataBackend
) -> None:
    """Get every missing data set.

    Raises:
        MissingDatasetError: examples, which their author must write; or nothing may be downloaded; or nothing says
            from where.
    """
    if not missing:
        return
    listed = "".join(f"\n  {dataset}" for dataset in missing)
    if mode == "example_validation":
        raise MissingDatasetError(
            f"Missing:{listed}\nYou must provide the above missing example jsonl files ({_looked(missing)})"
        )
    if not should_download:
        raise MissingDatasetError(
            f"Missing local datasets:{listed}\nPass +should_download=true to get them ({_ways(missing)})"
        )
    for dataset in missing:
        _refuse_unobtainable(dataset, data_source)
    scripts = [
        Preparation(dataset.agent, dataset.config)
        for dataset in missing
        if isinstance(dataset.config, BenchmarkDatasetConfig)
    ]
    check_scripts(scripts)
    for dataset in missing:
        if isinstance(dataset.config, DatasetConfig):
            _download(dataset.config)
    run_scripts(scripts)


def _looked(missing: Sequence[DeclaredDataset]) -> str:
    first = missing[0].config.jsonl_fpath
    return f"looked for {', '.join(map(str, candidates(first)))}"


def _ways(missing: Sequence[DeclaredDataset]) -> str:
    scripted = any(isinstance(dataset.config, BenchmarkDatasetConfig) for dataset in missing)
    return "benchmarks by ng_prepare_benchmark, too" if scripted else "from their source"


def _refuse_unobtainable(dataset: DeclaredDataset, data_source: DataBackend) -> None:
    config = dataset.config
    if isinstance(config, BenchmarkDatasetConfig):
        return
    if config.huggingface_identifier is None and config.gitlab_identifier is None:
        raise MissingDatasetError(
            f"the data set {dataset} is not there and nothing says where to get it: write the file, or add "
            "`source: {type: huggingface, repo_id: ...}` to its declaration"
        )
    wants_gitlab = config.huggingface_identifier is None or (config.gitlab_identifier and data_source == "gitlab")
    if wants_gitlab:
        raise MissingDatasetError(
            f"the data set {dataset} is not there, and downloading from GitLab is not supported here: fetch it "
            "yourself, or name a Hugging Face source"
            + ("" if config.huggingface_identifier is None else " with +data_source=huggingface")
        )


def _download(config: DatasetConfig) -> None:
    source = config.huggingface_identifier
    assert source is not None
    target = Path(config.jsonl_fpath).expanduser()
    hub = configured_hub()
    logger.info("Downloading %s from %s", config.jsonl_fpath, source.repo_id)
    if source.artifact_fpath:
        fetch_file(hub, source.repo_id, source.artifact_fpath, target)
    else:
        write_jsonl(target, hub.rows(source.repo_id, config.type))


def configured_hub() -> Hub:
    """The hub with the token of this process's configuration, if it has one."""
    return Hub(token=_config().get(HF_TOKEN_KEY_NAME) or None)


def _config() -> Mapping[str, Any]:
    config: Mapping[str, Any] | None = maybe_get_global_config_dict()
    return {} if config is None else config
