"""How patient the HTTP client is and how many connections it may hold, as set in the config.

Every key is a top-level config key with a generous default. There is no "unlimited": whatever
waits has an end.

Programs elsewhere replace names on the public facade `nemo_gym.server_utils`. Their tests patch the facade and expect
the client below it to notice, so these names are looked up there when they are used (`replaceable`). The facade is
never imported from here: what nobody has loaded, nobody has replaced.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym.global_config import get_global_config_dict, maybe_get_global_config_dict
from nemo_gym.http.errors import HttpSettingsError
from nemo_gym.retry import RetryPolicy

DEFAULT_READINESS_TIMEOUT_S = 600.0
_HOUR_S = 3600.0
_MEBIBYTE = 1024 * 1024
_FACADE = "nemo_gym.server_utils"

T = TypeVar("T")


class GlobalAIOHTTPAsyncClientConfig(BaseModel):
    """Settings of the HTTP client of one process."""

    model_config = ConfigDict(frozen=True)

    global_aiohttp_connector_limit: int = Field(default=102_400, ge=0)
    """Open connections in all, divided by the number of workers; 0 is no limit."""
    global_aiohttp_connector_limit_per_host: int = Field(default=65_536, ge=0)
    """Open connections to one server, divided by the number of workers; 0 is no limit.

    As many as a process may have files open: how much is under way at once is for the caps of a run to say.
    """
    global_aiohttp_client_request_debug: bool = False
    """Log request and body of every error answer."""
    global_aiohttp_tcp_keepalive_idle_seconds: int = Field(default=60, ge=1)
    """Silence after which TCP asks whether the peer is still there."""
    global_aiohttp_tcp_keepalive_interval_seconds: int = Field(default=10, ge=1)
    """Time between two such questions."""
    global_aiohttp_tcp_keepalive_probes: int = Field(default=3, ge=1)
    """Unanswered questions after which the connection is lost."""

    http_connect_timeout_s: float = Field(default=60.0, gt=0)
    """How long one try to open a connection may take."""
    http_total_timeout_s: float = Field(default=24 * _HOUR_S, gt=0)
    """How long one call may take from the first byte to the last: longer than any rollout."""
    http_retry_max_tries: int = Field(default=200, ge=1)
    """Tries to reach a server. Only calls that have not been sent are tried again."""
    http_retry_max_elapsed_s: float = Field(default=600.0, ge=0)
    """No try starts later than this after the first failure."""
    http_retry_first_delay_s: float = Field(default=0.25, ge=0)
    """Upper bound of the first pause; each later one is twice as long."""
    http_retry_max_delay_s: float = Field(default=10.0, ge=0)
    """Upper bound of every pause."""

    max_response_bytes: int = Field(default=256 * _MEBIBYTE, ge=_MEBIBYTE)
    """How long the body of one answer may be, as it was sent and once it is unpacked."""

    model_total_timeout_s: float = Field(default=2 * _HOUR_S, gt=0)
    """How long one try of a call to a model endpoint may take."""
    model_retry_max_tries: int = Field(default=200, ge=1)
    """Tries of a call to a model endpoint (three of them may end in status 500)."""
    model_retry_max_elapsed_s: float = Field(default=600.0, ge=0)
    """No try starts later than this after the first failure, whatever `Retry-After` asks for."""
    model_retry_first_delay_s: float = Field(default=0.5, ge=0)
    """Upper bound of the first pause; each later one is twice as long."""
    model_retry_max_delay_s: float = Field(default=60.0, ge=0)
    """Upper bound of a pause the endpoint did not ask for."""

    model_endpoint_readiness_timeout_seconds: float = Field(default=DEFAULT_READINESS_TIMEOUT_S, ge=0)
    """A run that waits for an endpoint which has never answered ends after this time; 0: it does not. Where more than
    the default is allowed, calls to such an endpoint are tried again that long, too."""

    @classmethod
    def from_config(cls, config: Mapping[Any, Any], /) -> "GlobalAIOHTTPAsyncClientConfig":
        """The settings in a config; what it does not mention keeps its default."""
        given = {key: config[key] for key in cls.model_fields if config.get(key) is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = "; ".join(
                f"`{problem['loc'][0]}: {problem['input']}`: {problem['msg']}" for problem in error.errors()
            )
            raise HttpSettingsError(f"The config sets the HTTP client to what it cannot be: {problems}") from error

    @cached_property
    def retry_between_servers(self) -> RetryPolicy:
        """How calls between servers are tried again."""
        return RetryPolicy(
            max_tries=self.http_retry_max_tries,
            max_elapsed_s=self.http_retry_max_elapsed_s,
            first_delay_s=self.http_retry_first_delay_s,
            max_delay_s=self.http_retry_max_delay_s,
        )

    @cached_property
    def retry_model_calls(self) -> RetryPolicy:
        """How calls to a model endpoint are tried again."""
        return RetryPolicy(
            max_tries=self.model_retry_max_tries,
            max_elapsed_s=self.model_retry_max_elapsed_s,
            first_delay_s=self.model_retry_first_delay_s,
            max_delay_s=self.model_retry_max_delay_s,
        )

    @cached_property
    def retry_until_ready(self) -> RetryPolicy:
        """The same for an endpoint that has never answered and may be loading for long."""
        ready_s = self.model_endpoint_readiness_timeout_seconds
        if ready_s <= max(DEFAULT_READINESS_TIMEOUT_S, self.model_retry_max_elapsed_s):
            return self.retry_model_calls
        return replace(self.retry_model_calls, max_elapsed_s=ready_s)


HTTP_CONFIG_KEYS: frozenset[str] = frozenset(GlobalAIOHTTPAsyncClientConfig.model_fields)
"""Every config key the HTTP client reads."""


def replaceable(name: str, default: T) -> T:
    """What the facade calls `name` at this moment; `default` while it is not loaded."""
    found: T = getattr(sys.modules.get(_FACADE), name, default)
    return found


def process_config() -> Mapping[Any, Any]:
    """This process's config without starting to look for one; empty when there is none."""
    load = replaceable("get_global_config_dict", get_global_config_dict)
    config: Mapping[Any, Any] | None = maybe_get_global_config_dict() if load is get_global_config_dict else load()
    return {} if config is None else config


def settings_of_process() -> GlobalAIOHTTPAsyncClientConfig:
    """The settings of this process's config."""
    return GlobalAIOHTTPAsyncClientConfig.from_config(process_config())
