"""How servers are configured: references, addresses, the shape of a server instance, and settings that all read.

An instance is `<name>: {<server type>: {<implementation>: {entrypoint: app.py, ...}}}`. What the head server tells
about a running one is here, too, and so are the settings of experiment trackers.
"""

import posixpath
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.keys import AGENTS_TYPE, ENTRYPOINT_KEY_NAME, MASK, MODELS_TYPE, RESOURCES_TYPE, SERVER_TYPES
from nemo_gym.schemas.data_config import BenchmarkDatasetConfig, DatasetConfig
from nemo_gym.schemas.path_text import PathText

_BUILT_WHEN_USED = ConfigDict(defer_build=True)
"""Validators take longer to build than to run, and most processes need only some of them."""
ServerStatus = Literal["success", "connection_error", "timeout", "unknown_error"]


class ModelServerRef(BaseModel):
    """Points at a configured model server."""

    model_config = _BUILT_WHEN_USED

    type: Literal["responses_api_models"]
    name: str


class ResourcesServerRef(BaseModel):
    """Points at a configured resources server."""

    model_config = _BUILT_WHEN_USED

    type: Literal["resources_servers"]
    name: str


class AgentServerRef(BaseModel):
    """Points at a configured agent."""

    model_config = _BUILT_WHEN_USED

    type: Literal["responses_api_agents"]
    name: str


ServerRef = ModelServerRef | ResourcesServerRef | AgentServerRef
_REFS: dict[object, type[ServerRef]] = {
    MODELS_TYPE: ModelServerRef,
    RESOURCES_TYPE: ResourcesServerRef,
    AGENTS_TYPE: AgentServerRef,
}


def is_server_ref(value: object) -> ServerRef | None:
    """The reference that `value` spells, or None when it spells none."""
    if not isinstance(value, Mapping) or not {"type", "name"} <= set(value):
        return None
    server_type, name = value["type"], value["name"]
    if not isinstance(server_type, str) or not isinstance(name, str) or server_type not in _REFS:
        return None
    return _REFS[server_type](type=server_type, name=name)


class Domain(StrEnum):
    """What a resources server tests."""

    MATH = "math"
    CODING = "coding"
    AGENT = "agent"
    KNOWLEDGE = "knowledge"
    INSTRUCTION_FOLLOWING = "instruction_following"
    LONG_CONTEXT = "long_context"
    SAFETY = "safety"
    GAMES = "games"
    TRANSLATION = "translation"
    E2E = "e2e"
    RLHF = "rlhf"
    OTHER = "other"


class BaseServerConfig(BaseModel):
    """Where a server listens."""

    model_config = _BUILT_WHEN_USED

    host: str
    port: int
    num_workers: int | None = None


class BaseRunServerConfig(BaseServerConfig):
    """A server that is started from a file."""

    entrypoint: str
    domain: Domain | None = None


class BaseRunServerInstanceConfig(BaseRunServerConfig):
    """A server with the name it goes by in a run."""

    name: str


class BaseRunServerTypeConfig(BaseModel):
    """The innermost block of a server instance, as written in a config file."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    entrypoint: str
    host: str | None = None
    port: int | None = Field(default=None, ge=-1, le=65_535)
    """0 or nothing: any free one. An offline parse puts -1 here."""
    num_workers: int | None = None
    domain: Domain | None = None
    datasets: list[Annotated[DatasetConfig | BenchmarkDatasetConfig, Field(discriminator="type")]] | None = None


class BaseServerTypeConfig(BaseModel):
    """A block that holds one server of one type."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    SERVER_TYPE: ClassVar[str]

    @model_validator(mode="after")
    def _exactly_one_implementation(self) -> "BaseServerTypeConfig":
        implementations = list(getattr(self, self.SERVER_TYPE))
        if len(implementations) != 1:
            raise ValueError(
                f"exactly one implementation is expected under {self.SERVER_TYPE!r}, found {implementations}"
            )
        return self


def _without_domain(implementations: object) -> object:
    """Only resources servers have a domain; on others any value is accepted and plays no part."""
    if not isinstance(implementations, Mapping):
        return implementations
    return {
        name: {key: value for key, value in block.items() if key != "domain"} if isinstance(block, Mapping) else block
        for name, block in implementations.items()
    }


class ResponsesAPIModelServerTypeConfig(BaseServerTypeConfig):
    """A block that holds one model server."""

    SERVER_TYPE: ClassVar[str] = MODELS_TYPE
    responses_api_models: Annotated[dict[str, BaseRunServerTypeConfig], BeforeValidator(_without_domain)]


