"""The block `token_id_capture` of a run's configuration."""

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_gym.errors import ConfigError
from nemo_gym.keys import AGENTS_TYPE, TOKEN_ID_CAPTURE_BLOCK
from nemo_gym.token_id_capture.protocols import TokenSink, installed_token_sink

__all__ = [
    "TOKEN_ID_CAPTURE_BLOCK",
    "TokenCaptureConfigError",
    "TokenIdCaptureConfig",
    "TokenIdCaptureSettings",
    "token_id_capture_config",
    "token_id_capture_enabled_for_agent",
]

logger = logging.getLogger(__name__)

_SINK_METHODS = ("put", "mark_incomplete", "close")


class TokenCaptureConfigError(ConfigError, ValueError):
    """The block says something that cannot be done."""


class TokenIdCaptureSettings(BaseModel):
    """What a run says about keeping token ids."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    enabled: bool = False
    all_agents: bool = False
    """For every agent; else for those with `token_id_capture: true` in their block."""
    dir: Path | None = None
    """Folder of the files, an absolute path; `model_call_capture_dir` when unset."""
    sink: str | None = None
    """`module:Class` to put entries into in place of files."""
    sink_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that class."""
    rebuild_response: bool = True
    """Put the ids onto the items of results; without, they are only kept."""
    max_mask_fraction: float | None = Field(None, ge=0, le=1)
    """End the run when more than this fraction of its rollouts had to be masked."""
    mask_fraction_min_samples: int = Field(50, ge=1)
    """Rollouts to wait for before the fraction counts."""


class TokenIdCaptureConfig(BaseModel):
    """The same, with what it falls back to."""

    model_config = ConfigDict(extra="ignore")

    token_id_capture: TokenIdCaptureSettings = Field(default_factory=TokenIdCaptureSettings)
    model_call_capture_dir: Path | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self.token_id_capture.enabled

    @property
    def resolved_dir(self) -> Path | None:
        """Where files go; None when a sink is configured or nothing is said."""
        return self.token_id_capture.dir or self.model_call_capture_dir

    def build_sink(self) -> TokenSink | None:
        """The configured sink, made anew; None when none is configured.

        Raises:
            TokenCaptureConfigError: there is no such class, or it is no sink.
        """
        path = self.token_id_capture.sink
        if path is None:
            return None
        module, _, name = path.partition(":")
        try:
            kind = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            words = f"token_id_capture.sink is {path!r}, which cannot be loaded: {error}"
            raise TokenCaptureConfigError(words) from error
        try:
            sink = kind(**self.token_id_capture.sink_kwargs)
        except TypeError as error:  # it is no class, or takes other arguments
            words = f"token_id_capture.sink {path!r} cannot be made with token_id_capture.sink_kwargs: {error}"
            raise TokenCaptureConfigError(words) from error
        missing = [method for method in _SINK_METHODS if not callable(getattr(sink, method, None))]
        if missing:
            raise TokenCaptureConfigError(f"token_id_capture.sink {path!r} is no sink: it lacks {', '.join(missing)}")
        made: TokenSink = sink
        return made

    @model_validator(mode="after")
    def _has_a_place(self) -> "TokenIdCaptureConfig":
        if not self.enabled:
            return self
        settings = self.token_id_capture
        for key, path in (
            ("token_id_capture.dir", settings.dir),
            ("model_call_capture_dir", self.model_call_capture_dir),
        ):
            if path is not None and not path.is_absolute():
                raise ValueError(f"{key} is {str(path)!r}; it must be an absolute path")
        has_place = settings.sink or self.resolved_dir or installed_token_sink()
        if not has_place and settings.rebuild_response:
            raise ValueError(
                f"{TOKEN_ID_CAPTURE_BLOCK} requires a directory or sink: set {TOKEN_ID_CAPTURE_BLOCK}.dir to an "
                "absolute path"
            )
        if settings.sink and settings.dir:
            logger.warning("%s has a sink and a dir; the sink is used", TOKEN_ID_CAPTURE_BLOCK)
        return self


def token_id_capture_config(global_config_dict: Any) -> TokenIdCaptureConfig:
    """What a run's configuration says; off where there is none.

    Raises:
        TokenCaptureConfigError: it is enabled and has no place to keep anything, or says something unknown.
    """
    plain = _plain(global_config_dict)
    keys = (TOKEN_ID_CAPTURE_BLOCK, "model_call_capture_dir")
    given = {key: plain[key] for key in keys if plain.get(key) is not None}
    try:
        return TokenIdCaptureConfig.model_validate(given)
    except ValidationError as error:
        raise TokenCaptureConfigError("; ".join(map(_words, error.errors()))) from None


def token_id_capture_enabled_for_agent(global_config_dict: Any, agent_name: str | None) -> bool:
    """Whether the calls of an agent are kept: it is enabled, and for all agents or by the agent's own flag."""
    settings = token_id_capture_config(global_config_dict).token_id_capture
    if not settings.enabled or settings.all_agents:
        return settings.enabled
    block = _plain(global_config_dict).get(agent_name) if agent_name else None
    agents = block.get(AGENTS_TYPE) if isinstance(block, Mapping) else None
    if not isinstance(agents, Mapping):
        return False
    return any(bool(agent.get(TOKEN_ID_CAPTURE_BLOCK)) for agent in agents.values() if isinstance(agent, Mapping))


def _words(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    words = str(error["msg"]).removeprefix("Value error, ")
    return f"{place}: {words}" if place else words


def _plain(config: Any) -> Mapping[str, Any]:
    if OmegaConf.is_config(config):
        config = {key: _node(config, key) for key in config if isinstance(key, str)}
    return config if isinstance(config, Mapping) else {}


def _node(config: Any, key: str) -> Any:
    try:
        value = config[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except Exception:  # noqa: BLE001 - a block of others that cannot be resolved is none of ours
        return None
