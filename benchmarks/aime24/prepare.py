"""The problems of AIME 2024, from the Hugging Face hub or a local copy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.benchmarks import source_rows, write_benchmark

OUTPUT = Path("benchmarks/aime24/data/aime24_benchmark.jsonl")
REPOSITORY, SPLIT = "HuggingFaceH4/aime_2024", "train"


def prepare(source: str | None = None) -> Path:
    """Write rows with `question` and `expected_answer`; `source` is a local copy of the published rows."""
    return write_benchmark(OUTPUT, _rows(source))


def _rows(source: str | None) -> Iterator[dict[str, Any]]:
    for row in source_rows(source, ("problem", "answer"), lambda hub: hub.rows(REPOSITORY, SPLIT)):
        answer = str(row["answer"]).strip()
        # Published as on the answer sheet, `025`; nobody puts that into a box.
        yield {"question": row["problem"], "expected_answer": str(int(answer)) if answer.isdecimal() else answer}


if __name__ == "__main__":
    prepare()
