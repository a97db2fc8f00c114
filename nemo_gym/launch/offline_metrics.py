"""Metrics without servers: the agents' classes are built in this process and asked in memory.

An agent that forwards to its resources server, as `simple_agent` does, finds that one built here, too. The
requests pass through the same routes as over HTTP, so the answers are the same. Models are never built,
so none of their settings is needed.

A class is loaded with the surroundings its author expects: its folder as cwd and on the path.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from omegaconf import DictConfig
from pydantic import PrivateAttr

from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.collect.metrics import AGGREGATE_PATH
from nemo_gym.combine.shard_metrics import Hooks, request_of
from nemo_gym.config.instances import find_instances
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.errors import GymError
from nemo_gym.http.addresses import Address, base_url
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import HostedApp, in_memory_request
from nemo_gym.http.request import get_response_json, raise_for_status, with_json_body
from nemo_gym.keys import MODELS_TYPE
from nemo_gym.launch.plan import find_runnable_folder, root_of
from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.paths import PARENT_DIR
from nemo_gym.process_inputs import running_as
from nemo_gym.runs.record import Result
from nemo_gym.schemas.server_config import ServerInstanceConfig
from nemo_gym.servers.base import SimpleServer, one_server_class

logger = logging.getLogger(__name__)

_NOWHERE = Address("127.0.0.1", 1)
_TIMEOUT_S = 3600.0
_FORWARDING_AGENT = PARENT_DIR / "responses_api_agents" / "simple_agent" / "app.py"


class WrongModuleError(GymError):
    """Another module of the same name is already loaded."""


@contextlib.contextmanager
def load_server_class(instance: ServerInstanceConfig) -> Iterator[type[SimpleServer]]:
    """The class behind an instance; its folder is the current one and first on the path while the block runs.

    Modules that it finds beside itself (`import helpers`) are its own: the next server gets others of that name.

    Raises:
        GymError: there is no such folder or file, or it does not define exactly one server class.
        ImportError: it needs something that is not installed here.
    """
    folder = find_runnable_folder(instance)
    entrypoint = folder / instance.get_inner_run_server_config().entrypoint
    root = root_of(folder, instance.SERVER_TYPE)
    with _surroundings(folder, root, instance.SERVER_TYPE), contextlib.chdir(folder):
        module = importlib.import_module(instance.module_name)
        found = Path(module.__file__ or "")
        if found.resolve() != entrypoint.resolve():
            raise WrongModuleError(f"{module.__name__} was loaded from {found} before, it should be {entrypoint}")
        yield one_server_class(module)


@contextlib.contextmanager
def _surroundings(folder: Path, root: Path, server_type: str) -> Iterator[None]:
    added = [str(path) for path in (folder, folder / "src", root) if path.is_dir()]
    before = set(sys.modules)
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if not name.startswith(f"{server_type}.") and file and Path(file).is_relative_to(folder):
                del sys.modules[name]


class NotBuiltError(GymError):
    """A server cannot be built in this process."""


_UNREACHABLE: ContextVar[list[NotBuiltError]] = ContextVar("servers that an agent called in vain")


@dataclass(frozen=True)
class _Built:
    server: SimpleServer
    hosted: HostedApp


class OfflineAgents:
    """The agents of a configuration, built as they are needed.

    One that cannot be built gets the metrics every agent has, and is named in a warning.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._instances = {instance.name: instance for instance in find_instances(config)[0]}
        self._built: dict[str, _Built | NotBuiltError] = {}
        self._given_up: set[str] = set()

    def hooks_of(self, agent: str) -> Hooks | None:
        """The hooks of the class that makes the agent's metrics what they are; None when that class has to be asked."""
        if agent in self._given_up:
            return Hooks()
        try:
            server = self._server_with_hooks(agent)
        except NotBuiltError as error:
            self._give_up(agent, error)
            return Hooks()
        if server is None:
            return None
        has_own = type(server).compute_metrics is not AggregateMetricsMixin.compute_metrics
        return Hooks(_quietly(server.compute_metrics) if has_own else None, _quietly(server.get_key_metrics))

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        """What the agent's `/aggregate_metrics` answers, or the metrics every agent has."""
        try:
            return await self.ask_own(agent, records)
        except NotBuiltError as error:
            self._give_up(agent, error)
            return _baseline(records)

    async def ask_own(self, agent: str, records: Collection[Result]) -> object:
        """What the agent's `/aggregate_metrics` answers.

        Raises:
            NotBuiltError: the agent, or a server it asks in turn, cannot be built here.
        """
        client = _InMemoryClient.of(self)
        unreachable: list[NotBuiltError] = []
        token = _UNREACHABLE.set(unreachable)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                response = await client.post(server_name=agent, url_path=AGGREGATE_PATH, **request_of(records))
                await raise_for_status(response)
                return await get_response_json(response)
        except GymError as error:
            if not unreachable:
                raise
            raise unreachable[0] from error
        finally:
            _UNREACHABLE.reset(token)

    def build(self, name: str) -> _Built:
        """The server called `name`.

        Raises:
            NotBuiltError: that is not possible here.
        """
        if name not in self._built:
            self._built[name] = self._try_to_build(name)
        built = self._built[name]
        if isinstance(built, NotBuiltError):
            raise built
        return built

    def _try_to_build(self, name: str) -> _Built | NotBuiltError:
        instance = self._instances.get(name)
        if instance is None:
            return NotBuiltError(f"the configuration has no server {name!r}: pass the config_paths of the run")
        if instance.SERVER_TYPE == MODELS_TYPE:
            return NotBuiltError(f"{name!r} is a model, which metrics do not need")
        try:
            with contextlib.redirect_stdout(sys.stderr), running_as(name), load_server_class(instance) as server_class:
                config = server_class.load_config_from_global_config()
                server = server_class(config=config, server_client=_InMemoryClient.of(self))
                app = server.complete_app()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an author's code may raise anything
            return NotBuiltError(
                f"{instance.SERVER_TYPE}/{instance.implementation}, the class of {name!r}, cannot be built here: "
                f"{type(error).__name__}: {error}"
            )
        return _Built(server, HostedApp(name, app, frozenset()))

    def _server_with_hooks(self, agent: str) -> AggregateMetricsMixin | None:
        """The agent, or the resources server it forwards to; None when its class goes its own ways."""
        server: Any = self.build(agent).server
        if _forwards(server):
            server = self.build(server.config.resources_server.name).server
        answer = getattr(type(server), "aggregate_metrics", None)
        if answer is AggregateMetricsMixin.aggregate_metrics:
            return server  # type: ignore[no-any-return]
        is_plain_agent = answer is SimpleResponsesAPIAgent.aggregate_metrics and not server.config.skip_verification
        return server if is_plain_agent else None

    def _give_up(self, agent: str, error: NotBuiltError) -> None:
        if agent not in self._given_up:
            self._given_up.add(agent)
            logger.warning("%r gets only the metrics every agent has: %s", agent, error)


