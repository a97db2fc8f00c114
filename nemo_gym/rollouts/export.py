"""From collected rollouts to a data set for supervised or preference training.

The file is read twice: once for where each rollout is and what it scored, then only the chosen rollouts. Memory
grows with the number of rollouts, not with what they say.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.rollouts.export_files import open_data_set
from nemo_gym.rollouts.export_formats import (
    Conversation,
    Example,
    NotExportableError,
    as_dpo,
    as_messages,
    as_sft,
)
from nemo_gym.rollouts.export_index import Entry, RecordReader, RolloutIndex
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.schemas.export_config import ExportConfig

Choice = tuple[Entry, ...]
"""The rollouts one example is made of: one, or a better and a worse one."""


@dataclass
class ExportSummary:
    """What an export wrote, and what it left out."""

    path: Path
    examples: int = 0
    tasks: int = 0
    """Tasks that have an example."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that cannot be used, by reason."""

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "output_fpath": str(self.path),
            "examples": self.examples,
            "tasks": self.tasks,
            "left_out": dict(self.left_out),
        }


def export_rollouts(config: ExportConfig) -> ExportSummary:
    """Write the data set that `config` asks for.

    Raises:
        ConfigError: the rollouts are missing or malformed, the filter is not an expression, or the output is there
            already.
    """
    source, target = Path(config.rollouts_jsonl_fpath).expanduser(), Path(config.output_fpath).expanduser()
    _check_paths(source, target, config)
    index = RolloutIndex.of(source, with_statistics=config.filter is not None)
    summary = ExportSummary(target, left_out=index.left_out)
    if config.filter is not None:
        index.select(config.filter)
    tasks = set()
    with RecordReader(source) as reader, open_data_set(target) as write:
        for choice in _choices(index, config):
            try:
                example = _example(choice, config, reader, source)
            except NotExportableError as error:
                summary.left_out[str(error)] += 1
                continue
            write(example)
            summary.examples += 1
            tasks.add(choice[0].key.task_index)
    summary.tasks = len(tasks)
    return summary


def _check_paths(source: Path, target: Path, config: ExportConfig) -> None:
    if not source.is_file():
        raise ConfigPathNotFoundError(f"+rollouts_jsonl_fpath={source} does not exist (looked in {Path.cwd()})")
    if not target.exists():
        return
    if any(file.exists() and target.samefile(file) for file in RolloutPaths(source).of_one_run):
        raise ConfigError(f"+output_fpath={target} belongs to the run that is to be exported; name another file")
    if not config.overwrite:
        raise ConfigError(f"+output_fpath={target} exists; name another file, or replace it with +overwrite=true")


def _choices(index: RolloutIndex, config: ExportConfig) -> Iterator[Choice]:
    """What each example is to be made of, in task order."""
    for entries in index.tasks():
        best_first = sorted(entries, key=lambda entry: (-entry.reward, entry.key))
        if config.format == "dpo":
            yield from _pairs(best_first, config)
        else:
            good = [entry for entry in best_first if _is_good(entry, config)]
            yield from ((entry,) for entry in sorted(good[: config.max_per_task]))


def _pairs(best_first: list[Entry], config: ExportConfig) -> Iterator[Choice]:
    """The best with the worst, the second best with the second worst, and so on while one is better."""
    for chosen, rejected in list(zip(best_first, reversed(best_first), strict=True))[: config.max_per_task or 1]:
        if chosen.reward > rejected.reward and _is_good(chosen, config):
            yield chosen, rejected


def _is_good(entry: Entry, config: ExportConfig) -> bool:
    return config.min_reward is None or entry.reward >= config.min_reward


def _example(choice: Choice, config: ExportConfig, reader: RecordReader, source: Path) -> Example:
    conversations = [Conversation(reader.read(entry), entry, source.name) for entry in choice]
    if config.format == "dpo":
        return as_dpo(*conversations)
    return as_messages(*conversations) if config.format == "messages" else as_sft(*conversations)
