"""A server is a config, a client for calling other servers, and an app.

Constructing one needs no network and no configuration of the process, so that authors can
build their servers in tests with a mocked client. What a server holds while it serves (processes, pools, files) begins
and ends with its app.
"""

import inspect
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_gym.config.instances import readable_errors
from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.global_config import get_first_server_config_dict, get_global_config_dict
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import CANCELLABLE_PATHS
from nemo_gym.http.settings import replaceable
from nemo_gym.keys import NEMO_GYM_LOG_DIR_KEY_NAME, SESSION_SECRET_KEY_NAME
from nemo_gym.log import prefix_output
from nemo_gym.paths import RESULTS_DIR
from nemo_gym.process_inputs import require_instance
from nemo_gym.rollout_correlation import are_rollouts_named
from nemo_gym.runtime import raise_open_file_limit
from nemo_gym.schemas.server_config import ProfilingMiddlewareConfig
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.failures import Failures, answer_validation_error
from nemo_gym.servers.gateway import Duties, Gateway, duties_of
from nemo_gym.servers.json_route import JsonRoute
from nemo_gym.servers.sessions import Sessions

logger = logging.getLogger(__name__)

_MISSPELT_CUTOFF = 0.8
"""Blocks may hold keys that the class does not know; only one that is almost a setting is worth a word."""


def while_serving(app: FastAPI, *, end: Callable[[], object], begin: Callable[[], object] | None = None) -> FastAPI:
    """Call `begin` when the app starts and `end` when it stops, around whatever else it does then; the same app.

    What `end` returns is awaited, if it can be.
    """
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with inner(served) as state:
            if begin is not None:
                begin()
            try:
                yield state
            finally:
                ended = end()
                if inspect.isawaitable(ended):
                    await ended

    app.router.lifespan_context = lifespan
    return app


class BaseServer(BaseModel):
    """Anything that serves; knows how to find its own config."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    ray_enabled: ClassVar[bool | None] = None
    """Whether the class uses Ray, as programs of the original declare without annotation; nothing reads it."""

    config: BaseRunServerInstanceConfig

    def setup_liveness(self, app: FastAPI) -> None:
        """Let `GET /` and `GET /health` say that the server is up, unless the author uses these paths."""
        taken = {getattr(route, "path", None) for route in app.routes}
        for path in {"/", "/health"} - taken:
            app.get(path, include_in_schema=False)(_alive)

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
        assert isinstance(block, dict)
        config_class = config_class_of(cls)
        try:
            loaded: BaseRunServerInstanceConfig = config_class.model_validate({**block, "name": name})
        except ValidationError as error:
            problems = "; ".join(readable_errors(error))
            raise ConfigError(
                f"the config of server {name!r} does not fit {config_class.__name__}: {problems} "
                "(ng_validate with the same arguments names the file)"
            ) from error
        for key, meant in misspelt_settings(block, config_class).items():
            logger.warning("%s has no setting %r, so it is ignored; did you mean %r?", name, key, meant)
        return loaded


def config_class_of(server_class: type[BaseServer]) -> type[BaseRunServerInstanceConfig]:
    """The class annotated on a server's `config`."""
    annotated: Any = server_class.model_fields["config"].annotation
    return annotated  # type: ignore[no-any-return]


def misspelt_settings(block: Mapping[Any, Any], config_class: type[BaseModel]) -> dict[str, str]:
    """The keys that are almost a setting, each with the one that was probably meant and is not set."""
    fields = set(config_class.model_fields)
    found: dict[str, str] = {}
    for key in map(str, block):
        meant = get_close_matches(key, sorted(fields), n=1, cutoff=_MISSPELT_CUTOFF)
        if key not in fields and meant and meant[0] not in block:
            found[key] = meant[0]
    return found


