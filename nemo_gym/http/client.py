"""`ServerClient`: call a server by its configured name, in memory when it lives here, else over HTTP."""

import http.client
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import ClientResponse
from multidict import CIMultiDict
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict
from yaml import YAMLError

from nemo_gym.config.secrets import auth_token, bearer, refused_by_head
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.addresses import TOKENS_TO_PROVE, Address, AddressBook, Replica, base_url, fetch, least_busy, probe
from nemo_gym.http.errors import HeadServerError, UnprovenServerError
from nemo_gym.http.in_memory import find_local_app, in_memory_request
from nemo_gym.http.local_response import LocalResponse
from nemo_gym.http.request import (
    REDIRECTS,
    TRANSPORT_ERRORS,
    Call,
    call_failure,
    redirect_of,
    send,
    with_json_body,
)
from nemo_gym.http.run_answers import CALL_LOG, CallLog
from nemo_gym.http.session import (
    current_settings,
    is_global_aiohttp_client_setup,
    use_client_settings,
)
from nemo_gym.http.settings import HTTP_CONFIG_KEYS, GlobalAIOHTTPAsyncClientConfig, process_config, replaceable
from nemo_gym.keys import (
    DEFAULT_HEAD_SERVER_PORT,
    DEFAULT_HOST,
    HEAD_SERVER_KEY_NAME,
    MODEL_PATHS,
    MODELS_TYPE,
    OBSERVABILITY_ENABLED_KEY_NAME,
    RESOURCES_TYPE,
)
from nemo_gym.process_inputs import RUNNING_INSTANCE
from nemo_gym.retry import Tries
from nemo_gym.rollout_correlation import (
    ROLLOUT_HEADER,
    ROLLOUT_ID_PATTERN,
    ROLLOUT_PATH_START,
    current_rollout_id,
    maybe_rollout_id_from_run_body,
    rollout_header,
    rollout_path_prefix,
    without_rollout_prefix,
)
from nemo_gym.schemas.server_config import ServerStatus

_CONFIG_PATH = "/global_config_dict_yaml"
_HEAD_TIMEOUT_S = 30.0
_REPLICATED_PATH = "/run"
_VERIFY_PATH = "/verify"


