"""PUBLIC: benchmarks, found, listed and prepared.

A benchmark is a config with one data set of type `benchmark`, in a `benchmarks` folder of the search roots. Here is
also what its prepare script can build on: where rows come from, and where they go.
"""

import hashlib
import logging
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, PrivateAttr

from nemo_gym.config.components import BENCHMARKS_FOLDER, benchmark_configs, config_name
from nemo_gym.config.files import load_yaml
from nemo_gym.config.instances import find_instances
from nemo_gym.data.declared import Preparation, check_scripts, run_scripts
from nemo_gym.data.hub import Hub, configured_hub, write_jsonl
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, listed
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from nemo_gym.keys import AGENTS_TYPE, POLICY_MODEL_KEY_NAME, RESOURCES_TYPE
from nemo_gym.paths import PARENT_DIR, candidates, resolve_for_reading
from nemo_gym.row_files import read_rows
from nemo_gym.schemas.data_config import BenchmarkDatasetConfig, ListBenchmarksConfig, PrepareBenchmarkConfig
from nemo_gym.schemas.server_config import ServerInstanceConfig, is_server_ref

logger = logging.getLogger(__name__)

_CUTOFF = 0.7
BENCHMARKS_DIR = PARENT_DIR / BENCHMARKS_FOLDER
Row = dict[str, Any]
BENCHMARKS_SUBDIR = BENCHMARKS_DIR.name


def matches(query: str, fields: Iterable[str]) -> bool:
    """Whether some field contains the query, or it or one of its words is spelled almost like it; case is ignored."""
    wanted = query.strip().lower()
    for text in fields:
        known = text.lower()
        if not known:
            continue
        words = [known, *re.split(r"[\s_\-]+", known)]
        if wanted in known or any(_is_close(wanted, word) for word in words):
            return True
    return False


def _is_close(wanted: str, word: str) -> bool:
    return bool(word) and SequenceMatcher(None, wanted, word).ratio() >= _CUTOFF


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


def find_benchmark_configs() -> dict[str, Path]:
    """Every config that has a benchmark data set, by name; a name in an earlier root hides the same in a later."""
    found = benchmark_configs(_may_be_benchmark)
    return {name: resolve_for_reading(path, Path.is_file) for name, path in found.items()}


def list_benchmarks() -> dict[str, BenchmarkConfig]:
    """Every benchmark there is, by name; what cannot be resolved is left out with a warning."""
    listed: dict[str, BenchmarkConfig] = {}
    for name, path in find_benchmark_configs().items():
        try:
            benchmark = BenchmarkConfig.from_config_path(path, strict=False)
        except ConfigError as error:
            logger.warning("the benchmark %s is left out: %s: %s", name, path, error)
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


class SourceRowsError(ConfigError, ValueError):
    """Rows of a source that are not what a benchmark is made of."""


def source_rows(source: str | None, fields: Sequence[str], download: Callable[[Hub], Iterable[Row]]) -> Iterator[Row]:
    """The published rows of a benchmark: from the local file `source`, else downloaded.

    Args:
        source: a file of any format that rows can be read from; None to download.
        fields: what every row must have.
        download: gets them from the hub.

    Raises:
        ConfigError: the file is not there, or a row lacks a field.
    """
    for number, row in enumerate(download(configured_hub()) if source is None else _local_rows(source), 1):
        lacking = [name for name in fields if row.get(name) is None]
        if lacking:
            raise SourceRowsError(
                f"row {number} of {source or 'the published data set'} has no {', '.join(lacking)}; "
                f"its fields are {', '.join(row)}"
            )
        yield row


def write_benchmark(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows of a benchmark below the current folder and say how many there are.

    Raises:
        ConfigError: there are none.
    """
    target = Path(path)
    count = write_jsonl(target, _at_least_one(rows))
    logger.info("%s: %d rows", target, count)
    return target


def choices(question: str, options: Sequence[str], right: int) -> Row:
    """The fields of a multiple-choice row, as `mcqa` and its prompts want them."""
    letters = ascii_uppercase[: len(options)]
    text = "\n".join(f"{letter}) {option}" for letter, option in zip(letters, options, strict=True))
    return {
        "question": question,
        "options_text": text,
        "problem": f"{question}\n\n{text}",
        "options": [{letter: option} for letter, option in zip(letters, options, strict=True)],
        "expected_answer": letters[right],
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, question)),
    }


def shuffled_choices(question: str, right: str, wrong: Sequence[str]) -> Row:
    """The same for options that are published with the right one first: mixed, always the same way."""
    order = list(range(1 + len(wrong)))
    random.Random(hashlib.md5(question.encode(), usedforsecurity=False).hexdigest()).shuffle(order)
    options = [right, *wrong]
    return choices(question, [options[position] for position in order], order.index(0))


def _local_rows(source: str) -> Iterator[Row]:
    path = resolve_for_reading(source, Path.is_file)
    if not path.is_file():
        looked = ", ".join(map(str, candidates(source)))
        raise ConfigPathNotFoundError(f"+source={source}: there is no such file (looked for {looked})")
    for _, row in read_rows(path):
        yield row


def _at_least_one(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    count = 0
    for row in rows:
        count += 1
        yield row
    if not count:
        raise SourceRowsError("the source has no rows, so there is nothing to write")


__all__ = [
    "BENCHMARKS_DIR",
    "BENCHMARKS_SUBDIR",
    "BenchmarkConfig",
    "ListBenchmarksConfig",
    "PrepareBenchmarkConfig",
    "SourceRowsError",
    "choices",
    "config_name",
    "discover_benchmarks",
    "find_benchmark_configs",
    "list_benchmarks",
    "prepare_benchmark",
    "prepare_benchmarks",
    "search_benchmarks",
    "shuffled_choices",
    "source_rows",
    "write_benchmark",
]


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
    cached = [each for each in preparations if _is_there(each, use_cached=config.use_cached_prepared_benchmarks)]
    for each in cached:
        logger.info("%s is there already: %s", each.dataset.name, each.output)
    due = [each for each in preparations if each not in cached]
    check_scripts(due)
    written = run_scripts(due, config.num_prepare_benchmark_processes)
    prepared = {each.dataset.name: each.output for each in cached}
    return prepared | {each.dataset.name: path for each, path in zip(due, written, strict=True)}


def prepare_benchmark() -> None:
    """What `ng_prepare_benchmark` does."""
    import_module("nemo_gym.cli.functions").run_command("prepare_benchmark")


def discover_benchmarks() -> dict[str, BenchmarkConfig]:
    """Every benchmark that is found, by the name it is chosen by."""
    return list_benchmarks()


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
            f"{inspected if agents else 'It has no agent instances'}; name a benchmark, such as +benchmark=gsm8k or "
            '"+config_paths=[benchmarks/gsm8k/config.yaml]" (ng_list_benchmarks lists them)'
        )
    if config.source and len(preparations) > 1:
        names = listed(each.dataset.name for each in preparations)
        raise ConfigError(f"+source={config.source} is the source of one benchmark, but these are configured: {names}")
    return preparations


def _is_there(preparation: Preparation, *, use_cached: bool) -> bool:
    """Whether the rows of a benchmark are taken as they are: when that is wanted, or nothing could make them anew."""
    return preparation.output.is_file() and (use_cached or preparation.dataset.prepare_script is None)


def _is_meant(query: str, name: str, benchmark: BenchmarkConfig) -> bool:
    names = [name, benchmark.name, benchmark.domain, benchmark.agent_name, benchmark.resources_server]
    return matches(query, names) or query.strip().lower() in benchmark.description.lower()
