"""Collect rollouts: let LLM agents attempt tasks, score every attempt, keep every result.

Importing this package does nothing but define names; everything else is loaded on first use.
"""

from importlib import import_module
from typing import Any

from nemo_gym._version import __version__
from nemo_gym.paths import CACHE_DIR, PARENT_DIR, RESULTS_DIR, ROOT_DIR, WORKING_DIR

__package_name__ = "nemo_gym"

_EXPORTS = {
    "BaseResourcesServerConfig": "base_resources_server",
    "SimpleResourcesServer": "base_resources_server",
    "BaseRunRequest": "base_resources_server",
    "BaseVerifyRequest": "base_resources_server",
    "BaseVerifyResponse": "base_resources_server",
    "BaseMultiRewardVerifyResponse": "base_resources_server",
    "BaseSeedSessionRequest": "base_resources_server",
    "BaseSeedSessionResponse": "base_resources_server",
    "ReverifyMode": "base_resources_server",
    "BaseResponsesAPIAgentConfig": "base_responses_api_agent",
    "SimpleResponsesAPIAgent": "base_responses_api_agent",
    "BaseResponsesAPIModelConfig": "base_responses_api_model",
    "SimpleResponsesAPIModel": "base_responses_api_model",
    "ServerClient": "server_utils",
    "raise_for_status": "server_utils",
    "get_response_json": "server_utils",
    "SESSION_ID_KEY": "server_utils",
    "BaseServerConfig": "config_types",
    "BaseRunServerInstanceConfig": "config_types",
    "Domain": "config_types",
    "AggregateMetrics": "config_types",
    "AggregateMetricsRequest": "config_types",
    "ModelServerRef": "config_types",
    "NeMoGymAsyncOpenAI": "openai_utils",
    "NeMoGymResponse": "openai_utils",
    "NeMoGymResponseCreateParamsNonStreaming": "openai_utils",
    "NeMoGymChatCompletion": "openai_utils",
    "NeMoGymChatCompletionCreateParamsNonStreaming": "openai_utils",
}

__all__ = [  # noqa: PLE0604, RUF100
    "CACHE_DIR",
    "PARENT_DIR",
    "RESULTS_DIR",
    "ROOT_DIR",
    "WORKING_DIR",
    "__package_name__",
    "__version__",
    *_EXPORTS,
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nemo_gym.{_EXPORTS[name]}"), name)
