"""Collect rollouts: let LLM agents attempt tasks, score every attempt, keep every result.

Importing this package does nothing but define names; everything else is loaded on first use.
"""

from nemo_gym._version import __version__

TYPE_CHECKING = False  # spelled out: console scripts begin here, and `typing` takes its time
if TYPE_CHECKING:
    from typing import Any

    from nemo_gym.base_resources_server import BaseMultiRewardVerifyResponse as BaseMultiRewardVerifyResponse
    from nemo_gym.base_resources_server import BaseResourcesServerConfig as BaseResourcesServerConfig
    from nemo_gym.base_resources_server import BaseRunRequest as BaseRunRequest
    from nemo_gym.base_resources_server import BaseSeedSessionRequest as BaseSeedSessionRequest
    from nemo_gym.base_resources_server import BaseSeedSessionResponse as BaseSeedSessionResponse
    from nemo_gym.base_resources_server import BaseVerifyRequest as BaseVerifyRequest
    from nemo_gym.base_resources_server import BaseVerifyResponse as BaseVerifyResponse
    from nemo_gym.base_resources_server import ReverifyMode as ReverifyMode
    from nemo_gym.base_resources_server import SimpleResourcesServer as SimpleResourcesServer
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig as BaseResponsesAPIAgentConfig
    from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent as SimpleResponsesAPIAgent
    from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig as BaseResponsesAPIModelConfig
    from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel as SimpleResponsesAPIModel
    from nemo_gym.config_types import AggregateMetrics as AggregateMetrics
    from nemo_gym.config_types import AggregateMetricsRequest as AggregateMetricsRequest
    from nemo_gym.config_types import BaseRunServerInstanceConfig as BaseRunServerInstanceConfig
    from nemo_gym.config_types import BaseServerConfig as BaseServerConfig
    from nemo_gym.config_types import Domain as Domain
    from nemo_gym.config_types import ModelServerRef as ModelServerRef
    from nemo_gym.keys import NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME as NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
    from nemo_gym.notebooks import RunningServers as RunningServers
    from nemo_gym.notebooks import run_sync as run_sync
    from nemo_gym.notebooks import servers_of as servers_of
    from nemo_gym.notebooks import to_dataframe as to_dataframe
    from nemo_gym.openai_utils import NeMoGymAsyncOpenAI as NeMoGymAsyncOpenAI
    from nemo_gym.openai_utils import NeMoGymChatCompletion as NeMoGymChatCompletion
    from nemo_gym.openai_utils import (
        NeMoGymChatCompletionCreateParamsNonStreaming as NeMoGymChatCompletionCreateParamsNonStreaming,
    )
    from nemo_gym.openai_utils import NeMoGymResponse as NeMoGymResponse
    from nemo_gym.openai_utils import (
        NeMoGymResponseCreateParamsNonStreaming as NeMoGymResponseCreateParamsNonStreaming,
    )
    from nemo_gym.paths import CACHE_DIR as CACHE_DIR
    from nemo_gym.paths import PARENT_DIR as PARENT_DIR
    from nemo_gym.paths import RESULTS_DIR as RESULTS_DIR
    from nemo_gym.paths import ROOT_DIR as ROOT_DIR
    from nemo_gym.paths import WORKING_DIR as WORKING_DIR
    from nemo_gym.paths import component_search_roots as component_search_roots
    from nemo_gym.paths import resolve_for_reading as resolve_for_reading
    from nemo_gym.server_utils import SESSION_ID_KEY as SESSION_ID_KEY
    from nemo_gym.server_utils import ServerClient as ServerClient
    from nemo_gym.server_utils import get_response_json as get_response_json
    from nemo_gym.server_utils import raise_for_status as raise_for_status

__package_name__ = "nemo_gym"

_EXPORTS = {
    "CACHE_DIR": "paths",
    "PARENT_DIR": "paths",
    "RESULTS_DIR": "paths",
    "ROOT_DIR": "paths",
    "WORKING_DIR": "paths",
    "component_search_roots": "paths",
    "resolve_for_reading": "paths",
    "_resolve_under_cwd_or_install": "paths",
    "NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME": "keys",
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
    "RunningServers": "notebooks",
    "run_sync": "notebooks",
    "servers_of": "notebooks",
    "to_dataframe": "notebooks",
}

__all__ = [  # noqa: PLE0604, RUF100
    "OLD_PRINT",
    "__package_name__",
    "__version__",
    "print_always_flushes",
    *(name for name in _EXPORTS if not name.startswith("_")),
]

OLD_PRINT = print
"""Python's own, which this package leaves as it is."""


def print_always_flushes(*args: object, **kwargs: object) -> None:
    """`print` whose text is there at once, also in a file or pipe."""
    OLD_PRINT(*args, **{"flush": True, **kwargs})  # type: ignore[call-overload]


def __getattr__(name: str) -> "Any":
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "PARENT_DIR":  # depends on who asks: a program of an extra root means the folder that it lies in
        from sys import _getframe

        from nemo_gym.paths import install_root_of

        return install_root_of(_getframe(1).f_globals.get("__file__"))
    from importlib import import_module

    return getattr(import_module(f"nemo_gym.{_EXPORTS[name]}"), name)
