"""How servers are configured: references, addresses, and the shape of a server instance.

An instance is `<name>: {<server type>: {<implementation>: {entrypoint: app.py, ...}}}`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.keys import AGENTS_TYPE, ENTRYPOINT_KEY_NAME, MODELS_TYPE, RESOURCES_TYPE, SERVER_TYPES
from nemo_gym.schemas.datasets import BenchmarkDatasetConfig, DatasetConfig

_BUILT_WHEN_USED = ConfigDict(defer_build=True)
"""Validators take longer to build than to run, and most processes need only some of them."""


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


class _InstanceBase(BaseModel):
    model_config = ConfigDict(extra="allow", defer_build=True)

    SERVER_TYPE: ClassVar[str]

    @model_validator(mode="after")
    def _exactly_one_implementation(self) -> "_InstanceBase":
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


class ResponsesAPIModelServerTypeConfig(_InstanceBase):
    """A block that holds one model server."""

    SERVER_TYPE: ClassVar[str] = MODELS_TYPE
    responses_api_models: Annotated[dict[str, BaseRunServerTypeConfig], BeforeValidator(_without_domain)]


class ResourcesServerTypeConfig(_InstanceBase):
    """A block that holds one resources server."""

    SERVER_TYPE: ClassVar[str] = RESOURCES_TYPE
    resources_servers: dict[str, BaseRunServerTypeConfig]

    @field_validator("resources_servers")
    @classmethod
    def _domain_is_required(cls, value: dict[str, BaseRunServerTypeConfig]) -> dict[str, BaseRunServerTypeConfig]:
        for implementation, block in value.items():
            if block.domain is None:
                choices = ", ".join(Domain)
                raise ValueError(
                    f"A domain is required for resources servers: add `domain` to {implementation!r}, one of {choices}"
                )
        return value


class ResponsesAPIAgentServerTypeConfig(_InstanceBase):
    """A block that holds one agent."""

    SERVER_TYPE: ClassVar[str] = AGENTS_TYPE
    responses_api_agents: Annotated[dict[str, BaseRunServerTypeConfig], BeforeValidator(_without_domain)]


class _NamedInstance(_InstanceBase):
    name: str
    server_type_config_dict: Any = Field(exclude=True, repr=False)
    """The live block of the config: what is changed in it is changed in the config."""

    def get_server_ref(self) -> ServerRef:
        """The reference other servers use for this one."""
        return _REFS[self.SERVER_TYPE](type=self.SERVER_TYPE, name=self.name)

    @property
    def implementation(self) -> str:
        """Name of the folder the server lives in, below its type's folder."""
        return str(next(iter(getattr(self, self.SERVER_TYPE))))

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


class ResponsesAPIModelServerInstanceConfig(_NamedInstance, ResponsesAPIModelServerTypeConfig):
    """A named model server."""


class ResourcesServerInstanceConfig(_NamedInstance, ResourcesServerTypeConfig):
    """A named resources server."""


class ResponsesAPIAgentServerInstanceConfig(_NamedInstance, ResponsesAPIAgentServerTypeConfig):
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
