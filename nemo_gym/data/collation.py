"""Prepared files: the rows of the data sets of one kind, each with the agent that is to attempt it."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.data.accumulators import DatasetMetrics
from nemo_gym.data.declared import DataType, DeclaredDataset
from nemo_gym.data.metrics_files import MetricsFiles, writing_to
from nemo_gym.data.samples import completed_rows
from nemo_gym.keys import AGENT_REF_KEY_NAME, AGENTS_TYPE
from nemo_gym.paths import resolve_for_reading

logger = logging.getLogger(__name__)


def write_dataset_metrics(dataset: DeclaredDataset, metrics: DatasetMetrics, files: MetricsFiles) -> None:
    """Write, or compare, the metrics beside a data set."""
    path = dataset.beside("_metrics.json")
    files.write(path, metrics.after(dataset.config.model_dump(mode="json")), resolve_for_reading(path, Path.is_file))


def collate(
    data_type: DataType,
    datasets: Sequence[DeclaredDataset],
    metrics: DatasetMetrics,
    folder: Path,
    files: MetricsFiles,
) -> list[Path]:
    """Write the rows of these data sets, all of one type, to `<folder>/<type>.jsonl`, and what is known about them.

    Returns:
        The files with rows; none when the metrics are in conflict with those of an earlier preparation.
    """
    content = metrics.after(datasets[0].config.model_dump(mode="json"))
    if not files.write(folder / f"{data_type}_metrics.json", content):
        return []
    whole = folder / f"{data_type}.jsonl"
    parts = [dataset.beside("_prepare.jsonl") for dataset in datasets]
    with writing_to(whole) as together:
        for dataset, part in zip(datasets, parts, strict=True):
            with writing_to(part) as alone:
                for line in prepared_lines(dataset):
                    alone.write(line)
                    together.write(line)
    return [*parts, whole]


def prepared_lines(dataset: DeclaredDataset) -> Iterator[bytes]:
    """Every row as often as its data set says, named after its agent."""
    repeats = dataset.config.num_repeats
    if repeats > 1:
        logger.info("Each row is written %d times, its copies one after the other: %s", repeats, dataset)
    agent = {"type": AGENTS_TYPE, "name": dataset.agent}
    for _, row, _ in completed_rows(dataset):
        assert row is not None  # examined before: lines without an object were refused
        yield from _repeated({**row, AGENT_REF_KEY_NAME: agent}, repeats)


def by_type(datasets: Iterable[DeclaredDataset], types: Sequence[DataType]) -> dict[DataType, list[DeclaredDataset]]:
    """The data sets of each type there is one of, in the order of `types`."""
    found = list(datasets)
    grouped = {data_type: [each for each in found if each.config.type == data_type] for data_type in types}
    return {data_type: group for data_type, group in grouped.items() if group}


def _repeated(row: dict[str, Any], repeats: int) -> Iterator[bytes]:
    line = json.dumps(row).encode() + b"\n"
    for _ in range(repeats):
        yield line
