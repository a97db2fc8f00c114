"""`ng_download_dataset_from_hf`: fetch a data set from the Hugging Face hub."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.data_config import DownloadJsonlDatasetHuggingFaceConfig


@command(DownloadJsonlDatasetHuggingFaceConfig, needs_model=False, offline=True)
def main(config: DownloadJsonlDatasetHuggingFaceConfig) -> None:
    """Download a data set from the Hugging Face hub as JSON lines, or one of its files as it is.

    Needs the extra `hf`, and for Parquet files the extra `data`. HF_ENDPOINT names another hub.

    Examples:
        ng_download_dataset_from_hf +repo_id=openai/gsm8k +split=test +output_fpath=data/gsm8k_test.jsonl
        ng_download_dataset_from_hf +repo_id=my_org/my_data +output_dirpath=data
        ng_download_dataset_from_hf +repo_id=my_org/my_data +artifact_fpath=train.jsonl +output_fpath=data/train.jsonl
    """
    from nemo_gym.data.hub import Hub, download_dataset

    for path in download_dataset(config, Hub(token=config.hf_token)):
        print(path)