def _require_domains(implementations: Mapping[str, BaseRunServerTypeConfig]) -> None:
    for implementation, block in implementations.items():
        if block.domain is None:
            choices = ", ".join(Domain)
            raise ValueError(
                f"A domain is required for resources servers: add `domain` to {implementation!r}, one of {choices}"
            )


class ResourcesServerTypeConfig(BaseServerTypeConfig):
    """A block that holds one resources server."""

    SERVER_TYPE: ClassVar[str] = RESOURCES_TYPE
    resources_servers: dict[str, BaseRunServerTypeConfig]

    @field_validator("resources_servers")
    @classmethod
    def _domain_is_required(cls, value: dict[str, BaseRunServerTypeConfig]) -> dict[str, BaseRunServerTypeConfig]:
        _require_domains(value)
        return value


class ResponsesAPIAgentServerTypeConfig(BaseServerTypeConfig):
    """A block that holds one agent."""

    SERVER_TYPE: ClassVar[str] = AGENTS_TYPE
    responses_api_agents: Annotated[dict[str, BaseRunServerTypeConfig], BeforeValidator(_without_domain)]


ServerTypeConfig = ResponsesAPIModelServerTypeConfig | ResourcesServerTypeConfig | ResponsesAPIAgentServerTypeConfig


class BaseServerInstanceConfig(BaseServerTypeConfig):
    """A server with its name."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    server_type_config_dict: Any = Field(exclude=True, repr=False)
    """The live block of the config: what is changed in it is changed in the config."""

    def validate_domain_for_resources_server(self) -> Self:
        """Refuse a resources server without a domain; only these have one."""
        if self.SERVER_TYPE == RESOURCES_TYPE:
            _require_domains(getattr(self, self.SERVER_TYPE))
        return self

    def get_server_ref(self) -> ServerRef:
        """The reference other servers use for this one."""
        return _REFS[self.SERVER_TYPE](type=self.SERVER_TYPE, name=self.name)

    @property
    def implementation(self) -> str:
        """Name of the folder the server lives in, below its type's folder."""
        return str(next(iter(getattr(self, self.SERVER_TYPE))))

    @property
    def module_name(self) -> str:
        """The module of its entrypoint, as it is imported from the root its folder was found in."""
        file = posixpath.normpath(
            posixpath.join(self.SERVER_TYPE, self.implementation, self.get_inner_run_server_config().entrypoint)
        )
        return file.removesuffix(".py").replace("/", ".")

    def get_inner_run_server_config_dict(self) -> Any:
        """The live innermost block."""
        return self.server_type_config_dict[self.SERVER_TYPE][self.implementation]

    def get_inner_run_server_config(self) -> BaseRunServerTypeConfig:
        """The innermost block, typed."""
        block: BaseRunServerTypeConfig = getattr(self, self.SERVER_TYPE)[self.implementation]
        return block

    @property
    def datasets(self) -> list[DatasetConfig | BenchmarkDatasetConfig] | None:
        """The data sets declared on this server."""
        return self.get_inner_run_server_config().datasets


class ResponsesAPIModelServerInstanceConfig(BaseServerInstanceConfig, ResponsesAPIModelServerTypeConfig):
    """A named model server."""


class ResourcesServerInstanceConfig(BaseServerInstanceConfig, ResourcesServerTypeConfig):
    """A named resources server."""


class ResponsesAPIAgentServerInstanceConfig(BaseServerInstanceConfig, ResponsesAPIAgentServerTypeConfig):
    """A named agent."""


ServerInstanceConfig = (
    ResponsesAPIModelServerInstanceConfig | ResourcesServerInstanceConfig | ResponsesAPIAgentServerInstanceConfig
)
_INSTANCES: dict[str, type[ServerInstanceConfig]] = {
    MODELS_TYPE: ResponsesAPIModelServerInstanceConfig,
    RESOURCES_TYPE: ResourcesServerInstanceConfig,
    AGENTS_TYPE: ResponsesAPIAgentServerInstanceConfig,
}


def server_types_in(block: object) -> list[str]:
    """The server types a block names, in its order; a well-formed instance names one."""
    return [key for key in block if key in SERVER_TYPES] if isinstance(block, Mapping) else []


def maybe_get_server_instance_config(
    name: str, server_type_config_dict: Any, *, plain: Mapping[str, Any] | None = None
) -> tuple[ServerInstanceConfig | None, ValidationError | None]:
    """Read a top-level block as a server instance: the instance, or why it is none, or neither for non-mappings.

    `plain` is the block as plain resolved data, for callers that have it: reading it is much faster.
    """
    if not isinstance(server_type_config_dict, Mapping):
        return None, None
    fields = {
        **(server_type_config_dict if plain is None else plain),
        "name": name,
        "server_type_config_dict": server_type_config_dict,
    }
    failure: ValidationError | None = None
    for server_type in server_types_in(fields) or SERVER_TYPES:
        try:
            return _INSTANCES[server_type].model_validate(fields), None
        except ValidationError as error:
            failure = failure or error
    return None, failure


