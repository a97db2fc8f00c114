"""Data set declarations in server configs, and the arguments of the commands that move data sets."""

import warnings
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig

DatasetType = Literal["train", "validation", "example"]
License = Literal[
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
]


class JsonlDatasetGitlabIdentifer(BaseModel):
    """A data set in a GitLab model registry."""

    dataset_name: str
    version: str
    artifact_fpath: str


class JsonlDatasetHuggingFaceIdentifer(BaseModel):
    """A data set on the Hugging Face hub; without `artifact_fpath` it is loaded by split."""

    repo_id: str
    artifact_fpath: str | None = None


class GitlabDatasetSource(JsonlDatasetGitlabIdentifer):
    """`source:` block of a GitLab data set."""

    type: Literal["gitlab"]


class HuggingFaceDatasetSource(JsonlDatasetHuggingFaceIdentifer):
    """`source:` block of a Hugging Face data set."""

    type: Literal["huggingface"]


DatasetSource = Annotated[GitlabDatasetSource | HuggingFaceDatasetSource, Field(discriminator="type")]


class DatasetConfig(BaseModel):
    """A JSONL data set of an agent: where it is, where it comes from, under which licence."""

    name: str
    type: DatasetType
    jsonl_fpath: str
    num_repeats: int = Field(default=1, ge=1)
    source: DatasetSource | None = None
    gitlab_identifier: JsonlDatasetGitlabIdentifer | None = None
    huggingface_identifier: JsonlDatasetHuggingFaceIdentifer | None = None
    license: License | None = None

    @model_validator(mode="after")
    def _license_for_data_that_trains(self) -> "DatasetConfig":
        if self.license is None and self.type in ("train", "validation"):
            raise ValueError(f"A license is required for {self.type} data sets: add `license` to {self.name!r}")
        return self

    @model_validator(mode="after")
    def _one_source_in_both_spellings(self) -> "DatasetConfig":
        identifiers = [self.gitlab_identifier, self.huggingface_identifier]
        if self.source is None:
            self._mirror_identifier()
        elif any(identifiers):
            raise ValueError(f"Specify a dataset source once: {self.name!r} has `source` and an identifier")
        elif isinstance(self.source, GitlabDatasetSource):
            self.gitlab_identifier = JsonlDatasetGitlabIdentifer(**self.source.model_dump(exclude={"type"}))
        else:
            self.huggingface_identifier = JsonlDatasetHuggingFaceIdentifer(**self.source.model_dump(exclude={"type"}))
        return self

    def _mirror_identifier(self) -> None:
        gitlab, huggingface = self.gitlab_identifier, self.huggingface_identifier
        if gitlab is None and huggingface is None:
            return
        warnings.warn(
            f"data set {self.name!r}: `gitlab_identifier`, `huggingface_identifier` are the old spelling of `source`",
            DeprecationWarning,
            stacklevel=2,
        )
        if gitlab is not None and huggingface is None:
            self.source = GitlabDatasetSource(type="gitlab", **gitlab.model_dump())
        elif huggingface is not None and gitlab is None:
            self.source = HuggingFaceDatasetSource(type="huggingface", **huggingface.model_dump())


class BenchmarkDatasetConfig(BaseModel):
    """A benchmark's data: raw rows written by `prepare_script`, turned into prompts by `prompt_config`."""

    name: str
    type: Literal["benchmark"]
    jsonl_fpath: Path
    prepare_script: Path
    prompt_config: Path | None = None
    num_repeats: int = Field(default=1, ge=1)


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
