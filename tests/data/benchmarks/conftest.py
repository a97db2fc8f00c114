"""Published data sets in miniature: the columns are those on the hub, the questions are not."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

Rows = list[dict[str, Any]]

AIME = [
    {
        "id": 60,
        "problem": "Find the number of sides of a square.",
        "solution": "Count.",
        "answer": "004",
        "year": "2024",
    },
    {"id": 61, "problem": "Find $20^2+20$.", "solution": "$400+20$", "answer": "420", "year": "2024"},
]
GSM8K = [
    {"question": "Ann has 3 pens and buys 4.  How many has she?", "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    {
        "question": "A car costs $1,000 and a van twice that. The van?",
        "answer": "2*1000=<<2*1000=2000>>2000\n#### 2,000",
    },
]
GPQA = [
    {
        "Question": f"Which of these is {kind}?",
        "Correct Answer": right,
        "Incorrect Answer 1": "a stone",
        "Incorrect Answer 2": "a cloud, grey",
        "Incorrect Answer 3": "a tune",
        "Subdomain": "made up",
    }
    for kind, right in (("an animal", "a cat"), ("a plant", "an oak"), ("a metal", "tin"))
]
MMLU_PRO = [
    {
        "question_id": 70,
        "question": "What is 2 + 3?",
        "options": [str(number) for number in range(1, 11)],
        "answer": "E",
        "answer_index": 4,
        "category": "math",
    },
    {
        "question_id": 71,
        "question": "Which one bills the buyer?",
        "options": ["The buyer", "N/A", "The seller"],
        "answer": "C",
        "answer_index": 2,
        "category": "business",
    },
]


@pytest.fixture
def published() -> dict[str, Rows]:
    """The rows of each benchmark as its authors publish them."""
    return {"aime24": AIME, "gsm8k": GSM8K, "gpqa": GPQA, "mmlu_pro": MMLU_PRO}


@pytest.fixture
def as_file() -> Callable[[str, Rows], bytes]:
    """Rows in the format that a name asks for."""

    def pack(name: str, rows: Rows) -> bytes:
        if name.endswith(".csv"):
            lines = [list(rows[0]), *(list(row.values()) for row in rows)]
            return "".join(",".join(json.dumps(str(cell)) for cell in cells) + "\n" for cells in lines).encode()
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        return buffer.getvalue()

    return pack


@pytest.fixture
def hub_with_benchmarks(
    hub: Any, published: dict[str, Rows], as_file: Callable[[str, Rows], bytes], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The hub as it is to the prepare scripts, for this process and for those it starts."""
    for name, (repo_id, path) in {
        "aime24": ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"),
        "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet"),
        "gpqa": ("Idavidrein/gpqa", "gpqa_diamond.csv"),
        "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "data/test-00000-of-00001.parquet"),
    }.items():
        hub.publish(repo_id, {path: as_file(path, published[name])})
    hub.publish("openai/gsm8k", {"socratic/test-00000-of-00001.parquet": as_file("p", [{"question": "?"}])})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(Path("hub_home/hub").absolute()))
    return hub
