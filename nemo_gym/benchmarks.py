"""PUBLIC: benchmarks, listed and prepared. The work is done in `nemo_gym.data`."""

import logging
from pathlib import Path
from typing import Any

from nemo_gym.config.instances import find_instances
from nemo_gym.data.benchmark_configs import (
    BENCHMARKS_DIR,
    BenchmarkConfig,
    SeveralBenchmarksError,
    benchmark_datasets,
    config_name,
    find_benchmark_configs,
    list_benchmarks,
)
from nemo_gym.data.prepare_scripts import Preparation, check_scripts, run_scripts
from nemo_gym.data.search import matches
from nemo_gym.errors import ConfigError, listed
from nemo_gym.keys import AGENTS_TYPE
from nemo_gym.schemas.data_config import ListBenchmarksConfig, PrepareBenchmarkConfig

__all__ = [
    "BENCHMARKS_DIR",
    "BenchmarkConfig",
    "ListBenchmarksConfig",
    "PrepareBenchmarkConfig",
    "config_name",
    "find_benchmark_configs",
    "list_benchmarks",
    "prepare_benchmarks",
    "search_benchmarks",
]

logger = logging.getLogger(__name__)


class NoBenchmarkError(ConfigError, AssertionError):
    """A configuration without a benchmark."""


def search_benchmarks(benchmarks: dict[str, BenchmarkConfig], query: str | None) -> dict[str, BenchmarkConfig]:
    """Those whose name, domain, agent or environment is like `query`, or whose description has it; all without one."""
    if not query:
        return benchmarks
    return {name: benchmark for name, benchmark in benchmarks.items() if _is_meant(query, name, benchmark)}


def prepare_benchmarks(global_config: Any, config: PrepareBenchmarkConfig) -> dict[str, Path]:
    """Make the data of every benchmark in a configuration; by name, the file that holds it.

    Nothing is run unless everything can be.

    Raises:
        ConfigError: there is no benchmark, or a script is missing or cannot be called.
        GymError: a script failed.
    """
    preparations = _preparations(global_config, config)
    cached = [each for each in preparations if config.use_cached_prepared_benchmarks and each.output.is_file()]
    for each in cached:
        logger.info("%s is there already: %s", each.dataset.name, each.output)
    due = [each for each in preparations if each not in cached]
    check_scripts(due)
    written = run_scripts(due, config.num_prepare_benchmark_processes)
    prepared = {each.dataset.name: each.output for each in cached}
    return prepared | {each.dataset.name: path for each, path in zip(due, written, strict=True)}


def _preparations(global_config: Any, config: PrepareBenchmarkConfig) -> list[Preparation]:
    agents = [instance for instance in find_instances(global_config)[0] if instance.SERVER_TYPE == AGENTS_TYPE]
    arguments = dict(config.prepare_script_args) | ({"source": config.source} if config.source else {})
    preparations = []
    for agent in agents:
        datasets = benchmark_datasets(agent)
        if len(datasets) > 1:
            names = listed(repr(dataset.name) for dataset in datasets)
            raise SeveralBenchmarksError(
                f"{agent.name!r} has {len(datasets)} benchmark data sets, one is expected: {names}"
            )
        preparations += [Preparation(agent.name, dataset, arguments) for dataset in datasets]
    if not preparations:
        inspected = f"Inspected server instances [{listed(agent.name for agent in agents)}]"
        raise NoBenchmarkError(
            "No benchmark config found in config_paths. "
            f"{inspected if agents else 'It has no agent instances'}; name a benchmark's config, for example "
            '"+config_paths=[benchmarks/gsm8k/config.yaml]" (ng_list_benchmarks lists them)'
        )
    if config.source and len(preparations) > 1:
        names = listed(each.dataset.name for each in preparations)
        raise ConfigError(f"+source={config.source} is the source of one benchmark, but these are configured: {names}")
    return preparations


def _is_meant(query: str, name: str, benchmark: BenchmarkConfig) -> bool:
    names = [name, benchmark.name, benchmark.domain, benchmark.agent_name, benchmark.resources_server]
    return matches(query, names) or query.strip().lower() in benchmark.description.lower()
