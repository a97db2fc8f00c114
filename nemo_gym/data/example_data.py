"""Whether an environment comes with what people expect to find in its `data` folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.jsonl import iter_lines

EXAMPLES = 5


def example_problems(folder: Path) -> list[str]:
    """What is missing or wrong in the `data` folder of a resources server, each with the command that makes it."""
    data = folder / "data"
    return [*_examples(data), *_metrics(data, folder), *_conflicts(data), *_rollouts(data, folder)]


def _examples(data: Path) -> Iterator[str]:
    path = data / "example.jsonl"
    found = _lines(path)
    if found != EXAMPLES:
        yield f"{path} {_found(found)}: write {EXAMPLES} example rows, one JSON object per line"


def _metrics(data: Path, folder: Path) -> Iterator[str]:
    path = data / "example_metrics.json"
    remedy = (
        f"make it with `ng_prepare_data +mode=example_validation +output_dirpath=results/{folder.name} "
        f'"+config_paths=[resources_servers/{folder.name}/configs/{folder.name}.yaml]"`'
    )
    if not path.is_file():
        yield f"{path} is missing: {remedy}"
        return
    try:
        content: Any = json.loads(path.read_bytes())
    except ValueError:
        content = None
    counted = content.get("Number of examples") if isinstance(content, dict) else None
    if counted != EXAMPLES:
        yield f"{path} counts {counted} examples instead of {EXAMPLES}: delete it and {remedy}"


def _conflicts(data: Path) -> Iterator[str]:
    for path in sorted(data.glob("*conflict*")):
        yield f"{path} says that metrics disagree with their data: settle it and delete the file"


def _rollouts(data: Path, folder: Path) -> Iterator[str]:
    path = data / "example_rollouts.jsonl"
    found = _lines(path)
    if found != EXAMPLES:
        yield (
            f"{path} {_found(found)}: collect them with `ng_e2e_collect_rollouts +split=example "
            f"+output_jsonl_fpath=results/{folder.name}.jsonl` and the configs of the environment and of a model, and "
            "copy the file"
        )


def _lines(path: Path) -> int | None:
    return sum(1 for _ in iter_lines(path)) if path.is_file() else None


def _found(lines: int | None) -> str:
    return "is missing" if lines is None else f"has {lines} lines instead of {EXAMPLES}"