class SimpleServer(BaseServer):
    """A server that authors subclass, directly or through one of the three kinds."""

    CANCELLABLE_PATHS: ClassVar[frozenset[str]] = CANCELLABLE_PATHS
    """Paths whose work is cancelled when the caller has gone."""
    replicable: ClassVar[bool] = False
    """Whether several processes may each have one of it: what it remembers matters within one rollout alone.

    It holds for the class that says so, not for those derived from it.
    """

    server_client: ServerClient

    @abstractmethod
    def setup_webserver(self) -> FastAPI:
        """The app with this server's routes."""

    def is_replicable(self) -> bool:
        """Whether its class declares that, for servers whose config may say otherwise."""
        return bool(vars(type(self)).get("replicable"))

    def new_app(self) -> FastAPI:
        """Return an app without routes, with sessions."""
        app = FastAPI(title=self.config.name or type(self).__name__)
        app.router.route_class = JsonRoute
        self.setup_session_middleware(app)
        return app

    def get_session_middleware_key(self) -> str:
        """Name of the session cookie."""
        return f"{type(self).__name__}___{self.config.name}"

    def setup_session_middleware(self, app: FastAPI) -> None:
        """Give `app` sessions; a second call does nothing."""
        self.duties_in(app)

    def duties_in(self, app: FastAPI) -> Duties:
        """Return what the gateway of `app` does for each request, to be added to; `app` gets one if it has none."""
        duties = duties_of(app)
        if duties is None:
            duties = Duties(self.config.name, sessions=self.new_sessions(), cancellable_paths=self.CANCELLABLE_PATHS)
            app.add_middleware(Gateway, duties=duties)
        return duties

    def new_sessions(self) -> Sessions:
        """Who reads and writes the session cookies."""
        return Sessions(self.get_session_middleware_key(), self._session_secret())

    def setup_exception_middleware(self, app: FastAPI) -> None:
        """Answer exceptions as JSON, turn away who may not call, and do so around all other middleware.

        A second call does nothing.
        """
        duties = self.duties_in(app)
        app.user_middleware.sort(key=lambda layer: layer.kwargs.get("duties") is not duties)
        if duties.failures is None:
            log_folder = self._run_config().get(NEMO_GYM_LOG_DIR_KEY_NAME)
            duties.failures = Failures(self.get_session_middleware_key(), self.config.name, log_folder)
            duties.callers = CallerCheck(self._run_config(), self.config.name, described_by=app)
            app.add_exception_handler(RequestValidationError, answer_validation_error)

    def setup_profiling(self, app: FastAPI, profiling_config: ProfilingMiddlewareConfig) -> None:
        """Profile everything this server does from its start to its end, if that is enabled.

        `GET /stats` writes what there is so far, and so does the end; the folder is
        `<profiling_results_dirpath>/<name>`.
        """
        if not profiling_config.profiling_enabled:
            return
        from nemo_gym.profiling import Profiler

        folder = Path(profiling_config.profiling_results_dirpath or RESULTS_DIR / "profiling") / self.config.name
        profiler = Profiler(name=self.config.name, base_profile_dir=folder)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def profiled(served: FastAPI) -> AsyncIterator[Any]:
            profiler.start()
            try:
                async with inner(served) as state:
                    yield state
            finally:
                profiler.stop()

        async def stats() -> dict[str, str]:
            profiler.dump()
            return {"profile": str(folder)}

        app.router.lifespan_context = profiled
        app.get("/stats", include_in_schema=False)(stats)

    def set_ulimit(self, target_soft_limit: int = 65_535) -> None:
        """Let this process have that many files open, or as many as the system allows."""
        raise_open_file_limit(target_soft_limit)

    def prefix_server_logs(self) -> None:
        """Put this server's name before every line it prints."""
        prefix_output(self.config.name)

    def _session_secret(self) -> str | None:
        return self._run_config().get(SESSION_SECRET_KEY_NAME)

    def _run_config(self) -> Mapping[Any, Any]:
        config = getattr(self.server_client, "global_config_dict", None)
        return config if isinstance(config, Mapping) else {}

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
        settings = self._run_config()
        self.duties_in(app).reads_rollout_header = are_rollouts_named(settings)
        if settings.get("profiling_enabled"):
            self.setup_profiling(app, ProfilingMiddlewareConfig.model_validate(dict(settings)))
        return app

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        """Serve until stopped; inside a worker process, return the app instead."""
        from nemo_gym.servers.run import run_webserver  # imports uvicorn, which merely building a server does not need

        return run_webserver(cls)


async def _alive() -> dict[str, str]:
    return {"status": "ok"}


class NotOneServerClassError(GymError):
    """A module defines no server class, or several."""


def one_server_class(module: ModuleType) -> type[SimpleServer]:
    """The one concrete server class that `module` itself defines."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, SimpleServer)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        names = ", ".join(sorted(item.__name__ for item in found)) or "none"
        raise NotOneServerClassError(f"{module.__name__} should define exactly one server class, it defines {names}")
    return found[0]
