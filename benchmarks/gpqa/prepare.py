"""The diamond set of GPQA, from the Hugging Face hub or a local copy.

Its authors ask not to publish the questions in plain text, and the hub hands them out only to those
who agreed to that: accept the terms on the data set's page, and give your token as `hf_token`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.benchmarks import shuffled_choices, source_rows, write_benchmark

OUTPUT = Path("benchmarks/gpqa/data/gpqa_diamond_benchmark.jsonl")
REPOSITORY, FILE = "Idavidrein/gpqa", "gpqa_diamond.csv"

_QUESTION, _RIGHT = "Question", "Correct Answer"
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def prepare(source: str | None = None) -> Path:
    """Write multiple-choice rows for `mcqa`, options shuffled; `source` is a local copy of the published rows."""
    return write_benchmark(OUTPUT, _rows(source))


def _rows(source: str | None) -> Iterator[dict[str, Any]]:
    fields = (_QUESTION, _RIGHT, *_WRONG)
    for row in source_rows(source, fields, lambda hub: hub.file_rows(REPOSITORY, FILE)):
        question, right, *wrong = (str(row[name]).strip() for name in fields)
        yield shuffled_choices(question, right, wrong)


if __name__ == "__main__":
    prepare()
