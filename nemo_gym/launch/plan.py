"""Which server runs how, decided before anything is started.

- `hosted`: in one process with others. By default the servers of this distribution whose requirements
  the running environment satisfies, and any whose block says `isolation: hosted`.
- `process`: in a process of its own, in the running environment, when that satisfies its requirements.
- `venv`: in a process of its own with an environment of its own. `isolation: process` forces a process,
  `isolation: venv` an environment.

Also settled before anything is started: the name and secrets of the run, who may call, and which interpreter
each server that is alone in its process runs with.
"""

import logging
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import DictConfig

from nemo_gym.config.secrets import auth_token, beyond_loopback
from nemo_gym.errors import ConfigError, EnvironmentBuildError, ServerFolderError, listed
from nemo_gym.keys import (
    AGENTS_TYPE,
    AUTH_TOKEN_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    MODELS_TYPE,
    PYTHON_VERSION_KEY_NAME,
    RESOURCES_TYPE,
    RUN_ID_KEY_NAME,
    SESSION_SECRET_KEY_NAME,
)
from nemo_gym.launch.requirements import (
    Requirements,
    is_python_allowed,
    is_running_python,
    read_requirements,
    requirements_files,
    unmet,
    with_compat,
)
from nemo_gym.launch.venvs import Installer, Workshop, environment_key, prepare_environment
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import (
    CACHE_DIR,
    PARENT_DIR,
    WORKING_DIR,
    PathTraversalError,
    component_search_roots,
    is_own_root,
    require_path_inside,
)
from nemo_gym.schemas.cli_config import RunConfig
from nemo_gym.schemas.server_config import ServerInstanceConfig

logger = logging.getLogger(__name__)

BUNDLED: frozenset[tuple[str, str]] = frozenset(
    {
        (AGENTS_TYPE, "function_agent"),
        (AGENTS_TYPE, "non_executing_simple_agent"),
        (AGENTS_TYPE, "remote_agent"),
        (AGENTS_TYPE, "simple_agent"),
        (MODELS_TYPE, "azure_openai_model"),
        (MODELS_TYPE, "inference_provider"),
        (MODELS_TYPE, "litellm_model"),
        (MODELS_TYPE, "openai_model"),
        (MODELS_TYPE, "scripted_model"),
        (MODELS_TYPE, "token_model"),
        (MODELS_TYPE, "vllm_model"),
        (RESOURCES_TYPE, "code_gen"),
        (RESOURCES_TYPE, "equivalence_llm_judge"),
        (RESOURCES_TYPE, "example_multi_step"),
        (RESOURCES_TYPE, "example_session_state_mgmt"),
        (RESOURCES_TYPE, "example_single_tool_call"),
        (RESOURCES_TYPE, "instruction_following"),
        (RESOURCES_TYPE, "math_with_judge"),
        (RESOURCES_TYPE, "mcqa"),
        (RESOURCES_TYPE, "reasoning_gym"),
        (RESOURCES_TYPE, "string_match"),
        (RESOURCES_TYPE, "structured_outputs"),
        (RESOURCES_TYPE, "workplace_assistant"),
    }
)
"""(server type, implementation), as in `<server type>/<implementation>/app.py`."""
Isolation = Literal["hosted", "process", "venv"]
ISOLATION_KEY_NAME = "isolation"
_BUILT_AT_ONCE = 4
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class PlannedServer:
    """One server instance and how it will run."""

    name: str
    server_type: str
    implementation: str
    folder: Path
    entrypoint: str
    host: str
    port: int
    requirements: Requirements
    isolation: Isolation
    alone: Literal["process", "venv"]
    """How it runs when it cannot be hosted."""
    present_python: Path | None = None
    """The interpreter of an environment that is used as it is."""
    expects_compat: bool = False
    """Whether it may use the packages of the extra `compat` without listing them."""


@dataclass(frozen=True)
class PlanSettings:
    """What the decision depends on besides the server."""

    python_version: str | None = None
    skip_venv_if_present: bool = False
    uv_venv_dir: str | None = None
    compat_packages: bool = True

    @classmethod
    def of(cls, options: RunConfig) -> "PlanSettings":
        """Those among the options of `ng_run`."""
        return cls(options.python_version, options.skip_venv_if_present, options.uv_venv_dir, options.compat_packages)


