"""PUBLIC: talking to servers and being one, importable from one place.

Programs elsewhere replace names here and expect it to take effect; `nemo_gym.http.seams` looks them up.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config_types import BaseRunServerInstanceConfig, BaseServerConfig
from nemo_gym.global_config import HEAD_SERVER_KEY_NAME, get_first_server_config_dict, get_global_config_dict
from nemo_gym.http.errors import (
    HeadServerError,
    MalformedResponseError,
    ServerCallError,
    ServerCallTimeoutError,
    ServerLostError,
    ServerResponseError,
    ServerUnreachableError,
)
from nemo_gym.http.request import get_response_json, raise_for_status, request
from nemo_gym.http.retry import RetryPolicy
from nemo_gym.http.server_client import ServerClient, get_server_url, setup_server_client
from nemo_gym.http.session import (
    get_global_aiohttp_client,
    global_aiohttp_client_exit,
    is_global_aiohttp_client_request_debug_enabled,
    is_global_aiohttp_client_setup,
    set_global_aiohttp_client,
)
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.schemas.server_instance import ServerInstanceDisplayConfig, ServerStatus

if TYPE_CHECKING:
    from nemo_gym.servers.base import BaseServer, SimpleServer
    from nemo_gym.servers.head import HeadServer
    from nemo_gym.servers.lifetime import while_serving
    from nemo_gym.servers.ray_cluster import initialize_ray
    from nemo_gym.servers.run import is_nemo_gym_fastapi_entrypoint, per_process_cap
    from nemo_gym.servers.sessions import SESSION_ID_KEY

_GLOBAL_AIOHTTP_CLIENT_REQUEST_DEBUG = False
"""Set to true by programs that want failed requests shown, whatever the config says."""

_LAZY = {
    "BaseServer": "nemo_gym.servers.base",
    "HeadServer": "nemo_gym.servers.head",
    "SESSION_ID_KEY": "nemo_gym.servers.sessions",
    "SimpleServer": "nemo_gym.servers.base",
    "initialize_ray": "nemo_gym.servers.ray_cluster",
    "is_nemo_gym_fastapi_entrypoint": "nemo_gym.servers.run",
    "per_process_cap": "nemo_gym.servers.run",
    "while_serving": "nemo_gym.servers.lifetime",
}

__all__ = [
    "HEAD_SERVER_KEY_NAME",
    "SESSION_ID_KEY",
    "BaseRunServerInstanceConfig",
    "BaseServer",
    "BaseServerConfig",
    "ClientResponse",
    "DictConfig",
    "GlobalAIOHTTPAsyncClientConfig",
    "HeadServer",
    "HeadServerError",
    "MalformedResponseError",
    "OmegaConf",
    "RetryPolicy",
    "ServerCallError",
    "ServerCallTimeoutError",
    "ServerClient",
    "ServerInstanceDisplayConfig",
    "ServerLostError",
    "ServerResponseError",
    "ServerStatus",
    "ServerUnreachableError",
    "SimpleServer",
    "get_first_server_config_dict",
    "get_global_aiohttp_client",
    "get_global_config_dict",
    "get_response_json",
    "get_server_url",
    "global_aiohttp_client_exit",
    "initialize_ray",
    "is_global_aiohttp_client_request_debug_enabled",
    "is_global_aiohttp_client_setup",
    "is_nemo_gym_fastapi_entrypoint",
    "per_process_cap",
    "raise_for_status",
    "request",
    "set_global_aiohttp_client",
    "setup_server_client",
    "while_serving",
]


def __getattr__(name: str) -> Any:
    """Being a server needs FastAPI and uvicorn: loaded when first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
