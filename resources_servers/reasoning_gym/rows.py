"""Rows made by the reasoning-gym library: the same tasks, number and seed give the same rows, everywhere."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_gym.config_types import ConfigError, did_you_mean

Row = dict[str, Any]

INSTRUCTIONS = (
    "Solve the task. You may think aloud first. Give the final answer, and nothing else, between <answer> and "
    "</answer>, in the form the task asks for."
)
NOT_GENERATED = frozenset({"composite"})
"""Not a task of its own: it mixes others."""
WITHOUT_ANSWER = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
"""Their rows have no reference answer (many are right), so that only the library's scorer can tell."""
HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Their generators iterate over sets of text, whose order Python changes in every process unless told not to."""


def task_names() -> list[str]:
    """Every task that rows can be made of."""
    return sorted(_library().factory.DATASETS.keys() - NOT_GENERATED)


def generate_rows(tasks: Sequence[str], size: int, seed: int) -> Iterator[Row]:
    """`size` rows, the tasks taking turns.

    Raises:
        ConfigError: a task that the library does not have, or one that this process cannot reproduce.
    """
    _check(tasks)
    library = _library()
    per_task = -(-size // len(tasks))
    with contextlib.redirect_stdout(io.StringIO()):  # some generators print dots
        datasets = [library.create_dataset(task, size=per_task, seed=seed) for task in tasks]
    for number in range(size):
        with contextlib.redirect_stdout(io.StringIO()):
            entry = datasets[number % len(tasks)][number // len(tasks)]
        yield row_of(entry)


def row_of(entry: dict[str, Any]) -> Row:
    """A row of the library's `{question, answer, metadata}`."""
    messages = [{"role": "developer", "content": INSTRUCTIONS}, {"role": "user", "content": entry["question"]}]
    return {
        "responses_create_params": {"input": messages},
        "question": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
    }


def hashes_are_fixed() -> bool:
    """Whether this process was started with a fixed PYTHONHASHSEED."""
    return not sys.flags.hash_randomization


def _check(tasks: Sequence[str]) -> None:
    known = task_names()
    if not tasks:
        raise ConfigError(f"no task was named; there are {', '.join(known)}")
    for task in tasks:
        if task not in known:
            raise ConfigError(f"reasoning-gym has no task {task!r}{did_you_mean(task, known)}")
    dependent = sorted(HASH_DEPENDENT.intersection(tasks))
    if dependent and not hashes_are_fixed():
        raise ConfigError(
            f"{', '.join(dependent)}: rows of these tasks would differ from run to run; start Python with "
            "PYTHONHASHSEED=0 (scripts/create_dataset.py does)"
        )


def _library() -> Any:
    try:
        import reasoning_gym  # takes seconds
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ConfigError(
            "the library reasoning-gym is not installed in this environment (ng_run installs it for the server alone): "
            "pip install 'reasoning-gym>=0.1.25'"
        ) from error

    return reasoning_gym