class ServerClient(BaseModel):
    """Calls the servers of one run by name."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    head_server_config: BaseServerConfig
    global_config_dict: DictConfig

    @cached_property  # found faster than a private attribute
    def _addresses(self) -> AddressBook:
        return AddressBook()

    @classmethod
    def load_head_server_config(cls) -> BaseServerConfig:
        """Where this process's config says the head server is; what it leaves out has its default."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        given = config.get(HEAD_SERVER_KEY_NAME) or {}
        return BaseServerConfig.model_validate(
            {"host": DEFAULT_HOST, "port": DEFAULT_HEAD_SERVER_PORT, **{key: given[key] for key in given}}
        )

    @classmethod
    def load_from_global_config(cls, head_server_config: BaseServerConfig | None = None) -> "ServerClient":
        """A client for the run of a head server, with the config that the head server hands out.

        Raises:
            HeadServerError: no head server answers there (also a `ValueError`).
        """
        head = head_server_config or cls.load_head_server_config()
        config = _config_of_head(Address(head.host, head.port), auth_token(process_config()))
        return cls(head_server_config=head, global_config_dict=config)

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> ClientResponse:
        """Send a request to a server, with aiohttp's keyword arguments, and return the answer whatever its status.

        Of a pydantic model given as `json` only the fields that were set go out.
        """
        return await self._request(server_name, url_path, method, kwargs)

    async def _request(self, server_name: str, url_path: str, method: str, kwargs: dict[str, Any]) -> ClientResponse:
        path = url_path if url_path[:1] == "/" else f"/{url_path}"
        log = CALL_LOG.get()
        started_s = 0.0
        if log is not None:
            started_s = time.perf_counter()
            log.latest = (started_s, server_name, path)
        try:
            address, url = self._address_of(server_name)
            hosted = find_local_app(server_name, address)
            kwargs = with_json_body(kwargs)
            asked = None if hosted is None else in_memory_request(method.upper(), url + path, kwargs)
            if hosted is None or asked is None:
                elsewhere = await self._request_over_http(server_name, path, method, kwargs)
                _note_answer(log, path, elsewhere)
                return elsewhere
            settings = current_settings()
            tried_s = time.monotonic()
            try:
                response = await hosted.exchange(asked, asked.timeout_s or settings.http_total_timeout_s)
            except TRANSPORT_ERRORS as error:
                tries = Tries(settings.retry_between_servers, failures=1, started_s=tried_s)
                call = Call(asked.method, str(asked.url), server_name, internal=True)
                raise call_failure(error, call, tries) from error
            if response.status in REDIRECTS:
                return await self._redirected(response, server_name, kwargs)
            _note_answer(log, path, response)
            return response  # type: ignore[return-value]  # which is one to its callers
        finally:
            if log is not None:
                log.note(server_name, path, started_s)

    async def get(self, server_name: str, url_path: str, **kwargs: Any) -> ClientResponse:
        """GET from a server."""
        return await self.request(server_name=server_name, url_path=url_path, method="GET", **kwargs)

    async def post(self, server_name: str, url_path: str, **kwargs: Any) -> ClientResponse:
        """POST to a server."""
        return await self.request(server_name=server_name, url_path=url_path, method="POST", **kwargs)

    def set_replicas(self, server_name: str, addresses: Iterable[tuple[str, int]]) -> None:
        """Spread `/run` of a server over these addresses; none of them means the configured one again.

        It may be called while calls are under way: what is known of addresses that stay is kept.
        """
        replicas = self._addresses.replicas.setdefault(server_name, [])
        known = {replica.address: replica for replica in replicas}
        wanted = (Address(host, port) for host, port in addresses)
        replicas[:] = [known.get(address) or Replica(address) for address in wanted]

    @cached_property
    def auth_token(self) -> str | None:
        """The token for the servers of this run: from its config, or from this process's where that is masked."""
        return auth_token(self.global_config_dict) or auth_token(process_config())

    def poll_for_status(self, server_name: str, timeout_s: float = 5.0) -> ServerStatus:
        """Whether a server (or `head_server`) answers at all, asked synchronously within that time."""
        return probe(self._address_of(server_name)[0], timeout_s)

    def addresses_of(self, server_name: str) -> list[Address]:
        """Where a server (or `head_server`) listens, and its replicas, the configured address first."""
        replicas = self._addresses.replicas.get(server_name, ())
        return list(dict.fromkeys([self._address_of(server_name)[0], *(replica.address for replica in replicas)]))

    def _address_of(self, server_name: str) -> tuple[Address, str]:
        if server_name == HEAD_SERVER_KEY_NAME:
            head = Address(self.head_server_config.host, self.head_server_config.port)
            return head, base_url(head)
        return self._addresses.look_up(self.global_config_dict, server_name)

    def _resolve_base_url(self, server_name: str) -> str:
        return self._address_of(server_name)[1]

    def _build_server_base_url(self, server_config_dict: Any) -> str:
        return base_url(Address(server_config_dict["host"], server_config_dict["port"]))

    async def _request_over_http(
        self, server_name: str, path: str, method: str, kwargs: dict[str, Any]
    ) -> ClientResponse:
        kwargs = with_token(kwargs, self.auth_token)
        rollout = rollout_header()
        if rollout is not None:
            kwargs = {**kwargs, "headers": CIMultiDict(kwargs.get("headers") or {}, **{ROLLOUT_HEADER: rollout})}
        if self._is_observed and (rollout is not None or path == _VERIFY_PATH):
            path = self._path_of_rollout(server_name, path, kwargs.get("data"))
        replicas = self._addresses.replicas.get(server_name)
        if replicas and path == _REPLICATED_PATH:
            return await _send_to_one_of(replicas, server_name, path, method, kwargs)
        return await send(
            method, lambda: self._address_of(server_name)[1] + path, kwargs, server_name=server_name, internal=True
        )

    @cached_property
    def _is_observed(self) -> bool:
        return bool(self.global_config_dict.get(OBSERVABILITY_ENABLED_KEY_NAME))

    def _path_of_rollout(self, server_name: str, path: str, body: Any) -> str:
        """The path of a call with the prefix of its rollout, if that is known and the server takes prefixes.

        Environments take one before every path, models before those by which they answer. In memory the context goes
        along, so there is no need for it.
        """
        block = self.global_config_dict.get(server_name)
        kinds = block if isinstance(block, Mapping) else {}
        is_answer = MODELS_TYPE in kinds and path.partition("?")[0] in MODEL_PATHS
        if path.startswith(ROLLOUT_PATH_START) or not (is_answer or RESOURCES_TYPE in kinds):
            return path
        rollout_id = current_rollout_id()
        if rollout_id is None and path == _VERIFY_PATH and isinstance(body, bytes):
            try:
                rollout_id = maybe_rollout_id_from_run_body(orjson.loads(body))
            except ValueError:
                return path
        is_fit = rollout_id is not None and ROLLOUT_ID_PATTERN.fullmatch(rollout_id)
        return rollout_path_prefix(rollout_id) + path if is_fit else path

    async def _redirected(self, response: LocalResponse, server_name: str, kwargs: dict[str, Any]) -> ClientResponse:
        """What comes of an answer that may lead elsewhere."""
        redirect = redirect_of(response, with_token(kwargs, self.auth_token))
        if redirect is None:
            return response  # type: ignore[return-value]  # which is one to its callers
        method, url, kwargs = redirect
        return await send(method, lambda: url, kwargs, server_name=server_name, internal=True)


