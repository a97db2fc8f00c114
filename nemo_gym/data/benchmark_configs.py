"""Benchmarks: configs with one data set of type `benchmark`, found in the `benchmarks` folders of the search roots."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, PrivateAttr

from nemo_gym.config.instances import find_instances
from nemo_gym.config.yaml_text import load_yaml
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from nemo_gym.keys import AGENTS_TYPE, POLICY_MODEL_KEY_NAME, RESOURCES_TYPE
from nemo_gym.paths import PARENT_DIR, component_search_roots
from nemo_gym.schemas.datasets import BenchmarkDatasetConfig
from nemo_gym.schemas.server_config import ServerInstanceConfig, is_server_ref

logger = logging.getLogger(__name__)

BENCHMARKS_FOLDER = "benchmarks"
BENCHMARKS_DIR = PARENT_DIR / BENCHMARKS_FOLDER


class SeveralBenchmarksError(ConfigError, AssertionError):
    """A config, or an agent, with more than one benchmark data set."""


class BenchmarkConfig(BaseModel):
    """One benchmark: the config that defines it, and the agent that attempts it."""

    name: str
    """Of its data set."""
    path: Path
    agent_name: str
    num_repeats: int
    dataset: BenchmarkDatasetConfig

    _domain: str = PrivateAttr("")
    _description: str = PrivateAttr("")
    _resources_server: str = PrivateAttr("")

    @property
    def domain(self) -> str:
        """What its environment tests."""
        return self._domain

    @property
    def description(self) -> str:
        """What its environment says about itself."""
        return self._description

    @property
    def resources_server(self) -> str:
        """The folder name of its environment."""
        return self._resources_server

    @classmethod
    def from_config_path(cls, path: Path, strict: bool = True) -> "BenchmarkConfig | None":
        """The benchmark that a config file defines, None when it defines none.

        Raises:
            ConfigError: the config cannot be resolved; with `strict=False`, values that are not set do not matter.
            SeveralBenchmarksError: it defines several.
        """
        return cls.from_initial_config_dict(path, OmegaConf.create(load_yaml(Path(path))), strict=strict)

    @classmethod
    def from_initial_config_dict(
        cls, path: Path, initial_config_dict: DictConfig, strict: bool = True
    ) -> "BenchmarkConfig | None":
        """The same for a config that is in memory."""
        instances = _instances(initial_config_dict, strict=strict)
        found = [(agent, dataset) for agent in instances for dataset in benchmark_datasets(agent)]
        if not found:
            return None
        if len(found) > 1:
            names = ", ".join(f"{dataset.name!r} of {agent.name!r}" for agent, dataset in found)
            raise SeveralBenchmarksError(f"{path} has {len(found)} benchmark data sets, one is expected: {names}")
        agent, dataset = found[0]
        benchmark = cls(
            name=dataset.name, path=path, agent_name=agent.name, num_repeats=dataset.num_repeats, dataset=dataset
        )
        benchmark._describe(agent, instances)
        return benchmark

    def _describe(self, agent: ServerInstanceConfig, instances: list[ServerInstanceConfig]) -> None:
        block = agent.get_inner_run_server_config()
        refs = [is_server_ref(value) for value in (block.model_extra or {}).values()]
        names = {ref.name for ref in refs if ref is not None and ref.type == RESOURCES_TYPE}
        for instance in instances:
            if instance.SERVER_TYPE == RESOURCES_TYPE and instance.name in names:
                inner = instance.get_inner_run_server_config()
                self._domain = str(inner.domain or "")
                self._description = str((inner.model_extra or {}).get("description") or "")
                self._resources_server = instance.implementation


def benchmark_datasets(agent: ServerInstanceConfig) -> list[BenchmarkDatasetConfig]:
    """The benchmark data sets of an agent; of other servers none count."""
    if agent.SERVER_TYPE != AGENTS_TYPE:
        return []
    return [dataset for dataset in agent.datasets or () if isinstance(dataset, BenchmarkDatasetConfig)]


def config_name(relative: Path) -> str:
    """How a config below a `benchmarks` folder is called: `x` for `x/config.yaml`, else its path without ending."""
    if len(relative.parts) == 2 and relative.name == "config.yaml":
        return relative.parts[0]
    return relative.with_suffix("").as_posix()


def find_benchmark_configs() -> dict[str, Path]:
    """Every config that has a benchmark data set, by name; a name in an earlier root hides the same in a later."""
    found: dict[str, Path] = {}
    for root in component_search_roots():
        folder = root / BENCHMARKS_FOLDER
        for path in sorted(folder.rglob("*.yaml")) if folder.is_dir() else ():
            if path.is_file() and _may_be_benchmark(path):
                found.setdefault(config_name(path.relative_to(folder)), path)
    return dict(sorted(found.items()))


def list_benchmarks() -> dict[str, BenchmarkConfig]:
    """Every benchmark there is, by name; what cannot be resolved is left out with a warning."""
    listed: dict[str, BenchmarkConfig] = {}
    for name, path in find_benchmark_configs().items():
        try:
            benchmark = BenchmarkConfig.from_config_path(path, strict=False)
        except ConfigError as error:
            logger.warning("the benchmark %s is left out: %s: %s", name, path, str(error).splitlines()[0])
            continue
        if benchmark is not None:
            listed[name] = benchmark
    return listed


def _may_be_benchmark(path: Path) -> bool:
    """Whether a file says `type: benchmark` somewhere; one that cannot be read may."""
    try:
        return any(block.get("type") == "benchmark" for block in _mappings(load_yaml(path)))
    except ConfigError:
        return True


def _mappings(node: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(node, Mapping):
        yield node
        for inner in node.values():
            yield from _mappings(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _mappings(inner)


def _instances(initial: DictConfig, *, strict: bool) -> list[ServerInstanceConfig]:
    """The servers of a config on its own: no command line, no env.yaml, and a stand-in where it has no model."""
    base = {} if POLICY_MODEL_KEY_NAME in initial else GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT
    merged = OmegaConf.merge(base, initial)
    assert isinstance(merged, DictConfig)
    settings = GlobalConfigDictParserConfig(
        initial_global_config_dict=merged, skip_load_from_cli=True, skip_load_from_dotenv=True, offline=True
    )
    parser = GlobalConfigDictParser()
    if strict:
        return find_instances(parser.parse(settings))[0]
    config, problems = parser.read(settings)
    instances = find_instances(config)[0]
    if problems and not any(benchmark_datasets(instance) for instance in instances):
        raise problems[0]
    return instances
