"""The config files that `--benchmark`, `--environment`, `--resources-server` and `--model-type` name.

`NAME` or `NAME/FLAVOR` stands for a file in one of the search roots, the first that has it. What `ng_list_...` calls
by a name is found by that name, too.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

from nemo_gym.cli.registry import config_class_of, find_command
from nemo_gym.config.components import benchmark_configs, environment_configs, server_configs
from nemo_gym.errors import ConfigError
from nemo_gym.keys import MODELS_TYPE, RESOURCES_TYPE
from nemo_gym.paths import PathTraversalError, component_search_roots, require_path_inside, resolve_for_reading

_BENCHMARK, _ENVIRONMENT = "benchmark", "environment"
_FOLDERS = {
    _BENCHMARK: "benchmarks",
    _ENVIRONMENT: "environments",
    "resources_server": RESOURCES_TYPE,
    "model_type": MODELS_TYPE,
}
_NAMED: Mapping[str, Callable[[], Mapping[str, str]]] = {
    _BENCHMARK: benchmark_configs,
    _ENVIRONMENT: environment_configs,
    "resources_server": lambda: server_configs(RESOURCES_TYPE),
    "model_type": lambda: server_configs(MODELS_TYPE),
}


def names_of(kind: str) -> list[str]:
    """The names that a flag of this kind takes."""
    return list(_NAMED[kind]())


class UnknownAssetError(ConfigError):
    """A name that no component has."""


def config_of(kind: str, name: str) -> Path:
    """The config file that a name of this kind stands for, absolute.

    Raises:
        UnknownAssetError: there is none; what is close, and where was looked.
    """
    flag = f"--{kind.replace('_', '-')}"
    try:
        require_path_inside(name, flag)
    except PathTraversalError as error:
        raise UnknownAssetError(f"{error}; a config file is given as --config {name}") from error
    implied = _implied(kind, name)
    for root in component_search_roots():
        for path in implied:
            if (root / path).is_file():
                return (root / path).absolute()
    named = _NAMED[kind]()
    listed = named.get(name) or server_configs(RESOURCES_TYPE).get(name.removeprefix(f"{RESOURCES_TYPE}/"))
    if listed and (name in named or name.startswith(f"{RESOURCES_TYPE}/")):
        return resolve_for_reading(listed, Path.is_file).absolute()
    folders = (_FOLDERS[kind], RESOURCES_TYPE) if kind == _ENVIRONMENT else (_FOLDERS[kind],)
    looked = ", ".join(str(root / folder) for root in component_search_roots() for folder in folders)
    raise UnknownAssetError(f"{flag} {name}: there is no {implied[-1]}.{_hint(name, named)} Looked in {looked}")


def _implied(kind: str, name: str) -> list[str]:
    """Relative paths that a name may mean, the likeliest first."""
    folder = _FOLDERS[kind]
    first, _, flavor = name.partition("/")
    if kind not in (_BENCHMARK, _ENVIRONMENT):
        return [f"{folder}/{first}/configs/{flavor or first}.yaml"]
    nested = [f"{folder}/{name}/config.yaml"] if flavor else []
    return [*nested, f"{folder}/{first}/{flavor or 'config'}.yaml"]


def _hint(name: str, named: Mapping[str, str]) -> str:
    below = sorted((other for other in named if other.startswith(f"{name}/")), key=len)
    spelled = {other.lower(): other for other in named}
    close = below[:1] or [spelled[each] for each in get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)]
    return f" Did you mean `{close[0]}`?" if close else ""


def short_way_to(kind: str, config: Path, command: str) -> str | None:
    """`+benchmark=<name>`, for a command that takes it: it then also knows the split, and where to write."""
    info = find_command(command)
    config_class = config_class_of(info) if info else None
    if kind not in getattr(config_class, "shortcuts", ()):
        return None
    for name, path in _NAMED[kind]().items():
        if resolve_for_reading(path, Path.is_file).absolute() == config:
            return f"+{kind}={name}"
    return None