class _InMemoryClient(ServerClient):
    """Reaches the servers of `OfflineAgents`, and nobody else."""

    _agents: OfflineAgents = PrivateAttr()

    @classmethod
    def of(cls, agents: OfflineAgents) -> "_InMemoryClient":
        head: Any = {"host": _NOWHERE.host, "port": _NOWHERE.port}
        client = cls(head_server_config=head, global_config_dict=agents._config)
        client._agents = agents
        return client

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> ClientResponse:
        """Answer by the server itself, through its routes."""
        path = url_path if url_path.startswith("/") else f"/{url_path}"
        request = in_memory_request(method.upper(), base_url(_NOWHERE) + path, with_json_body(kwargs))
        try:
            if request is None:
                raise NotBuiltError(f"{server_name}{path} is called in a way that takes a running server")
            hosted = self._agents.build(server_name).hosted
        except NotBuiltError as error:
            _UNREACHABLE.get([]).append(error)
            raise
        response: Any = await hosted.exchange(request, request.timeout_s or _TIMEOUT_S)
        return response  # type: ignore[no-any-return]


def _forwards(server: Any) -> bool:
    """Whether it is our simple agent, which leaves its metrics to its resources server."""
    answer = getattr(type(server), "aggregate_metrics", None)
    code = getattr(answer, "__code__", None)
    is_its_answer = code is not None and Path(code.co_filename).resolve() == _FORWARDING_AGENT.resolve()
    return is_its_answer and not server.config.skip_verification


def _quietly(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook with what it prints sent to stderr: stdout is for the command's result."""

    def call(given: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return hook(given)

    return call


def _baseline(records: Collection[Result]) -> AggregateMetrics:
    return compute_aggregate_metrics(list(records))
