"""What prepare scripts of benchmarks have in common: where rows come from, and where they go."""

import hashlib
import logging
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from nemo_gym.data.hub import Hub
from nemo_gym.data.missing import configured_hub
from nemo_gym.data.transfer import write_jsonl
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.paths import candidates, resolve_for_reading
from nemo_gym.row_files import read_rows

logger = logging.getLogger(__name__)

Row = dict[str, Any]


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