def plan_servers(instances: list[ServerInstanceConfig], settings: PlanSettings) -> list[PlannedServer]:
    """How each instance will run.

    Raises:
        ConfigError: naming every server that cannot run at all.
    """
    planned, errors = plan_those_possible(instances, settings)
    problems = [type(error)(f"server {name!r}: {error}") for name, error in errors.items()]
    if len(problems) > 1:
        numbered = "".join(f"\n{number}. {problem}" for number, problem in enumerate(problems, 1))
        raise type(problems[0])(f"{len(problems)} servers cannot be started:{numbered}")
    if problems:
        raise problems[0]
    return planned


def plan_those_possible(
    instances: Iterable[ServerInstanceConfig], settings: PlanSettings
) -> tuple[list[PlannedServer], dict[str, ConfigError]]:
    """How each instance will run, and by name why one cannot run at all."""
    planned: list[PlannedServer] = []
    problems: dict[str, ConfigError] = {}
    for instance in instances:
        try:
            planned.append(_plan_server(instance, settings))
        except ConfigError as error:
            problems[instance.name] = error
    return planned, problems


def find_server_folder(server_type: str, implementation: str) -> Path:
    """The folder of a server: the first of the search roots that has it with its requirements.

    Raises:
        ServerFolderError: there is none.
        PathTraversalError: the name is a path, which could lead anywhere.
    """
    require_path_inside(implementation, f"the server below {server_type},")
    places = [root / server_type / implementation for root in component_search_roots()]
    found = next((place for place in places if requirements_files(place)), None)
    found = found or next((place for place in places if place.is_dir()), None)
    if found is not None:
        return found
    looked = ", ".join(map(str, places))
    raise ServerFolderError(
        f"there is no folder {server_type}/{implementation}{_similar(places)} (looked for {looked})"
    )


def find_runnable_folder(instance: ServerInstanceConfig, python_version: str | None = None) -> Path:
    """Return the folder that an instance runs from: its own, or ours if its own is for another Python.

    Raises:
        ConfigError: as `find_server_folder` and `read_requirements`.
    """
    server_type, name = instance.SERVER_TYPE, instance.implementation
    folder = find_server_folder(server_type, name)
    wanted = read_requirements(folder).requires_python if len(requirements_files(folder)) == 1 else None
    if is_python_allowed(wanted, python_version):
        return folder
    python = python_version or platform.python_version()
    ours = PARENT_DIR / server_type / name
    is_elsewhere = ours.resolve() != folder.resolve() and is_bundled(server_type, ours)
    if is_elsewhere and (ours / instance.get_inner_run_server_config().entrypoint).is_file():
        logger.warning(
            "server %r: %s requires Python %s and this is %s, so %s runs instead; +%s=<version> runs the former",
            *(instance.name, folder, wanted, python, ours, PYTHON_VERSION_KEY_NAME),
        )
        return ours
    logger.warning(
        "server %r: %s requires Python %s and runs with %s; if that fails, choose one with +%s=<version>",
        *(instance.name, folder, wanted, python, PYTHON_VERSION_KEY_NAME),
    )
    return folder


def root_of(folder: Path, server_type: str) -> Path:
    """The search root that a server's folder was found in: its modules are imported from there."""
    return next(place.parent for place in folder.parents if place.name == server_type)


def is_bundled(server_type: str, folder: Path) -> bool:
    """Whether the server in `folder` belongs to this distribution."""
    root = root_of(folder, server_type)
    name = folder.relative_to(root / server_type).as_posix()
    return (server_type, name) in BUNDLED and is_own_root(root)


def _plan_server(instance: ServerInstanceConfig, settings: PlanSettings) -> PlannedServer:
    block = instance.get_inner_run_server_config()
    folder = find_runnable_folder(instance, settings.python_version)
    _check_entrypoint(folder, block.entrypoint)
    requirements = read_requirements(folder)
    asked = _asked_isolation(instance)
    present = _present_python(folder, settings)
    is_ours = is_bundled(instance.SERVER_TYPE, folder)
    alone, why_alone = _how_alone(requirements, asked, present, settings)
    isolation, why = _how(instance, asked, alone, why_alone, is_ours=is_ours)
    expects_compat = settings.compat_packages and not is_ours
    if expects_compat and alone == "venv" and present is None:
        requirements = with_compat(requirements, settings.python_version)
    log = logger.warning if asked == "hosted" and isolation != "hosted" else logger.debug
    log("server %r: %s, because %s", instance.name, isolation, why)
    return PlannedServer(
        name=instance.name,
        server_type=instance.SERVER_TYPE,
        implementation=instance.implementation,
        folder=folder,
        entrypoint=block.entrypoint,
        host=str(block_value(instance, "host") or ""),
        port=int(block_value(instance, "port") or 0),
        requirements=requirements,
        isolation=isolation,
        alone=alone,
        present_python=present if alone == "venv" else None,
        expects_compat=expects_compat,
    )


