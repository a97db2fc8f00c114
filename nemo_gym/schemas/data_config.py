"""Data sets: how server configs declare them, and the arguments of the commands that prepare and move them."""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import LocalPath, PathText

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
DataMode = Literal["train_preparation", "example_validation"]
DataBackend = Literal["gitlab", "huggingface"]
DataType = Literal["train", "validation", "benchmark", "example"]
TYPES_OF_MODE: dict[DataMode, tuple[DataType, ...]] = {
    "train_preparation": ("train", "validation", "benchmark"),
    "example_validation": ("example",),
}


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
    jsonl_fpath: PathText
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
    jsonl_fpath: LocalPath
    prepare_script: LocalPath | None = None
    prompt_config: LocalPath | None = None
    num_repeats: int = Field(default=1, ge=1)


class TrainDataProcessorConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_prepare_data`."""

    shortcuts = ("benchmark", "environment")
    output_dirpath: PathText
    """Folder for one file of rows and one of metrics per kind of data set."""
    mode: DataMode
    """train_preparation takes the train, validation and benchmark data sets of the configured agents,
    example_validation their examples."""
    should_download: bool = False
    """Get what is missing: download data sets from their source, run the prepare script of benchmarks."""
    data_source: DataBackend = "huggingface"
    """Where to download a data set from that names both sources."""
    overwrite_metrics_conflicts: bool = False
    """Replace metrics files that disagree with the data instead of ending with an error."""
    keep_offending_rows: bool = False
    """Write rows that cannot be rolled out like all others, and only leave them out of the metrics."""

    @property
    def in_scope_dataset_types(self) -> list[DataType]:
        """The types of data sets that the mode takes."""
        return list(TYPES_OF_MODE[self.mode])


class ListBenchmarksConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_list_benchmarks`."""

    query: str | None = None
    """Show only benchmarks whose name, domain, description, agent or environment is like this."""
    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON list instead of a table."""


class PrepareBenchmarkConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_prepare_benchmark`."""

    shortcuts = ("benchmark",)
    use_cached_prepared_benchmarks: bool = False
    """Leave benchmarks alone whose data is there already."""
    num_prepare_benchmark_processes: int = Field(default=1, ge=1)
    """How many benchmarks are prepared at the same time."""
    prepare_script_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the `prepare` function of the scripts."""
    source: PathText | None = None
    """Prepare from this local file instead of downloading; for one benchmark at a time."""


class UploadJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Upload a JSONL data set to a GitLab model registry."""

    dataset_name: str
    version: str
    input_jsonl_fpath: PathText


class DownloadJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Download a JSONL data set from a GitLab model registry."""

    dataset_name: str
    version: str
    artifact_fpath: str
    output_fpath: PathText


class DeleteJsonlDatasetGitlabConfig(BaseNeMoGymCLIConfig):
    """Delete a data set from a GitLab model registry."""

    dataset_name: str
    """The data set to delete."""


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
    input_jsonl_fpath: PathText
    """File to upload."""
    resource_config_path: PathText
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

    forbidden_fields: ClassVar[set[str]] = {"delete_from_gitlab"}

    @model_validator(mode="before")
    @classmethod
    def check_forbidden_fields(cls, data: object) -> object:
        """Refuse what belongs to `ng_gitlab_to_hf_dataset`."""
        found = sorted(cls.forbidden_fields & set(data)) if isinstance(data, Mapping) else []
        if found:
            raise ValueError(f"Forbidden fields present: {', '.join(found)} belongs to ng_gitlab_to_hf_dataset")
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
    output_dirpath: PathText | None = None
    """Folder to write `<split>.jsonl` files to."""
    output_fpath: PathText | None = None
    """File to write to."""
    hf_token: str | None = None
    """Access token, for private data sets."""
    split: Literal["train", "validation", "test"] | None = None
    """Split to load; all of them when unset."""

    @model_validator(mode="after")
    def check_output_path(self) -> "DownloadJsonlDatasetHuggingFaceConfig":
        """Refuse destinations that contradict what is asked for."""
        if bool(self.output_dirpath) == bool(self.output_fpath):
            raise ValueError("give exactly one of `output_dirpath` and `output_fpath`")
        if self.artifact_fpath and self.split:
            raise ValueError("`artifact_fpath` names a file and `split` a part of the data set: give one of them")
        if self.output_fpath and not (self.split or self.artifact_fpath):
            raise ValueError("`output_fpath` takes one file: name it with `split` or `artifact_fpath`")
        return self
