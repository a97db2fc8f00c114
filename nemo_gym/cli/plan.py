"""Which server runs how, decided before anything is started.

- `hosted`: in one process with others. By default the servers of this distribution whose requirements
  the running environment satisfies, and any whose block says `isolation: hosted`.
- `process`: in a process of its own, in the running environment, when that satisfies its requirements.
- `venv`: in a process of its own with an environment of its own. `isolation: process` forces a process,
  `isolation: venv` an environment.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from nemo_gym.cli.installer import is_running_python
from nemo_gym.cli.launch_errors import ServerFolderError
from nemo_gym.cli.requirements import Requirements, read_requirements, requirements_files
from nemo_gym.errors import ConfigError
from nemo_gym.keys import ENTRYPOINT_KEY_NAME, PYTHON_VERSION_KEY_NAME
from nemo_gym.paths import PARENT_DIR, component_search_roots, require_name, require_path_inside
from nemo_gym.schemas.server_config import ServerInstanceConfig
from nemo_gym.servers.bundled import BUNDLED

logger = logging.getLogger(__name__)

Isolation = Literal["hosted", "process", "venv"]
ISOLATION_KEY_NAME = "isolation"


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


@dataclass(frozen=True)
class PlanSettings:
    """What the decision depends on besides the server."""

    python_version: str | None = None
    skip_venv_if_present: bool = False
    uv_venv_dir: str | None = None


def plan_servers(instances: list[ServerInstanceConfig], settings: PlanSettings) -> list[PlannedServer]:
    """How each instance will run.

    Raises:
        ConfigError: naming every server that cannot run at all.
    """
    planned: list[PlannedServer] = []
    problems: list[ConfigError] = []
    for instance in instances:
        try:
            planned.append(_plan_server(instance, settings))
        except ConfigError as error:
            problems.append(type(error)(f"server {instance.name!r}: {error}"))
    if len(problems) > 1:
        listed = "".join(f"\n{number}. {problem}" for number, problem in enumerate(problems, 1))
        raise type(problems[0])(f"{len(problems)} servers cannot be started:{listed}")
    if problems:
        raise problems[0]
    return planned


def find_server_folder(server_type: str, implementation: str) -> Path:
    """The folder of a server: the first of the search roots that has it with its requirements.

    Raises:
        ServerFolderError: there is none.
        PathTraversalError: the name is a path, which could lead anywhere.
    """
    require_name(implementation, f"the server below {server_type},")
    places = [root / server_type / implementation for root in component_search_roots()]
    found = next((place for place in places if requirements_files(place)), None)
    found = found or next((place for place in places if place.is_dir()), None)
    if found is not None:
        return found
    looked = "".join(f"\n  {place}" for place in places)
    raise ServerFolderError(f"there is no folder {server_type}/{implementation}{_similar(places)}. Looked for:{looked}")


def _plan_server(instance: ServerInstanceConfig, settings: PlanSettings) -> PlannedServer:
    block = instance.get_inner_run_server_config()
    folder = find_server_folder(instance.SERVER_TYPE, instance.implementation)
    _check_entrypoint(folder, block.entrypoint)
    requirements = read_requirements(folder)
    asked = _asked_isolation(instance)
    present = _present_python(folder, settings)
    alone, why_alone = _how_alone(requirements, asked, present, settings)
    isolation, why = _how(instance, folder, asked, alone, why_alone)
    log = logger.warning if asked == "hosted" and isolation != "hosted" else logger.debug
    log("server %r: %s, because %s", instance.name, isolation, why)
    return PlannedServer(
        name=instance.name,
        server_type=instance.SERVER_TYPE,
        implementation=instance.implementation,
        folder=folder,
        entrypoint=block.entrypoint,
        host=str(block_value(instance, "host")),
        port=int(block_value(instance, "port")),
        requirements=requirements,
        isolation=isolation,
        alone=alone,
        present_python=present if alone == "venv" else None,
    )


def block_value(instance: ServerInstanceConfig, key: str) -> Any:
    """A value as it is now: addresses are filled in after the typed block was made."""
    return instance.get_inner_run_server_config_dict()[key]


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
    folder: Path,
    asked: Isolation | None,
    alone: Literal["process", "venv"],
    why_alone: str,
) -> tuple[Isolation, str]:
    workers = instance.get_inner_run_server_config().num_workers or 1
    if asked in ("process", "venv"):
        return alone, f"its block says `{ISOLATION_KEY_NAME}: {asked}` and {why_alone}"
    if workers > 1:
        return alone, f"num_workers is {workers}, which needs processes of its own"
    if asked == "hosted":
        return "hosted", f"its block says `{ISOLATION_KEY_NAME}: hosted`"
    is_ours = (instance.SERVER_TYPE, instance.implementation) in BUNDLED and folder.is_relative_to(PARENT_DIR)
    if is_ours and alone == "process":
        return "hosted", "it belongs to this distribution"
    return alone, why_alone if is_ours else f"it was written elsewhere and {why_alone}"


def _how_alone(
    requirements: Requirements, asked: Isolation | None, present: Path | None, settings: PlanSettings
) -> tuple[Literal["process", "venv"], str]:
    """Whether the server can use the running environment, and why (not)."""
    _check_python(requirements, settings)
    if asked == "venv":
        return "venv", "it asks for an environment of its own"
    if present is not None:
        return "venv", f"{present.parent.parent} is there"
    if not is_running_python(settings.python_version):
        return "venv", f"{PYTHON_VERSION_KEY_NAME} is {settings.python_version}"
    if not requirements.lines:
        return "process", "it needs nothing but nemo-gym"
    from nemo_gym.cli.installed import unmet

    missing = unmet(requirements)
    return ("venv", missing[0]) if missing else ("process", "the running environment has what it needs")


def _check_python(requirements: Requirements, settings: PlanSettings) -> None:
    if requirements.requires_python is None:
        return
    from nemo_gym.cli.installed import is_python_allowed

    if not is_python_allowed(requirements.requires_python, settings.python_version):
        raise ServerFolderError(
            f"{requirements.file} requires Python {requirements.requires_python}; "
            f"choose one with +{PYTHON_VERSION_KEY_NAME}=<version>"
        )


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
    require_path_inside(entrypoint, f"`{ENTRYPOINT_KEY_NAME}` of the server in {folder},")
    if not (folder / entrypoint).resolve().is_relative_to(folder.resolve()):
        raise ServerFolderError(f"`{ENTRYPOINT_KEY_NAME}: {entrypoint}` is a link that leads out of {folder}")
    if not (folder / entrypoint).is_file():
        hint = _similar([folder / entrypoint], Path.is_file)
        raise ServerFolderError(f"`{ENTRYPOINT_KEY_NAME}: {entrypoint}` does not exist in {folder}{hint}")


def _similar(places: list[Path], accept: Callable[[Path], bool] = Path.is_dir) -> str:
    """`; did you mean ...?`, when there is something with a similar name beside what was looked for."""
    names = {path.name for place in places if place.parent.is_dir() for path in place.parent.iterdir() if accept(path)}
    close = get_close_matches(places[0].name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
