"""What is done in isolated processes: ask the library how good an answer is.

Only those processes import this module, and the library with it.
"""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import io
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

Scorer = Callable[..., float]
Entry = dict[str, Any]

_EVALUATING_MODULES = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Their scorers call `eval` on what the model wrote, to read lists. For lists, literals are enough."""
for _module in _EVALUATING_MODULES:
    vars(importlib.import_module(f"reasoning_gym.{_module}"))["eval"] = ast.literal_eval

_FORMULA_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Their scorers have sympy evaluate what the model wrote, which could be a program that writes its own score."""
_NO_FORMULA = re.compile(r"""["'_\\]|\.\s*[^\W\d]""")

_VERSION = importlib.metadata.version("reasoning-gym")
_SUSPICIOUS = 0.5
"""Below this the row's own answer is scored too, to see that it does better. (Some scorers reward any text a bit.)"""


def prepare(payload: dict[str, Any]) -> None:
    """Make the task's scorer, for all children to come."""
    scorer_of(payload["task"])


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """`{score, error}`, where an error of the scorer is a score of 0; or `{problem}` when the row is at fault."""
    task, entry, given = payload["task"], payload["entry"], payload["given"]
    scorer = scorer_of(task)
    if scorer is None:
        near = get_close_matches(task, sorted(DATASETS), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return {"problem": f"reasoning-gym {_VERSION} cannot score the task {task!r}{hint}"}
    if task in _FORMULA_TASKS and _NO_FORMULA.search(given):
        return {"score": 0.0, "error": "a formula has no quotes, attributes or underscores"}
    score, error = _score(scorer, task, entry, given)
    if score < _SUSPICIOUS and entry["answer"] is not None:
        reference_score, reference_error = _score(scorer, task, entry, entry["answer"])
        if reference_score <= score:
            return {
                "problem": f"the scorer of {task!r} rejects the row's own answer too"
                f"{f' ({reference_error})' if reference_error else ''}; question, answer and metadata must be what "
                f"reasoning-gym {_VERSION} generates"
            }
    return {"score": score, "error": error}


@functools.lru_cache(256)
def scorer_of(task: str) -> Scorer | None:
    """The function that scores answers to `task`; None when the library has none."""
    own = _OWN_SCORERS.get(task)
    if own is not None or task not in DATASETS:
        return own
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            scorer: Scorer = reasoning_gym.get_score_answer_fn(task)
    except AssertionError:  # `composite` is nothing without its parts
        return None
    return scorer


def _score(scorer: Scorer, task: str, entry: Entry, given: str) -> tuple[float, str | None]:
    """The score, and the error for which it is 0."""
    try:
        return float(scorer(answer=given, entry=_as_generated(entry) if task in _COMPARING_TUPLES else entry)), None
    except Exception as error:  # noqa: BLE001 - the library does not say what it raises
        return 0.0, f"{type(error).__name__}: {error}"


def _as_generated(value: Any) -> Any:
    """The grids of an entry as tuples, which JSON has turned into lists."""
    if isinstance(value, dict):
        return {key: _as_generated(inner) for key, inner in value.items()}
    return tuple(_as_generated(inner) for inner in value) if isinstance(value, list) else value


_COMPARING_TUPLES = frozenset({"arc_agi", "rearc"})
"""Their scorers compare grids with `==`, to which a list is never a tuple."""


def _same_word(answer: str, entry: Entry) -> float:
    return float(answer.strip().strip(".'\"").casefold() == str(entry["answer"]).strip().casefold())


_OWN_SCORERS: dict[str, Scorer] = {"game_of_life_halting": _same_word}
"""The library's scorer of this task takes every text for "True"."""