def is_almost_server(block: object) -> bool:
    """Whether a block was surely meant to be a server: a server type over something with an entrypoint."""
    return any(
        isinstance(inner, Mapping) and ENTRYPOINT_KEY_NAME in inner
        for server_type in server_types_in(block)
        if isinstance(implementations := block[server_type], Mapping)  # type: ignore[index]
        for inner in implementations.values()
    )


class RecordingMode(StrEnum):
    """What a model server does with recorded calls."""

    OFF = "off"
    RECORD = "record"
    """Ask the endpoint, and keep every answer."""
    REPLAY = "replay"
    """Answer from the recording only; a call that is not in it is an error."""
    AUTO = "auto"
    """Answer from the recording; ask the endpoint for what is missing, and keep that."""


def _off_is_a_word(mode: object) -> object:
    """YAML reads a bare `off` as false."""
    return RecordingMode.OFF.value if mode is False else mode


class RecordingConfig(BaseModel):
    """The calls of a model server, kept in a folder and answered from it."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    folder: PathText | None = Field(default=None, min_length=1)
    """Where the recording is; servers, replicas, hosts and runs can share it."""
    mode: Annotated[RecordingMode, BeforeValidator(_off_is_a_word)] = RecordingMode.OFF
    """off; record: keep every answer; replay: answer from the recording only; auto: ask for what is missing."""
    max_bytes: int | None = Field(default=None, ge=1)
    """How large the folder may become; what comes after that is not recorded, and a warning says so."""

    @model_validator(mode="after")
    def _there_is_a_folder(self) -> Self:
        if self.mode is not RecordingMode.OFF and self.folder is None:
            raise ValueError(f"mode {self.mode} needs a folder: add `folder: <path>`, or +recording_folder=<path>")
        return self


class ProfilingMiddlewareInputConfig(BaseModel):
    """Where profiles go."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    profiling_results_dirpath: PathText | None = None


class ProfilingMiddlewareConfig(ProfilingMiddlewareInputConfig):
    """Whether servers profile themselves."""

    profiling_enabled: bool = False


class UvicornLoggingConfig(BaseModel):
    """What of requests is logged."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    uvicorn_logging_show_200_ok: bool = False


class ServerInstanceDisplayConfig(BaseModel):
    """One running server; `process_name` and `config_path` are its instance name, `name` its implementation."""

    config_path: str | None = None
    dir_path: str | None = None
    entrypoint: str | None = None
    host: str | None = None
    name: str | None = None
    pid: int | None = None
    port: int | None = None
    process_name: str | None = None
    server_type: str | None = None
    start_time: float | None = None
    status: ServerStatus | None = None
    uptime_seconds: float | None = None
    url: str | None = None
    isolation: str | None = None
    """`hosted` with others in one process, `process` of its own, or a `venv` of its own."""
    replica: int | None = None
    """Which of the identical hosts it belongs to, from 0."""
    most_replicas: int | None = None
    """How many hosts there may come to be, where they are added while the others are busy."""


class ExporterConfig(BaseModel):
    """Settings of one tracker; the keys are those of the configuration, at its top level."""

    model_config = ConfigDict(defer_build=True)

    @property
    def is_available(self) -> bool:
        """Whether they are complete, so that a run can be opened; a masked key is no key."""
        raise NotImplementedError


class WANDBConfig(ExporterConfig):
    """Settings of Weights & Biases; a run needs project and name.

    Without a key here, W&B takes that of `WANDB_API_KEY` or of `wandb login`.
    """

    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_api_key: str | None = None

    @property
    def is_available(self) -> bool:
        """Whether a run can be opened; a masked key is no key."""
        return bool(self.wandb_project and self.wandb_name) and self.wandb_api_key != MASK


class MLFlowConfig(ExporterConfig):
    """MLflow: a run is opened only when address, experiment and run name are set; not every server wants a token."""

    mlflow_tracking_uri: str | None = None
    mlflow_tracking_token: str | None = None
    mlflow_experiment_name: str | None = None
    mlflow_run_name: str | None = None

    @property
    def is_available(self) -> bool:
        """Whether a run can be opened; a masked token is no token."""
        named = self.mlflow_tracking_uri and self.mlflow_experiment_name and self.mlflow_run_name
        return bool(named) and self.mlflow_tracking_token != MASK
