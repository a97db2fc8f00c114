"""The data sets that the agents of a configuration declare: where their files are, and the scripts that make them.

The `prepare.py` of a benchmark is found through the search roots, checked before any is run, then run. It has a
function `prepare(**arguments) -> Path` that writes the raw rows and says where. It is run with the current folder as
it is, so a script that names a relative path writes below the current folder also when the script itself lies in an
installation that nobody may write to.
"""

import importlib.util
import inspect
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_gym.config.handover import remove_config_file, write_config_file
from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.keys import AGENTS_TYPE, NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME
from nemo_gym.log import setup_logging
from nemo_gym.paths import candidates, component_search_roots, resolve_for_reading
from nemo_gym.prompt import PromptConfig, load_prompt_or_explain
from nemo_gym.row_files import stem_of
from nemo_gym.schemas.data_config import BenchmarkDatasetConfig, DatasetConfig, DataType
from nemo_gym.schemas.server_config import ServerInstanceConfig

AnyDataset = DatasetConfig | BenchmarkDatasetConfig


@dataclass(frozen=True)
class DeclaredDataset:
    """A data set in scope, with the agent that is to attempt its rows."""

    agent: str
    config: AnyDataset
    prompt_override: str | None = None
    """A prompt that takes the place of the declared one."""
    shares_file: bool = False
    """Whether an earlier agent declares the same file, so that what is written beside it needs a name of its own."""

    @property
    def path(self) -> Path:
        """Where its rows are read from."""
        return resolve_for_reading(self.config.jsonl_fpath, Path.is_file)

    @property
    def prompt(self) -> PromptConfig | None:
        """The template for its rows; only benchmarks declare one."""
        given = self.prompt_override or getattr(self.config, "prompt_config", None)
        return load_prompt_or_explain(given) if given else None

    def beside(self, ending: str) -> Path:
        """A file beside the data set, at the path as it is configured: below the current folder if that is relative."""
        given = Path(self.config.jsonl_fpath).expanduser()
        infix = f"_{self.agent}" if self.shares_file else ""
        return given.with_name(f"{stem_of(given)}{infix}{ending}")

    def __str__(self) -> str:
        return f"{self.config.name!r} ({self.config.type}) of {self.agent!r}: {self.config.jsonl_fpath}"


def agents_in_scope(global_config: Any, types: Sequence[DataType]) -> list[ServerInstanceConfig]:
    """The agents with a data set of these types; their data sets of other types are taken off them."""
    agents = [instance for instance in find_instances(global_config)[0] if instance.SERVER_TYPE == AGENTS_TYPE]
    with_data = [agent for agent in agents if agent.datasets]
    without = [agent.name for agent in agents if not agent.datasets]
    logger.info("Agents with data sets: %s; without: %s", listed(a.name for a in with_data), listed(without))
    for agent in with_data:
        block = agent.get_inner_run_server_config()
        block.datasets = [dataset for dataset in block.datasets or () if dataset.type in types]
    in_scope = [agent for agent in with_data if agent.datasets]
    for dataset in datasets_of(in_scope):
        logger.info("In scope: %s", dataset)
    return in_scope


def datasets_of(
    agents: Iterable[ServerInstanceConfig], prompt_override: str | None = None
) -> Iterator[DeclaredDataset]:
    """Every data set of these agents, in their order."""
    seen: set[Path] = set()
    for agent in agents:
        for config in agent.datasets or ():
            place = Path(config.jsonl_fpath).expanduser().absolute()
            yield DeclaredDataset(agent.name, config, prompt_override, shares_file=place in seen)
            seen.add(place)


logger = logging.getLogger(__name__)

_FUNCTION = "prepare"


class PrepareScriptError(GymError, RuntimeError):
    """A prepare script failed."""


class PrepareConfigError(ConfigError, RuntimeError):
    """A benchmark that cannot be prepared as it is configured."""


class WrongOutputError(ConfigError, AssertionError):
    """A script wrote its rows somewhere else than the data set says."""


@dataclass(frozen=True)
class Preparation:
    """One benchmark's data to be made."""

    agent: str
    dataset: BenchmarkDatasetConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """Where its script is, or would be.

        Raises:
            PrepareConfigError: it has none.
        """
        if self.dataset.prepare_script is None:
            raise PrepareConfigError(f"{self.dataset.name} has no prepare_script")
        return resolve_for_reading(self.dataset.prepare_script, Path.is_file)

    @property
    def output(self) -> Path:
        """The file its rows are read from, or would be."""
        return resolve_for_reading(self.dataset.jsonl_fpath, Path.is_file)


def check_scripts(preparations: Sequence[Preparation]) -> None:
    """Refuse to begin unless every script is there and can be called.

    Raises:
        PrepareConfigError: naming everything that is wrong.
    """
    complaints: dict[str, list[str]] = {}
    for preparation in preparations:
        for kind, text in _complaints(preparation):
            complaints.setdefault(kind, []).append(f"\n  {preparation.dataset.name}: {text}")
    if complaints:
        parts = [f"these benchmarks are {kind}:{''.join(texts)}" for kind, texts in complaints.items()]
        raise PrepareConfigError("Nothing was prepared, because " + "\nand ".join(parts))


