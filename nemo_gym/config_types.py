"""PUBLIC: configuration types and errors, importable from one place."""

from functools import cache
from typing import Any

import pydantic

from nemo_gym.errors import (
    AlmostServerError,
    ConfigError,
    ConfigInterpolationError,
    ConfigMissingValuesError,
    ConfigPathNotFoundError,
    InheritPathNotFoundError,
    MalformedConfigPathsError,
    NoServerInstancesError,
    ServerRefNotFoundError,
    did_you_mean,
    listed,
)
from nemo_gym.keys import AGENT_REF_KEY_NAME as AGENT_REF_KEY
from nemo_gym.keys import ROLLOUT_PATH_PREFIX, TOKEN_CAPTURE_PATH_SEGMENT
from nemo_gym.paths import install_command
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.schemas.cli_config import (
    DEPRECATED_UPLOAD_ROLLOUTS_KEY,
    BaseNeMoGymCLIConfig,
    UploadRolloutsConfigMixin,
)
from nemo_gym.schemas.data_config import (
    BaseUploadJsonlDatasetHuggingFaceConfig,
    BenchmarkDatasetConfig,
    DatasetConfig,
    DatasetSource,
    DatasetType,
    DeleteJsonlDatasetGitlabConfig,
    DownloadJsonlDatasetGitlabConfig,
    DownloadJsonlDatasetHuggingFaceConfig,
    GitlabDatasetSource,
    HuggingFaceDatasetSource,
    JsonlDatasetGitlabIdentifer,
    JsonlDatasetHuggingFaceIdentifer,
    UploadJsonlDatasetGitlabConfig,
    UploadJsonlDatasetHuggingFaceConfig,
    UploadJsonlDatasetHuggingFaceMaybeDeleteConfig,
)
from nemo_gym.schemas.server_config import (
    AgentServerRef,
    BaseRunServerConfig,
    BaseRunServerInstanceConfig,
    BaseRunServerTypeConfig,
    BaseServerConfig,
    BaseServerInstanceConfig,
    BaseServerTypeConfig,
    Domain,
    ExporterConfig,
    MLFlowConfig,
    ModelServerRef,
    ResourcesServerInstanceConfig,
    ResourcesServerRef,
    ResourcesServerTypeConfig,
    ResponsesAPIAgentServerInstanceConfig,
    ResponsesAPIAgentServerTypeConfig,
    ResponsesAPIModelServerInstanceConfig,
    ResponsesAPIModelServerTypeConfig,
    ServerInstanceConfig,
    ServerRef,
    ServerTypeConfig,
    WANDBConfig,
    is_almost_server,
    is_server_ref,
    maybe_get_server_instance_config,
)

__all__ = [
    "AGENT_REF_KEY",
    "DEPRECATED_UPLOAD_ROLLOUTS_KEY",
    "ROLLOUT_PATH_PREFIX",
    "TOKEN_CAPTURE_PATH_SEGMENT",
    "AgentServerRef",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "AlmostServerError",
    "BaseNeMoGymCLIConfig",
    "BaseRunServerConfig",
    "BaseRunServerInstanceConfig",
    "BaseRunServerTypeConfig",
    "BaseServerConfig",
    "BaseServerInstanceConfig",
    "BaseServerTypeConfig",
    "BaseUploadJsonlDatasetHuggingFaceConfig",
    "BenchmarkDatasetConfig",
    "ConfigError",
    "ConfigInterpolationError",
    "ConfigMissingValuesError",
    "ConfigPathNotFoundError",
    "DatasetConfig",
    "DatasetSource",
    "DatasetType",
    "DeleteJsonlDatasetGitlabConfig",
    "Domain",
    "DownloadJsonlDatasetGitlabConfig",
    "DownloadJsonlDatasetHuggingFaceConfig",
    "ExporterConfig",
    "GitlabDatasetSource",
    "HuggingFaceDatasetSource",
    "InheritPathNotFoundError",
    "JsonlDatasetGitlabIdentifer",
    "JsonlDatasetHuggingFaceIdentifer",
    "MLFlowConfig",
    "MalformedConfigPathsError",
    "ModelServerRef",
    "NoServerInstancesError",
    "ResourcesServerInstanceConfig",
    "ResourcesServerRef",
    "ResourcesServerTypeConfig",
    "ResponsesAPIAgentServerInstanceConfig",
    "ResponsesAPIAgentServerTypeConfig",
    "ResponsesAPIModelServerInstanceConfig",
    "ResponsesAPIModelServerTypeConfig",
    "ServerInstanceConfig",
    "ServerInstanceConfigTypeAdapter",  # noqa: F822 - made when it is asked for
    "ServerRef",
    "ServerRefNotFoundError",
    "ServerRefTypeAdapter",  # noqa: F822
    "ServerTypeConfig",
    "UploadJsonlDatasetGitlabConfig",
    "UploadJsonlDatasetHuggingFaceConfig",
    "UploadJsonlDatasetHuggingFaceMaybeDeleteConfig",
    "UploadRolloutsConfigMixin",
    "WANDBConfig",
    "did_you_mean",
    "install_command",
    "is_almost_server",
    "is_server_ref",
    "listed",
    "maybe_get_server_instance_config",
]

_ADAPTED: dict[str, Any] = {
    "ServerInstanceConfigTypeAdapter": ServerInstanceConfig,
    "ServerRefTypeAdapter": ServerRef,
}


def __getattr__(name: str) -> Any:
    """Adapters take longer to build than most processes live to use them."""
    if name not in _ADAPTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _adapter(name)


@cache
def _adapter(name: str) -> Any:
    return pydantic.TypeAdapter(_ADAPTED[name])
