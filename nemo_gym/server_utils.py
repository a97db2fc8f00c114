"""PUBLIC: talking to servers and being one, importable from one place.

Programs elsewhere replace names here and expect it to take effect: `nemo_gym.http.settings.replaceable` looks them up.
"""

import builtins
from asyncio import timeout as time_limit
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config_types import BaseRunServerInstanceConfig, BaseServerConfig
from nemo_gym.global_config import (
    DEFAULT_HEAD_SERVER_PORT,
    HEAD_SERVER_KEY_NAME,
    get_first_server_config_dict,
    get_global_config_dict,
)
from nemo_gym.http.client import ServerClient, get_server_url, makes_its_calls, setup_server_client
from nemo_gym.http.errors import (
    ERROR_CLASS_HEADER,
    ERROR_SERVER_HEADER,
    ERROR_STATUS_HEADER,
    HeadServerError,
    MalformedResponseError,
    NotHttpError,
    ResponseTooLargeError,
    ServerCallError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
)
from nemo_gym.http.request import JSON_HEADERS, get_response_json, json_bytes, raise_for_status, request
from nemo_gym.http.run_answers import VERIFY, VERIFY_REPEATEDLY, WANTS_PARTIAL, keep_partial
from nemo_gym.http.session import (
    get_global_aiohttp_client,
    global_aiohttp_client_exit,
    is_global_aiohttp_client_request_debug_enabled,
    is_global_aiohttp_client_setup,
    set_global_aiohttp_client,
)
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.keys import END_SESSION_HEADER
from nemo_gym.retry import Backoff, RetryPolicy
from nemo_gym.rollout_correlation import apply_rollout_prefix, rollout_path_prefix
from nemo_gym.schemas.server_config import (
    ProfilingMiddlewareConfig,
    ProfilingMiddlewareInputConfig,
    ServerInstanceDisplayConfig,
    ServerStatus,
    UvicornLoggingConfig,
)

if TYPE_CHECKING:
    from nemo_gym.servers.base import BaseServer, SimpleServer, while_serving
    from nemo_gym.servers.head import HeadServer
    from nemo_gym.servers.json_route import body_as_it_came, json_answer, never_waits, reads_only, takes_unread
    from nemo_gym.servers.run import (
        IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME,
        IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME,
        NEMO_GYM_FASTAPI_NUM_WORKERS,
        SharedSlots,
        get_nemo_gym_fastapi_num_workers,
        initialize_ray,
        is_nemo_gym_fastapi_entrypoint,
        is_nemo_gym_fastapi_worker,
        maybe_ray_cluster_exit,
        num_serving_processes,
        per_process_cap,
        set_is_nemo_gym_fastapi_entrypoint,
        set_is_nemo_gym_fastapi_worker,
        set_nemo_gym_fastapi_num_workers,
    )
    from nemo_gym.servers.sessions import SESSION_ID_KEY

_GLOBAL_AIOHTTP_CLIENT_REQUEST_DEBUG = False
"""Set to true by programs that want failed requests shown, whatever the config says."""

MAX_NUM_TRIES = 3
"""For programs that bound tries of their own by it; calls here are bounded by the settings `http_retry_*`."""
DISCONNECTED_CLIENT_OS_PRINT_INTERVAL = 100
DISCONNECTED_CLIENT_OS_HELP_TEXT = (
    "Connections to this server end before they are answered. Often the system allows too few open files or "
    "connections: raise `ulimit -n`, or lower `num_samples_in_parallel`."
)
ConnectionError = builtins.ConnectionError

