"""The data sets that the agents of a configuration declare, and where the files of each are."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.config.instances import find_instances
from nemo_gym.errors import listed
from nemo_gym.keys import AGENTS_TYPE
from nemo_gym.paths import resolve_for_reading
from nemo_gym.prompt import PromptConfig, load_prompt_or_explain
from nemo_gym.row_files import stem_of
from nemo_gym.schemas.data_config import DataType
from nemo_gym.schemas.datasets import BenchmarkDatasetConfig, DatasetConfig
from nemo_gym.schemas.server_config import ServerInstanceConfig

logger = logging.getLogger(__name__)

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