def block_value(instance: ServerInstanceConfig, key: str) -> Any:
    """The present value of a key in the server's block: addresses are filled in after the typed block was made."""
    return instance.get_inner_run_server_config_dict().get(key)


def _asked_isolation(instance: ServerInstanceConfig) -> Isolation | None:
    asked = instance.get_inner_run_server_config_dict().get(ISOLATION_KEY_NAME)
    if asked is None:
        return None
    choices: dict[str, Isolation] = {choice: choice for choice in get_args(Isolation)}
    if asked not in choices:
        raise ConfigError(f"`{ISOLATION_KEY_NAME}: {asked}` is not one of {', '.join(choices)}")
    return choices[asked]


def _how(
    instance: ServerInstanceConfig,
    asked: Isolation | None,
    alone: Literal["process", "venv"],
    why_alone: str,
    *,
    is_ours: bool,
) -> tuple[Isolation, str]:
    workers = instance.get_inner_run_server_config().num_workers or 1
    if asked in ("process", "venv"):
        return alone, f"its block says `{ISOLATION_KEY_NAME}: {asked}` and {why_alone}"
    if workers > 1:
        return alone, f"num_workers is {workers}, which needs processes of its own"
    if asked == "hosted":
        return "hosted", f"its block says `{ISOLATION_KEY_NAME}: hosted`"
    if is_ours and alone == "process":
        return "hosted", "it belongs to this distribution"
    return alone, why_alone if is_ours else f"it was written elsewhere and {why_alone}"


def _how_alone(
    requirements: Requirements, asked: Isolation | None, present: Path | None, settings: PlanSettings
) -> tuple[Literal["process", "venv"], str]:
    """Whether the server can use the running environment, and why (not)."""
    if asked == "venv":
        return "venv", "it asks for an environment of its own"
    if present is not None:
        return "venv", f"{present.parent.parent} is there"
    if not is_running_python(settings.python_version):
        return "venv", f"{PYTHON_VERSION_KEY_NAME} is {settings.python_version}"
    if not requirements.lines:
        return "process", "it needs nothing but nemo-gym"
    missing = unmet(requirements)
    return ("venv", missing[0]) if missing else ("process", "the running environment has what it needs")


def _present_python(folder: Path, settings: PlanSettings) -> Path | None:
    """The interpreter of the server's own `.venv`, when the user wants it used as it is."""
    if not settings.skip_venv_if_present:
        return None
    place = folder / ".venv"
    if settings.uv_venv_dir and Path(settings.uv_venv_dir).expanduser().resolve() != PARENT_DIR.resolve():
        place = Path(settings.uv_venv_dir).expanduser().absolute() / folder.parent.name / folder.name / ".venv"
    python = place / "bin" / "python"
    return python if python.exists() and (place / "bin" / "activate").exists() else None


def _check_entrypoint(folder: Path, entrypoint: str) -> None:
    if Path(entrypoint).is_absolute():
        raise ServerFolderError(
            f"`{ENTRYPOINT_KEY_NAME}: {entrypoint}` must be relative to the server's folder {folder}"
        )
    roots = [root.resolve() for root in (folder, *component_search_roots())]
    if "\0" in entrypoint or not any((folder / entrypoint).resolve().is_relative_to(root) for root in roots):
        raise PathTraversalError(
            f"`{ENTRYPOINT_KEY_NAME}: {entrypoint}` leads from {folder} to a place that is not below any of the "
            f"folders servers are looked for in: {', '.join(map(str, roots[1:]))}"
        )
    if not (folder / entrypoint).is_file():
        there = sorted(path.name for path in folder.glob("*.py"))
        hint = "did you mean 'app.py'?" if "app.py" in there else f"its Python files are {listed(there)}"
        hint = _similar([folder / entrypoint], Path.is_file) or f"; {hint}"
        raise ServerFolderError(f"`{ENTRYPOINT_KEY_NAME}: {entrypoint}` does not exist in {folder}{hint}")