def _note_answer(log: CallLog | None, path: str, response: ClientResponse | LocalResponse) -> None:
    """Note what the answer of a model to an agent took, for whoever collects the rollout."""
    if log is not None and without_rollout_prefix(path) in MODEL_PATHS and log.owner == RUNNING_INSTANCE.get():
        log.note_answer(response)


def makes_its_calls(client: ServerClient) -> bool:
    """Return False; programs ask it before they go around a client."""
    return False


async def _send_to_one_of(
    replicas: list[Replica], server_name: str, path: str, method: str, kwargs: dict[str, Any]
) -> ClientResponse:
    chosen: Replica | None = None

    def let_go() -> None:
        if chosen is not None:
            chosen.in_flight -= 1

    def choose() -> str:
        nonlocal chosen
        let_go()
        chosen = least_busy(replicas)
        chosen.in_flight += 1
        chosen.times_chosen += 1
        return base_url(chosen.address) + path

    def avoid() -> None:
        if chosen is not None:
            chosen.shun()

    try:
        return await send(method, choose, kwargs, server_name=server_name, internal=True, not_sent=avoid)
    finally:
        let_go()


def with_token(kwargs: dict[str, Any], token: str | None) -> dict[str, Any]:
    """`kwargs` with the run's token, unless they authorise the call in another way."""
    if token is None or kwargs.get("auth") is not None:
        return kwargs
    headers = CIMultiDict(kwargs.get("headers") or {})
    for name, value in bearer(token).items():
        headers.setdefault(name, value)
        TOKENS_TO_PROVE[value.encode()] = token
    return {**kwargs, "headers": headers}


def _config_of_head(head: Address, token: str | None) -> DictConfig:
    url = base_url(head) + _CONFIG_PATH
    try:
        status, body = fetch(head, _CONFIG_PATH, _HEAD_TIMEOUT_S, token)
    except UnprovenServerError as error:
        raise HeadServerError(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise HeadServerError(
            f"Could not connect to the head server at {url} ({type(error).__name__}: {error}). Start the servers "
            "with `ng_run`; if they run with another address, name it with +head_server.host and +head_server.port"
        ) from error
    if status == HTTPStatus.UNAUTHORIZED:
        raise HeadServerError(refused_by_head(url, token))
    try:
        config = OmegaConf.create(orjson.loads(body)) if status == 200 else None
    except (ValueError, TypeError, YAMLError) as error:
        config, status_text = None, f"status {status}: {error}"
    else:
        status_text = f"status {status}"
    if not isinstance(config, DictConfig):
        raise HeadServerError(
            f"What answers at {url} is not a head server ({status_text}). "
            "Name the right one with +head_server.host and +head_server.port"
        )
    return config


def setup_server_client(head_server_config: BaseServerConfig | None = None) -> ServerClient:
    """A client for the run of a head server, which also follows that run's settings of the HTTP client.

    What this process's own config says about the HTTP client comes first.
    """
    client_class = replaceable("ServerClient", ServerClient)
    client = client_class.load_from_global_config(head_server_config)
    if not is_global_aiohttp_client_setup():
        own = process_config()
        merged = {
            key: own[key] if own.get(key) is not None else client.global_config_dict.get(key)
            for key in HTTP_CONFIG_KEYS
        }
        use_client_settings(GlobalAIOHTTPAsyncClientConfig.from_config(merged))
    return client


def get_server_url(server_name: str) -> str:
    """The base URL that this process's config gives for a server."""
    config = replaceable("get_global_config_dict", get_global_config_dict)()
    return AddressBook().look_up(config, server_name)[1]