def run_scripts(preparations: Sequence[Preparation], processes: int = 1) -> list[Path]:
    """Run the scripts, several at once if asked to; where the rows of each are.

    Raises:
        PrepareScriptError: a script failed.
        WrongOutputError: a script wrote another file than its data set names.
    """
    if processes > 1 and len(preparations) > 1:
        written = _run_in_processes(preparations, min(processes, len(preparations)))
    else:
        written = [run_script(preparation) for preparation in preparations]
    return [_checked_output(each, path) for each, path in zip(preparations, written, strict=True)]


def run_script(preparation: Preparation) -> Path:
    """Run one script in this process."""
    logger.info("Preparing %s with %s", preparation.dataset.name, preparation.script)
    with search_roots_on_path():
        try:
            written = _prepare_function(_load(preparation.script))(**preparation.arguments)
        except GymError:
            raise
        except Exception as error:
            raise PrepareScriptError(
                f"{preparation.script} failed: {type(error).__name__}: {error} (NEMO_GYM_DEBUG=1 shows where)"
            ) from error
    if not isinstance(written, str | os.PathLike):
        raise PrepareConfigError(f"`{_FUNCTION}` of {preparation.script} must return the path it wrote to")
    return Path(written)


@contextmanager
def search_roots_on_path() -> Iterator[None]:
    """Let scripts import what lies beside them, in the order in which everything else is looked for."""
    before = list(sys.path)
    roots = [str(root) for root in component_search_roots()]
    sys.path[:] = [*roots, *(entry for entry in before if entry not in roots)]
    try:
        yield
    finally:
        sys.path[:] = before


def missing_script(preparation: Preparation) -> tuple[str, str] | None:
    """What is the matter with a benchmark that has no script, and what to do; None when its script is there."""
    if preparation.dataset.prepare_script is None:
        rows = preparation.dataset.jsonl_fpath
        looked = ", ".join(map(str, candidates(rows)))
        return (
            "without rows and without a `prepare_script` that makes them",
            f"write {rows} (looked for {looked}), or name the script in its declaration",
        )
    if not preparation.script.is_file():
        looked = ", ".join(map(str, candidates(preparation.dataset.prepare_script)))
        return "missing a valid prepare script", f"{preparation.dataset.prepare_script} (looked for {looked})"
    return None


def _complaints(preparation: Preparation) -> Iterator[tuple[str, str]]:
    if (missing := missing_script(preparation)) is not None:
        yield missing
        return
    script = preparation.script
    try:
        with search_roots_on_path():
            function = _prepare_function(_load(script))
    except PrepareConfigError as error:
        yield f"missing the {_FUNCTION} function", str(error)
        return
    except Exception as error:  # noqa: BLE001 - anything a script does while it is loaded is reported with the others
        yield "missing a valid prepare script", f"{script} cannot be loaded: {type(error).__name__}: {error}"
        return
    signature = inspect.signature(function)
    try:
        signature.bind(**preparation.arguments)
    except TypeError as error:
        yield (
            "called with the wrong arguments",
            f"{error}; `{_FUNCTION}` of {script} takes {listed(signature.parameters)}",
        )


def _prepare_function(module: ModuleType) -> Callable[..., Any]:
    function = getattr(module, _FUNCTION, None)
    if not callable(function):
        raise PrepareConfigError(f"{module.__file__} has no function `{_FUNCTION}`")
    found: Callable[..., Any] = function
    return found


def _load(script: Path) -> ModuleType:
    """The script as a module, under the name it would have if its root were on the path."""
    root = next((root for root in component_search_roots() if script.is_relative_to(root)), script.parent)
    name = ".".join(script.relative_to(root).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _checked_output(preparation: Preparation, written: Path) -> Path:
    expected = preparation.dataset.jsonl_fpath
    places = candidates(expected)
    if written.absolute().resolve() not in {place.absolute().resolve() for place in places}:
        raise WrongOutputError(
            "Expected the actual prepared dataset output fpath to match the jsonl_fpath set in the config: "
            f"{preparation.script} wrote {written.absolute()}, but the data set {preparation.dataset.name!r} has "
            f"{expected} ({places[0]}); correct the one or the other"
        )
    if not written.is_file():
        raise PrepareScriptError(f"{preparation.script} says it wrote {written.absolute()}, but there is no such file")
    if preparation.output.resolve() != written.resolve():
        logger.warning("%s comes before %s and is what will be used", preparation.output, written.absolute())
    return written


def _run_in_processes(preparations: Sequence[Preparation], processes: int) -> list[Path]:
    """A fresh process per script at most `processes` at a time; each gets the configuration of this one."""
    config = maybe_get_global_config_dict()
    config_file = None if config is None else write_config_file(config)
    context = multiprocessing.get_context("spawn")
    try:
        with futures.ProcessPoolExecutor(
            processes, context, _take_over, (config_file, logger.getEffectiveLevel())
        ) as pool:
            return list(pool.map(run_script, preparations))
    finally:
        if config_file is not None:
            remove_config_file(config_file)


def _take_over(config_file: Path | None, log_level: int) -> None:
    """Begin life as a worker."""
    setup_logging(verbose=log_level <= logging.DEBUG)
    if config_file is not None:
        os.environ[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME] = str(config_file)
