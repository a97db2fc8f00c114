"""`ng_upload_dataset_to_hf`: publish a data set on the Hugging Face hub."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.data_config import UploadJsonlDatasetHuggingFaceConfig


@command(UploadJsonlDatasetHuggingFaceConfig, needs_model=False, offline=True)
def main(config: UploadJsonlDatasetHuggingFaceConfig) -> None:
    r"""Upload a JSONL file as a split of a data set on the Hugging Face hub, and add the data set to a collection.

    The data set is called <hf_organization>/<hf_dataset_prefix>-<domain>-<dataset_name>, where domain, and name if none
    is given, are those of the resources server in resource_config_path. It is made, private, if it does not exist.
    Needs the extra `hf`. HF_ENDPOINT names another hub.

    Examples:
        ng_upload_dataset_to_hf +input_jsonl_fpath=data/train.jsonl +hf_organization=my_org +hf_token=... \
            +resource_config_path=resources_servers/my_env/configs/my_env.yaml \
            "+hf_collection_name=My environments" +hf_collection_slug=6512a0
    """
    from nemo_gym.data.hub import Hub, upload_dataset

    print(upload_dataset(config, Hub(token=config.hf_token)))
