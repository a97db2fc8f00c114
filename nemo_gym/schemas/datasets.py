"""Data set declarations in server configs."""

import warnings
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

    model_config = ConfigDict(defer_build=True)

    dataset_name: str
    version: str
    artifact_fpath: str


class JsonlDatasetHuggingFaceIdentifer(BaseModel):
    """A data set on the Hugging Face hub; without `artifact_fpath` it is loaded by split."""

    model_config = ConfigDict(defer_build=True)

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

    model_config = ConfigDict(defer_build=True)

    name: str
    type: DatasetType
    jsonl_fpath: str
    num_repeats: int = Field(default=1, ge=1)
    source: DatasetSource | None = None
    gitlab_identifier: JsonlDatasetGitlabIdentifer | None = None
    huggingface_identifier: JsonlDatasetHuggingFaceIdentifer | None = None
    license: License | None = None

    @model_validator(mode="after")
    def check_train_validation_sets(self) -> "DatasetConfig":
        """Data that trains has a licence."""
        if self.license is None and self.type in ("train", "validation"):
            raise ValueError(f"A license is required for {self.type} data sets: add `license` to {self.name!r}")
        return self

    @model_validator(mode="after")
    def normalize_dataset_source(self) -> "DatasetConfig":
        """One source, in both spellings."""
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
        if (gitlab is None) == (huggingface is None):
            return
        warnings.warn(
            f"data set {self.name!r}: `gitlab_identifier`, `huggingface_identifier` are the old spelling of `source`",
            DeprecationWarning,
            stacklevel=2,
        )
        if gitlab is not None:
            self.source = GitlabDatasetSource(type="gitlab", **gitlab.model_dump())
        elif huggingface is not None:
            self.source = HuggingFaceDatasetSource(type="huggingface", **huggingface.model_dump())


class BenchmarkDatasetConfig(BaseModel):
    """A benchmark's data: raw rows that `prepare_script` writes, if any, turned into prompts by `prompt_config`."""

    model_config = ConfigDict(defer_build=True)

    name: str
    type: Literal["benchmark"]
    jsonl_fpath: Path
    prepare_script: Path | None = None
    prompt_config: Path | None = None
    num_repeats: int = Field(default=1, ge=1)
