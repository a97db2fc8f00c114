"""The test questions of MMLU-Pro, from the Hugging Face hub or a local copy."""

from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from nemo_gym.benchmarks import SourceRowsError, choices, source_rows, write_benchmark

OUTPUT = Path("benchmarks/mmlu_pro/data/mmlu_pro_benchmark.jsonl")
REPOSITORY, SPLIT = "TIGER-Lab/MMLU-Pro", "test"

_MOST_OPTIONS = 10
_NO_OPTION = "N/A"


def prepare(source: str | None = None) -> Path:
    """Write multiple-choice rows for `mcqa` with their `category`; `source` is a local copy of the published rows."""
    return write_benchmark(OUTPUT, _rows(source))


def _rows(source: str | None) -> Iterator[dict[str, Any]]:
    fields = ("question", "options", "answer", "category")
    for row in source_rows(source, fields, lambda hub: hub.rows(REPOSITORY, SPLIT)):
        options = dict(zip(ascii_uppercase[:_MOST_OPTIONS], map(str, row["options"]), strict=False))
        offered = [letter for letter, option in options.items() if option.strip() != _NO_OPTION]
        right = str(row["answer"]).strip()
        if right not in offered:
            raise SourceRowsError(f"expected up to {_MOST_OPTIONS} options and the letter of the right one: {row}")
        texts = [options[letter].strip() for letter in offered]
        yield {**choices(str(row["question"]).strip(), texts, offered.index(right)), "category": row["category"]}


if __name__ == "__main__":
    prepare()
