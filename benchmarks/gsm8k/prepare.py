"""The test problems of GSM8K, from the Hugging Face hub or a local copy."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.benchmarks import SourceRowsError, source_rows, write_benchmark

OUTPUT = Path("benchmarks/gsm8k/data/gsm8k_benchmark.jsonl")
REPOSITORY, NAME, SPLIT = "openai/gsm8k", "main", "test"

_ANSWER_MARK = "####"
_CALCULATION = re.compile(r"<<.*?>>")


def prepare(source: str | None = None) -> Path:
    """Write rows with `question`, `expected_answer` and `reference_solution`.

    `source` is a local copy of the published rows.
    """
    return write_benchmark(OUTPUT, _rows(source))


def _rows(source: str | None) -> Iterator[dict[str, Any]]:
    for row in source_rows(source, ("question", "answer"), lambda hub: hub.rows(REPOSITORY, SPLIT, NAME)):
        solution, mark, answer = row["answer"].rpartition(_ANSWER_MARK)
        if not mark:
            raise SourceRowsError(f"a solution of GSM8K ends with `{_ANSWER_MARK} <answer>`, this one does not: {row}")
        yield {
            "question": row["question"],
            "expected_answer": answer.replace(",", "").strip(),  # text: that is what verifiers compare
            "reference_solution": _CALCULATION.sub("", solution).strip(),
        }


if __name__ == "__main__":
    prepare()
