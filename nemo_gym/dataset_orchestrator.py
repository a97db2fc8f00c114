"""PUBLIC: moving data sets between a GitLab model registry and the Hugging Face hub, and deleting them.

A registry speaks MLflow's REST API; its address and token are `mlflow_tracking_uri` and `mlflow_tracking_token`.
"""

import json
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from importlib import import_module
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pydantic import BaseModel

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.hf_utils import upload_jsonl_dataset
from nemo_gym.schemas.data_config import (
    DeleteJsonlDatasetGitlabConfig,
    UploadJsonlDatasetHuggingFaceConfig,
    UploadJsonlDatasetHuggingFaceMaybeDeleteConfig,
)

__all__ = [
    "delete_jsonl_dataset_from_gitlab",
    "delete_jsonl_dataset_from_gitlab_cli",
    "download_jsonl_dataset_from_hf_cli",
    "upload_jsonl_dataset_to_hf_and_delete_gitlab_cli",
    "upload_jsonl_dataset_to_hf_cli",
    "upload_jsonl_dataset_to_hf_maybe_delete",
]

logger = logging.getLogger(__name__)

_ADDRESS_KEY, _TOKEN_KEY = "mlflow_tracking_uri", "mlflow_tracking_token"
_DELETE_PATH = "/api/2.0/mlflow/registered-models/delete"
_TIMEOUT_S = 60.0

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class RegistryError(GymError):
    """The registry does not answer, or not as it should."""


def delete_jsonl_dataset_from_gitlab(gitlab_model_name: str) -> None:
    """Delete a data set with all its versions, if whoever sits at the terminal agrees.

    Raises:
        ConfigError: the registry's address or token is not configured, or it has no such data set.
        RegistryError: it does not answer, or refuses.
    """
    address, token = _registry()
    sys.stdout.write(f"Delete the data set {gitlab_model_name!r} from {address}? [y/N]: ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        logger.info("%r was not deleted", gitlab_model_name)
        return
    _delete(gitlab_model_name, address, token)
    logger.info("deleted %r", gitlab_model_name)


def upload_jsonl_dataset_to_hf_maybe_delete(
    config: UploadJsonlDatasetHuggingFaceMaybeDeleteConfig | UploadJsonlDatasetHuggingFaceConfig,
    delete_from_gitlab: bool = False,
) -> None:
    """Upload a data set to the hub and then, if asked to here or by `config`, delete it from the registry."""
    is_to_go = delete_from_gitlab or getattr(config, "delete_from_gitlab", False)
    name = config.dataset_name
    if is_to_go and not name:
        raise ConfigError("deleting from GitLab needs the data set's name: pass +dataset_name=<name>")
    upload_jsonl_dataset(config)
    if is_to_go and name:
        delete_jsonl_dataset_from_gitlab(name)


def upload_jsonl_dataset_to_hf_cli() -> None:
    """What `ng_upload_dataset_to_hf` does."""
    _run_script("upload_dataset_to_hf")


def download_jsonl_dataset_from_hf_cli() -> None:
    """What `ng_download_dataset_from_hf` does."""
    _run_script("download_dataset_from_hf")


def upload_jsonl_dataset_to_hf_and_delete_gitlab_cli() -> None:
    """Upload, then delete: the arguments are those of this process."""
    _run(UploadJsonlDatasetHuggingFaceMaybeDeleteConfig, lambda config: _move(config), "gym dataset migrate")


def delete_jsonl_dataset_from_gitlab_cli() -> None:
    """Delete a data set from the registry: the arguments are those of this process."""
    _run(
        DeleteJsonlDatasetGitlabConfig,
        lambda config: delete_jsonl_dataset_from_gitlab(config.dataset_name),
        "gym dataset rm",
    )


def _move(config: UploadJsonlDatasetHuggingFaceMaybeDeleteConfig) -> None:
    upload_jsonl_dataset_to_hf_maybe_delete(config, delete_from_gitlab=True)


def _run_script(name: str) -> None:
    import_module("nemo_gym.cli").run_command(name)


def _run(config_class: type[ConfigT], main: Callable[[ConfigT], None], name: str) -> None:
    wrap = import_module("nemo_gym.cli.command").command(config_class, name=name, needs_model=False, offline=True)
    command = wrap(main)
    command.flags = {"dataset_name": "--name", "input_jsonl_fpath": "--input"}
    command()


def _registry() -> tuple[str, str]:
    config = get_global_config_dict()
    missing = [key for key in (_ADDRESS_KEY, _TOKEN_KEY) if not config.get(key)]
    if missing:
        raise ConfigError(f"the GitLab registry needs {' and '.join(missing)}: put them into env.yaml")
    address = str(config[_ADDRESS_KEY]).rstrip("/")
    if urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"{_ADDRESS_KEY} is {address!r}: it must begin with https:// or http://")
    return address, str(config[_TOKEN_KEY])


def _delete(name: str, address: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps({"name": name}).encode()
    request = Request(f"{address}{_DELETE_PATH}", body, headers, method="DELETE")
    try:
        with urlopen(request, timeout=_TIMEOUT_S):
            return
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            raise ConfigError(f"there is no data set {name!r} at {address}") from error
        raise RegistryError(f"{address} refuses to delete {name!r}: {error.code} {error.reason}") from error
    except (URLError, OSError) as error:
        raise RegistryError(f"{address} cannot be reached to delete {name!r}: {error}") from error
