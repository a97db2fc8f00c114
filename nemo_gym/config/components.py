"""Environments, agents, models and benchmarks by name: which configs the search roots have.

A name is what people type (`mcqa`, `vllm_model/vllm_model_for_training`, `gsm8k`), a path is relative to the root that
has it, as it stands in `config_paths`. The same name in an earlier root hides that in a later one. Completion asks at
every TAB, so nothing here parses YAML.

After `--benchmark`, `--environment`, `--resources-server` and `--model-type` a name, or `NAME/FLAVOR`, may also be the
path that it stands for (`config_of`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from nemo_gym.errors import ConfigError
from nemo_gym.keys import AGENTS_TYPE, MODELS_TYPE, RESOURCES_TYPE
from nemo_gym.paths import PathTraversalError, component_search_roots, require_path_inside, resolve_for_reading

BENCHMARKS_FOLDER = "benchmarks"
ENVIRONMENTS_FOLDER = "environments"
MANIFEST_NAME = "manifest.yaml"
"""What describes a workload beside its config, and is none."""
_FOLDERS = {
    "benchmark": BENCHMARKS_FOLDER,
    "environment": ENVIRONMENTS_FOLDER,
    "resources_server": RESOURCES_TYPE,
    "model_type": MODELS_TYPE,
}
_OF_SERVERS = ("*/configs/*.yaml", "*/*/configs/*.yaml")
_TOP_LEVEL = re.compile(r"(?P<name>[^\s#:'\"][^:'\"]*):\s*(?:#.*)?")
_BENCHMARK = re.compile(r"\btype:\s*[\"']?benchmark\b")
_AGENT = re.compile(rf"\s+{AGENTS_TYPE}:\s*(?:#.*)?")


@dataclass(frozen=True)
class Kind:
    """A model server with a short name, and what it takes from where."""

    config: str
    """Its name among the configs of model servers."""
    shape: str
    """How it is written after `+model=`."""
    url: str | None = None
    """Where its models are unless another place is named."""
    has_own_url: bool = False
    """Whether its config says where the models are, so that nothing else can."""
    url_variable: str | None = None
    key_variable: str | None = None
    """The environment variable that holds the key for `url`."""
    needs_key: bool = True


KINDS: Mapping[str, Kind] = {
    "openai": Kind(
        "openai_model",
        "openai:<name> or openai:<url>#<name>",
        url="https://api.openai.com/v1",
        url_variable="OPENAI_BASE_URL",
        key_variable="OPENAI_API_KEY",
    ),
    "vllm": Kind("vllm_model", "vllm:<url>#<name>", needs_key=False),
    "scripted": Kind("scripted_model", "scripted or scripted:<script.yaml>", needs_key=False),
    "azure": Kind("azure_openai_model", "azure:<url>#<deployment>", key_variable="AZURE_OPENAI_API_KEY"),
    "openrouter": Kind(
        "inference_provider/openrouter",
        "openrouter:<name>",
        url="https://openrouter.ai/api/v1",
        has_own_url=True,
        key_variable="OPENROUTER_API_KEY",
    ),
    "nvidia": Kind(
        "inference_provider/nvidia",
        "nvidia:<name>",
        url="https://integrate.api.nvidia.com/v1",
        has_own_url=True,
        key_variable="NVIDIA_API_KEY",
    ),
}


def benchmark_configs(is_benchmark: Callable[[Path], bool] | None = None) -> dict[str, str]:
    """Every config below a `benchmarks` folder that has a benchmark data set, as `is_benchmark` finds, or the text."""
    return _named_by_path(BENCHMARKS_FOLDER, is_benchmark or _mentions_benchmark)


def environment_configs() -> dict[str, str]:
    """Every config of a resources server, and those below an `environments` folder."""
    found = _named_by_path(ENVIRONMENTS_FOLDER, lambda path: bool(agents_in(path)))
    return dict(sorted({**server_configs(RESOURCES_TYPE), **found}.items()))


def server_configs(server_type: str) -> dict[str, str]:
    """The configs of all servers of a type: `x` for the one that is called like its folder or is the only one there,
    `x/y` for `x/configs/y.yaml`.
    """
    found: dict[str, str] = {}
    for root in component_search_roots():
        base = root / server_type
        configs = sorted(path for pattern in _OF_SERVERS for path in base.glob(pattern) if path.is_file())
        for path in configs:
            folder = path.parent.parent
            is_main = path.stem == folder.name or [path] == [each for each in configs if each.parent == path.parent]
            name = folder.relative_to(base).as_posix()
            found.setdefault(name if is_main else f"{name}/{path.stem}", path.relative_to(root).as_posix())
    return dict(sorted(found.items()))


def agent_names() -> set[str]:
    """The agents that some config of a component defines, by the names that rows and `agent_name` call them."""
    configs = {*environment_configs().values(), *benchmark_configs().values(), *server_configs(AGENTS_TYPE).values()}
    return {
        name
        for root in component_search_roots()
        for config in configs
        if (root / config).is_file()
        for name in agents_in(root / config)
    }


def agents_in(path: Path) -> list[str]:
    """The top-level names below which a file says `responses_api_agents:`."""
    return list(_agents(_text(path)))


def config_name(relative: Path) -> str:
    """How a config below a `benchmarks` folder is called: `x` for `x/config.yaml`, else its path without ending."""
    if len(relative.parts) == 2 and relative.name == "config.yaml":
        return relative.parts[0]
    return relative.with_suffix("").as_posix()


def _mentions_benchmark(path: Path) -> bool:
    return _BENCHMARK.search(_text(path)) is not None


def _agents(text: str) -> Iterator[str]:
    name = None
    for line in text.splitlines():
        if match := _TOP_LEVEL.fullmatch(line):
            name = match["name"].strip()
        elif name and _AGENT.fullmatch(line):
            yield name
            name = None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _named_by_path(kind: str, is_wanted: Callable[[Path], bool]) -> dict[str, str]:
    found: dict[str, str] = {}
    for root in component_search_roots():
        folder = root / kind
        for path in sorted(folder.rglob("*.yaml")) if folder.is_dir() else ():
            if path.name != MANIFEST_NAME and path.is_file() and is_wanted(path):
                found.setdefault(config_name(path.relative_to(folder)), path.relative_to(root).as_posix())
    return dict(sorted(found.items()))


CONFIGS_OF: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "benchmark": benchmark_configs,
    "environment": environment_configs,
    "resources_server": lambda: server_configs(RESOURCES_TYPE),
    "model_type": lambda: server_configs(MODELS_TYPE),
}
"""What flags of a kind can name, with the config of each."""


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
    named = CONFIGS_OF[kind]()
    listed = named.get(name) or server_configs(RESOURCES_TYPE).get(name.removeprefix(f"{RESOURCES_TYPE}/"))
    if listed and (name in named or name.startswith(f"{RESOURCES_TYPE}/")):
        return resolve_for_reading(listed, Path.is_file).absolute()
    folders = (_FOLDERS[kind], RESOURCES_TYPE) if kind == "environment" else (_FOLDERS[kind],)
    looked = ", ".join(str(root / folder) for root in component_search_roots() for folder in folders)
    raise UnknownAssetError(f"{flag} {name}: there is no {implied[-1]}.{_hint(name, named)} Looked in {looked}")


def _implied(kind: str, name: str) -> list[str]:
    """Relative paths that a name may mean, the likeliest first."""
    folder = _FOLDERS[kind]
    first, _, flavor = name.partition("/")
    if kind not in ("benchmark", "environment"):
        return [f"{folder}/{first}/configs/{flavor or first}.yaml"]
    nested = [f"{folder}/{name}/config.yaml"] if flavor else []
    return [*nested, f"{folder}/{first}/{flavor or 'config'}.yaml"]


def _hint(name: str, named: Mapping[str, str]) -> str:
    below = sorted((other for other in named if other.startswith(f"{name}/")), key=len)
    spelled = {other.lower(): other for other in named}
    close = below[:1] or [spelled[each] for each in get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)]
    return f" Did you mean `{close[0]}`?" if close else ""
