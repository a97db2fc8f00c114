"""PUBLIC: data sets on the Hugging Face hub. The work is done in `nemo_gym.data`; needs the extra `hf`."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.data.hub import Hub, download_dataset, upload_dataset
from nemo_gym.jsonl import iter_lines
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.schemas.data_config import BaseUploadJsonlDatasetHuggingFaceConfig, DownloadJsonlDatasetHuggingFaceConfig

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["check_jsonl_format", "create_huggingface_client", "download_hf_dataset_as_jsonl", "upload_jsonl_dataset"]

logger = logging.getLogger(__name__)


def create_huggingface_client(token: str) -> "HfApi":
    """The hub's own client, logged in with `token`."""
    return Hub(token=token).api


def check_jsonl_format(file_path: str | Path) -> bool:
    """Whether every line is a JSON object with `responses_create_params`; what is not so is named in the log."""
    found = False
    for line in iter_lines(file_path):
        try:
            row = json.loads(line.content)
        except ValueError as error:
            logger.warning("%s, line %d is no JSON: %s", file_path, line.number, error)
            return False
        if not isinstance(row, dict) or RESPONSES_CREATE_PARAMS_KEY_NAME not in row:
            logger.warning("%s, line %d lacks %s", file_path, line.number, RESPONSES_CREATE_PARAMS_KEY_NAME)
            return False
        found = True
    return found


def download_hf_dataset_as_jsonl(config: DownloadJsonlDatasetHuggingFaceConfig) -> None:
    """Download what `ng_download_dataset_from_hf` downloads for these arguments."""
    for path in download_dataset(config, Hub(token=config.hf_token)):
        logger.info("wrote %s", path)


def upload_jsonl_dataset(config: BaseUploadJsonlDatasetHuggingFaceConfig) -> None:
    """Upload what `ng_upload_dataset_to_hf` uploads for these arguments.

    Raises:
        ConfigError: the file is not there, or rows of a train split lack what they need.
    """
    logger.info("uploaded: %s", upload_dataset(config, Hub(token=config.hf_token)))
