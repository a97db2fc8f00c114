"""A server is a config, a client for calling other servers, and an app.

Constructing one needs no network and no configuration of the process, so that authors can
build their servers in tests with a mocked client.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.middleware import Middleware

from nemo_gym.config.auth import auth_token
from nemo_gym.config.instances import readable_errors
from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_first_server_config_dict, get_global_config_dict
from nemo_gym.http.local import CANCELLABLE_PATHS
from nemo_gym.http.seams import replaceable
from nemo_gym.http.server_client import ServerClient
from nemo_gym.keys import SESSION_SECRET_KEY_NAME
from nemo_gym.servers.auth import AuthMiddleware
from nemo_gym.servers.context import require_instance
from nemo_gym.servers.middleware import ErrorMiddleware, Failures, answer_validation_error
from nemo_gym.servers.routes import DirectRoute
from nemo_gym.servers.sessions import SessionMiddleware, Sessions

logger = logging.getLogger(__name__)

_MISSPELT_CUTOFF = 0.8
"""Blocks may hold keys that the class does not know; only one that is almost a setting is worth a word."""


class BaseServer(BaseModel):
    """Anything that serves; knows how to find its own config."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    config: BaseRunServerInstanceConfig

    @classmethod
    def load_config_from_global_config(cls) -> BaseRunServerInstanceConfig:
        """This instance's block of the process's config, as the class annotated on `config`."""
        name = require_instance()
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        if name not in config:
            raise ConfigError(
                f"the config has no server instance called {name!r}; it has {', '.join(map(str, config))}"
            )
        block = OmegaConf.to_container(get_first_server_config_dict(config, name), resolve=True)
        config_class: Any = cls.model_fields["config"].annotation
        try:
            loaded: BaseRunServerInstanceConfig = config_class.model_validate({**block, "name": name})  # type: ignore[dict-item]
        except ValidationError as error:
            problems = "\n".join(f"  - {line}" for line in readable_errors(error))
            raise ConfigError(
                f"the config of server {name!r} does not fit {config_class.__name__}:\n{problems}"
            ) from error
        _warn_of_misspellings(name, block, config_class)
        return loaded


def _warn_of_misspellings(name: str, block: Any, config_class: type[BaseModel]) -> None:
    fields = set(config_class.model_fields)
    for key in map(str, block):
        meant = get_close_matches(key, sorted(fields), n=1, cutoff=_MISSPELT_CUTOFF)
        if key not in fields and meant and meant[0] not in block:
            logger.warning("%s has no setting %r, so it is ignored; did you mean %r?", name, key, meant[0])


class SimpleServer(BaseServer):
    """A server that authors subclass, directly or through one of the three kinds."""

    CANCELLABLE_PATHS: ClassVar[frozenset[str]] = CANCELLABLE_PATHS
    """Paths whose work is cancelled when the caller has gone."""

    server_client: ServerClient

    @abstractmethod
    def setup_webserver(self) -> FastAPI:
        """The app with this server's routes."""

    def new_app(self) -> FastAPI:
        """An app without routes, with sessions."""
        app = FastAPI(title=self.config.name)
        app.router.route_class = DirectRoute
        self.setup_session_middleware(app)
        return app

    def get_session_middleware_key(self) -> str:
        """Name of the session cookie."""
        return f"{type(self).__name__}___{self.config.name}"

    def setup_session_middleware(self, app: FastAPI) -> None:
        """Give `app` sessions; a second call does nothing."""
        if _position(app, SessionMiddleware) is None:
            sessions = Sessions(self.get_session_middleware_key(), self._session_secret())
            app.add_middleware(SessionMiddleware, sessions=sessions)

    def setup_exception_middleware(self, app: FastAPI) -> None:
        """Answer exceptions as JSON, inside the session layer and around all else; a second call does nothing.

        Around all of it, callers without the run's token are turned away if there is one: so is every app that is
        served, whoever built it.
        """
        if _position(app, ErrorMiddleware) is not None:
            return
        failures = Failures(self.get_session_middleware_key(), self.config.name)
        layer = Middleware(ErrorMiddleware, failures=failures)
        session_at = _position(app, SessionMiddleware)
        if session_at is not None:
            app.user_middleware.insert(session_at + 1, layer)
        app.user_middleware.insert(0, layer)  # for what other middleware raises
        if (token := self.required_token()) is not None:
            app.add_middleware(AuthMiddleware, token=token, instance_name=self.config.name)
        app.add_exception_handler(RequestValidationError, answer_validation_error)

    def setup_liveness(self, app: FastAPI) -> None:
        """Let `GET /` and `GET /health` say that the server is up, unless the author uses these paths."""
        taken = {getattr(route, "path", None) for route in app.routes}
        for path in {"/", "/health"} - taken:
            app.get(path, include_in_schema=False)(_alive)

    def required_token(self) -> str | None:
        """What callers over HTTP must show; None when everybody may call."""
        return auth_token(self._run_config())

    def _session_secret(self) -> str | None:
        return self._run_config().get(SESSION_SECRET_KEY_NAME)

    def _run_config(self) -> Mapping[Any, Any]:
        config = getattr(self.server_client, "global_config_dict", None)
        return config if isinstance(config, DictConfig) else {}

    @classmethod
    def from_global_config(cls) -> Self:
        """The server that the process's config describes for the current instance."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        client = ServerClient(head_server_config=ServerClient.load_head_server_config(), global_config_dict=config)
        return cls(config=cls.load_config_from_global_config(), server_client=client)

    def complete_app(self) -> FastAPI:
        """The app as it is served: the author's routes, liveness, and errors as JSON."""
        app = self.setup_webserver()
        self.setup_liveness(app)
        self.setup_exception_middleware(app)
        return app

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        """Serve until stopped; inside a worker process, return the app instead."""
        from nemo_gym.servers.run import run_webserver  # imports uvicorn, which merely building a server does not need

        return run_webserver(cls)


async def _alive() -> dict[str, str]:
    return {"status": "ok"}


def _position(app: FastAPI, middleware_class: Any) -> int | None:
    return next((at for at, used in enumerate(app.user_middleware) if used.cls is middleware_class), None)