def _similar(places: list[Path], accept: Callable[[Path], bool] = Path.is_dir) -> str:
    """`; did you mean ...?`, when there is something with a similar name beside what was looked for."""
    names = {path.name for place in places if place.parent.is_dir() for path in place.parent.iterdir() if accept(path)}
    close = get_close_matches(places[0].name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def identify_run(config: DictConfig) -> str:
    """Give the run its name, and the secret that makes sessions survive the restart of a server."""
    if not config.get(RUN_ID_KEY_NAME):
        config[RUN_ID_KEY_NAME] = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if not config.get(SESSION_SECRET_KEY_NAME):
        config[SESSION_SECRET_KEY_NAME] = secrets.token_hex(32)
    return str(config[RUN_ID_KEY_NAME])


def warn_if_open_to_others(config: DictConfig, planned: Sequence[PlannedServer]) -> None:
    """Say that other machines may call, if they may and need no token."""
    hosts = beyond_loopback([config[HEAD_SERVER_KEY_NAME].host, *(server.host for server in planned)])
    if hosts and auth_token(config) is None:
        logger.warning(
            "Servers listen on %s: whoever can reach this machine can use the model, run tools and read the config. "
            "Require a token with +%s=auto, or stay with +default_host=127.0.0.1",
            ", ".join(hosts),
            AUTH_TOKEN_KEY_NAME,
        )


class Pythons:
    """Finds interpreters, building environments where there is none yet."""

    def __init__(
        self, config: DictConfig, settings: RunConfig, warden: Warden, should_stop: Callable[[], bool]
    ) -> None:
        self._config = config
        self._settings = settings
        self._warden = warden
        self._should_stop = should_stop
        self._has_failed = threading.Event()

    def prepare(self, servers: Sequence[PlannedServer]) -> None:
        """Build what these servers need, several environments at once.

        Raises:
            EnvironmentBuildError: naming every server whose requirements cannot be installed.
        """
        needy = [server for server in servers if server.isolation == "venv" and server.present_python is None]
        if not needy:
            return
        groups: dict[str, list[PlannedServer]] = {}
        for server in needy:
            groups.setdefault(environment_key(server.requirements, self._workshop), []).append(server)
        with futures.ThreadPoolExecutor(_BUILT_AT_ONCE, "install") as pool:
            try:
                _results([pool.submit(self._build, group) for group in groups.values()])
            except BaseException:
                self._has_failed.set()
                raise

    def python_for(self, server: PlannedServer) -> Path:
        """The interpreter for a server, its environment built if need be."""
        if server.alone == "process":
            return Path(sys.executable)
        return server.present_python or self._build([server])

    @cached_property
    def _workshop(self) -> Workshop:
        settings = self._settings
        return Workshop(
            folder=environments_folder(self._config, settings),
            installer=Installer.find(settings.python_version, verbose=settings.pip_install_verbose),
            pins=tuple(str(pin) for pin in self._config.get(HEAD_SERVER_DEPS_KEY_NAME) or ()),
            variables={"UV_CACHE_DIR": settings.uv_cache_dir} if settings.uv_cache_dir else {},
            timeout_s=settings.environment_timeout_s,
            warden=self._warden,
            should_stop=lambda: self._should_stop() or self._has_failed.is_set(),
        )

    def _build(self, servers: Sequence[PlannedServer]) -> Path:
        try:
            return prepare_environment(servers[0].requirements, [server.name for server in servers], self._workshop)
        except BaseException:
            self._has_failed.set()  # the others need not go on
            raise


def environments_folder(config: DictConfig, settings: RunConfig) -> Path:
    """Where environments are kept: below `uv_venv_dir` if that was chosen, else in the cache."""
    chosen = Path(settings.uv_venv_dir).expanduser().absolute() if settings.uv_venv_dir else WORKING_DIR
    if chosen.resolve() in (WORKING_DIR.resolve(), PARENT_DIR.resolve()):
        chosen = Path(config.get(CACHE_DIR_KEY_NAME) or CACHE_DIR)
    return chosen / "venvs"


def _results(builds: "Sequence[futures.Future[Path]]") -> None:
    """Wait for all; the failures as one error."""
    # In steps: a thread that waits without end never gets to run its signal handlers.
    while futures.wait(builds, _LOOK_EVERY_S).not_done:
        pass
    failures = [error for build in builds if (error := build.exception()) is not None]
    told = [str(error) for error in failures if isinstance(error, EnvironmentBuildError)]
    expected = (EnvironmentBuildError, KeyboardInterrupt)
    unexpected = next((error for error in failures if not isinstance(error, expected)), None)
    if unexpected is not None:
        raise unexpected
    if told:
        raise EnvironmentBuildError("\n".join(told))
    if failures:
        raise KeyboardInterrupt
