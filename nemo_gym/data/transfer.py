"""Data sets to and from the Hugging Face hub, as the two commands do it."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.config.yaml_text import load_yaml
from nemo_gym.data.hub import SPLITS, Hub, HubConfigError, explained
from nemo_gym.data.metrics_files import writing_to
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, listed
from nemo_gym.jsonl import to_line
from nemo_gym.keys import RESOURCES_TYPE, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.paths import resolve_for_reading
from nemo_gym.row_files import is_plain, read_rows
from nemo_gym.schemas.dataset_transfer import (
    BaseUploadJsonlDatasetHuggingFaceConfig,
    DownloadJsonlDatasetHuggingFaceConfig,
)

logger = logging.getLogger(__name__)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, the file as a whole or not at all; how many there were."""
    count = 0
    with writing_to(path) as file:
        for row in rows:
            file.write(to_line(row))
            count += 1
    return count


def fetch_file(hub: Hub, repo_id: str, artifact: str, target: Path) -> None:
    """Copy a file of a data set as it is."""
    source = hub.file(repo_id, artifact)
    with writing_to(target) as file, source.open("rb") as downloaded:
        shutil.copyfileobj(downloaded, file)


def download_dataset(config: DownloadJsonlDatasetHuggingFaceConfig, hub: Hub) -> list[Path]:
    """Download what the command asks for; the files that were written."""
    if config.artifact_fpath:
        folder = Path(config.output_dirpath or "")
        target = Path(config.output_fpath) if config.output_fpath else folder / Path(config.artifact_fpath).name
        fetch_file(hub, config.repo_id, config.artifact_fpath, target)
        return [target]
    if config.output_fpath and config.split:
        return [_download_split(hub, config.repo_id, config.split, Path(config.output_fpath))]
    folder = Path(config.output_dirpath or "")
    splits = [config.split] if config.split else [each for each in SPLITS if hub.split_files(config.repo_id, each)]
    if not splits:
        raise HubConfigError(
            f"no file of {config.repo_id} looks like a split; its files: {listed(hub.files(config.repo_id))}. "
            "Name the one you want with +artifact_fpath=<path>"
        )
    return [_download_split(hub, config.repo_id, split, folder / f"{split}.jsonl") for split in splits]


def _download_split(hub: Hub, repo_id: str, split: str, target: Path) -> Path:
    count = write_jsonl(target, hub.rows(repo_id, split))
    logger.info("%s: %d rows of the split %r of %s", target, count, split, repo_id)
    return target


def upload_dataset(config: BaseUploadJsonlDatasetHuggingFaceConfig, hub: Hub) -> str:
    """Upload a file, making the repository and adding it to the collection where needed; the address of the commit."""
    source = resolve_for_reading(config.input_jsonl_fpath, Path.is_file)
    if not source.is_file():
        raise ConfigPathNotFoundError(f"input file {config.input_jsonl_fpath!r} not found (looked for {source})")
    if config.split == "train":
        _require_params(source)
    repo_id = repo_id_of(config)
    with explained(f"the data set {repo_id}", "written to"):
        hub.api.create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)
        commit = hub.api.upload_file(
            path_or_fileobj=source if is_plain(source) else b"".join(to_line(row) for _, row in read_rows(source)),
            path_in_repo=f"{config.split}.jsonl",
            repo_id=repo_id,
            repo_type="dataset",
            revision=config.revision,
            create_pr=config.create_pr,
            commit_message=config.commit_message,
            commit_description=config.commit_description,
        )
        hub.api.add_collection_item(collection_of(config), repo_id, "dataset", exists_ok=True)
    return commit.pr_url or commit.commit_url


def repo_id_of(config: BaseUploadJsonlDatasetHuggingFaceConfig) -> str:
    """`<organisation>/<prefix>-<domain>-<name>`, without the parts that are empty."""
    implementation, domain = _resources_server(config.resource_config_path)
    parts = [config.hf_dataset_prefix, domain.lower(), config.dataset_name or implementation]
    return f"{config.hf_organization}/{'-'.join(part for part in parts if part)}"


def collection_of(config: BaseUploadJsonlDatasetHuggingFaceConfig) -> str:
    """The collection as the hub addresses it."""
    name = config.hf_collection_name.lower().replace(" ", "-")
    return f"{config.hf_organization}/{name}-{config.hf_collection_slug}"


def _resources_server(config_path: str) -> tuple[str, str]:
    """The folder name and the domain of the resources server that a config file defines."""
    path = resolve_for_reading(config_path, Path.is_file)
    if not path.is_file():
        raise ConfigPathNotFoundError(f"resource_config_path {config_path!r} not found (looked for {path})")
    for block in load_yaml(path).values():
        servers = block.get(RESOURCES_TYPE) if isinstance(block, Mapping) else None
        for implementation, inner in (servers or {}).items():
            return str(implementation), str((inner or {}).get("domain") or "")
    raise ConfigError(f"{path} defines no resources server, whose domain and name go into the repository's name")


def _require_params(source: Path) -> None:
    lacking = [line.number for line, row in read_rows(source) if RESPONSES_CREATE_PARAMS_KEY_NAME not in row]
    if lacking:
        raise ConfigError(
            f"{source} is not uploaded: rows of a train split need {RESPONSES_CREATE_PARAMS_KEY_NAME}, which lines "
            f"{listed(lacking)} lack"
        )