_RUN = "nemo_gym.servers.run"
_ROUTES = "nemo_gym.servers.json_route"
_LAZY = {
    "IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME": _RUN,
    "IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME": _RUN,
    "NEMO_GYM_FASTAPI_NUM_WORKERS": _RUN,
    "get_nemo_gym_fastapi_num_workers": _RUN,
    "is_nemo_gym_fastapi_worker": _RUN,
    "maybe_ray_cluster_exit": _RUN,
    "set_is_nemo_gym_fastapi_entrypoint": _RUN,
    "set_is_nemo_gym_fastapi_worker": _RUN,
    "set_nemo_gym_fastapi_num_workers": _RUN,
    "BaseServer": "nemo_gym.servers.base",
    "HeadServer": "nemo_gym.servers.head",
    "SESSION_ID_KEY": "nemo_gym.servers.sessions",
    "SharedSlots": _RUN,
    "SimpleServer": "nemo_gym.servers.base",
    "initialize_ray": _RUN,
    "is_nemo_gym_fastapi_entrypoint": _RUN,
    "body_as_it_came": _ROUTES,
    "json_answer": _ROUTES,
    "never_waits": _ROUTES,
    "num_serving_processes": _RUN,
    "per_process_cap": _RUN,
    "reads_only": _ROUTES,
    "takes_unread": _ROUTES,
    "while_serving": "nemo_gym.servers.base",
}

__all__ = [
    "DEFAULT_HEAD_SERVER_PORT",
    "DISCONNECTED_CLIENT_OS_HELP_TEXT",
    "DISCONNECTED_CLIENT_OS_PRINT_INTERVAL",
    "END_SESSION_HEADER",
    "ERROR_CLASS_HEADER",
    "ERROR_SERVER_HEADER",
    "ERROR_STATUS_HEADER",
    "HEAD_SERVER_KEY_NAME",
    "IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME",
    "IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME",
    "JSON_HEADERS",
    "MAX_NUM_TRIES",
    "NEMO_GYM_FASTAPI_NUM_WORKERS",
    "SESSION_ID_KEY",
    "VERIFY",
    "VERIFY_REPEATEDLY",
    "WANTS_PARTIAL",
    "Backoff",
    "BaseRunServerInstanceConfig",
    "BaseServer",
    "BaseServerConfig",
    "ClientResponse",
    "ConnectionError",
    "DictConfig",
    "GlobalAIOHTTPAsyncClientConfig",
    "HeadServer",
    "HeadServerError",
    "MalformedResponseError",
    "NotHttpError",
    "OmegaConf",
    "ProfilingMiddlewareConfig",
    "ProfilingMiddlewareInputConfig",
    "ResponseTooLargeError",
    "RetryPolicy",
    "ServerCallError",
    "ServerCallTimeoutError",
    "ServerClient",
    "ServerInstanceDisplayConfig",
    "ServerLostError",
    "ServerResponseError",
    "ServerStatus",
    "ServerUnreachableError",
    "SharedSlots",
    "SimpleServer",
    "UvicornLoggingConfig",
    "apply_rollout_prefix",
    "body_as_it_came",
    "get_first_server_config_dict",
    "get_global_aiohttp_client",
    "get_global_config_dict",
    "get_nemo_gym_fastapi_num_workers",
    "get_response_json",
    "get_server_url",
    "global_aiohttp_client_exit",
    "initialize_ray",
    "is_global_aiohttp_client_request_debug_enabled",
    "is_global_aiohttp_client_setup",
    "is_nemo_gym_fastapi_entrypoint",
    "is_nemo_gym_fastapi_worker",
    "json_answer",
    "json_bytes",
    "keep_partial",
    "makes_its_calls",
    "maybe_ray_cluster_exit",
    "never_waits",
    "num_serving_processes",
    "per_process_cap",
    "raise_for_status",
    "reads_only",
    "request",
    "rollout_path_prefix",
    "set_global_aiohttp_client",
    "set_is_nemo_gym_fastapi_entrypoint",
    "set_is_nemo_gym_fastapi_worker",
    "set_nemo_gym_fastapi_num_workers",
    "setup_server_client",
    "takes_unread",
    "time_limit",
    "while_serving",
]


def __getattr__(name: str) -> Any:
    """Being a server needs FastAPI and uvicorn: loaded when first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
