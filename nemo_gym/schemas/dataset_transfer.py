"""Arguments of the commands that move data sets."""

from typing import Literal

from pydantic import model_validator

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class UploadJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Upload a JSONL data set to a GitLab model registry."""

    dataset_name: str
    version: str
    input_jsonl_fpath: str


class DownloadJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Download a JSONL data set from a GitLab model registry."""

    dataset_name: str
    version: str
    artifact_fpath: str
    output_fpath: str


class DeleteJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Delete a data set from a GitLab model registry."""

    dataset_name: str


class BaseUploadJsonlDatasetHuggingFaceConfig(BaseNeMoGymCLIConfig):
    """Upload a JSONL data set to the Hugging Face hub."""

    hf_token: str
    """Access token of the hub."""
    hf_organization: str
    """Organisation or user that owns the data set."""
    hf_collection_name: str
    """Collection the data set is added to."""
    hf_collection_slug: str
    """Trailing part of the collection's address."""
    input_jsonl_fpath: str
    """File to upload."""
    resource_config_path: str
    """Config of the resources server the data belongs to; its domain becomes part of the name."""
    dataset_name: str | None = None
    """Name of the data set; the resources server's folder name when unset."""
    hf_dataset_prefix: str = "Nemotron-RL"
    """First part of the repository's name."""
    split: Literal["train", "validation", "test"] = "train"
    """Which split the file is."""
    create_pr: bool = False
    """Propose the upload as a pull request instead of committing it."""
    revision: str | None = None
    """Branch to commit to."""
    commit_message: str | None = None
    """Message of the commit."""
    commit_description: str | None = None
    """Body of the commit's message."""


class UploadJsonlDatasetHuggingFaceConfig(BaseUploadJsonlDatasetHuggingFaceConfig):
    """Upload a JSONL data set to the Hugging Face hub and keep it elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _never_deletes(cls, data: object) -> object:
        if isinstance(data, dict) and "delete_from_gitlab" in data:
            raise ValueError("Forbidden fields present: delete_from_gitlab belongs to ng_gitlab_to_hf_dataset")
        return data


class UploadJsonlDatasetHuggingFaceMaybeDeleteConfig(BaseUploadJsonlDatasetHuggingFaceConfig):
    """Upload a JSONL data set to the Hugging Face hub, then delete it from GitLab if asked to."""

    delete_from_gitlab: bool = False
    """Delete the data set from GitLab after the upload."""


class DownloadJsonlDatasetHuggingFaceConfig(BaseNeMoGymCLIConfig):
    """Download a JSONL data set from the Hugging Face hub."""

    repo_id: str
    """Repository of the data set, `<owner>/<name>`."""
    artifact_fpath: str | None = None
    """A raw file of the repository to fetch as it is."""
    output_dirpath: str | None = None
    """Folder to write `<split>.jsonl` files to."""
    output_fpath: str | None = None
    """File to write to."""
    hf_token: str | None = None
    """Access token, for private data sets."""
    split: Literal["train", "validation", "test"] | None = None
    """Split to load; all of them when unset."""

    @model_validator(mode="after")
    def _one_destination(self) -> "DownloadJsonlDatasetHuggingFaceConfig":
        if bool(self.output_dirpath) == bool(self.output_fpath):
            raise ValueError("give exactly one of `output_dirpath` and `output_fpath`")
        if self.artifact_fpath and self.split:
            raise ValueError("`artifact_fpath` names a file and `split` a part of the data set: give one of them")
        if self.output_fpath and not (self.split or self.artifact_fpath):
            raise ValueError("`output_fpath` takes one file: name it with `split` or `artifact_fpath`")
        return self
