"""What is done in isolated processes: ask the library how good an answer is.

Only those processes import this module, and the library with it.
"""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import io
import itertools
import re
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

import numpy as np
import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS

from resources_servers.reasoning_gym.formulas import read_expression, read_number

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


def _number(kind: type[float] | type[complex], *given: Any) -> float | complex:
    """Read a number and refuse NaN, which these scorers take for a right answer."""
    number = kind(*given)
    if number != number:
        raise ValueError("an answer that is no number")
    return number


for _module, _kind in {"algebra.complex_arithmetic": complex, "algorithmic.number_sorting": float}.items():
    vars(importlib.import_module(f"reasoning_gym.{_module}"))[_kind.__name__] = functools.partial(_number, _kind)

_VERSION = importlib.metadata.version("reasoning-gym")
_ABOVE_ONE = 1.001
"""Shares that are added up may come to a little more than 1."""
_SUSPICIOUS = 0.5
"""Below this the row's own answer is scored too, to see that it does better. (Some scorers reward any text a bit.)"""


def prepare(payload: dict[str, Any]) -> None:
    """Make the task's scorer, for all children to come."""
    scorer_of(payload["task"])


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """Return `{score, error}`, where an answer with an error scores next to nothing, or `{problem}` of the row."""
    task, entry, given = payload["task"], payload["entry"], payload["given"]
    scorer = scorer_of(task)
    if scorer is None:
        near = get_close_matches(task, sorted(DATASETS), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return {"problem": f"reasoning-gym {_VERSION} cannot score the task {task!r}{hint}"}
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
    """Return the score, and the error because of which it is that of any text."""
    try:
        score = float(scorer(answer=given, entry=_as_generated(entry) if task in _COMPARING_TUPLES else entry))
    except Exception as error:  # noqa: BLE001 - the library does not say what it raises
        return _UNREADABLE.get(task, 0.0), f"{type(error).__name__}: {error}"
    return (score, None) if 0 <= score < _ABOVE_ONE else (0.0, f"the library gives {score}, which is not from 0 to 1")


def _as_generated(value: Any) -> Any:
    """The grids of an entry as tuples, which JSON has turned into lists."""
    if isinstance(value, dict):
        return {key: _as_generated(inner) for key, inner in value.items()}
    return tuple(_as_generated(inner) for inner in value) if isinstance(value, list) else value


_COMPARING_TUPLES = frozenset({"arc_agi", "rearc"})
"""Their scorers compare grids with `==`, to which a list is never a tuple."""


def _same_word(answer: str, entry: Entry) -> float:
    return float(answer.strip().strip(".'\"").casefold() == str(entry["answer"]).strip().casefold())


def _probability(answer: str, entry: Entry) -> float:
    """Return 1 for the right probability, else the share of the digits that come out right."""
    given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, entry["answer"]))
    if abs(given - right) <= _CLOSE_PROBABILITY:
        return 1.0
    shown, expected = f"{given:.10g}", f"{right:.10g}"
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shown, expected, strict=False))
    return len(list(same)) / max(len(shown), len(expected))


def _countdown(answer: str, entry: Entry) -> float:
    return 1.0 if _reaches(answer, entry["metadata"]["numbers"], entry["metadata"]["target"]) else _PARSEABLE


def _puzzle24(answer: str, entry: Entry) -> float:
    return 1.0 if _reaches(answer, entry["metadata"]["numbers"], 24) else _UNREADABLE["puzzle24"]


def _reaches(answer: str, numbers: list[int], target: int) -> bool:
    """Whether a formula has this value, and each of the numbers once and no other."""
    formula = read_number(answer)
    is_close = np.isclose(float(formula.value), target, atol=1e-6)
    as_written = [int(digits) for digits in re.findall(r"\b\d+\b", answer)]
    return bool(is_close) and sorted(as_written) == sorted(formula.numbers) == sorted(numbers)


def _polynomial(answer: str, entry: Entry) -> float:
    return float(read_expression(answer) == read_expression(entry["answer"]))


def _antiderivative(answer: str, entry: Entry) -> float:
    variable = entry["metadata"]["variable"]
    may_integrate = "Integral" in entry["answer"]  # the library could not compute this one either
    given = read_expression(answer, variables=frozenset({variable, "C"}), may_integrate=may_integrate)
    integrand = read_expression(entry["metadata"]["integrand"], variables=frozenset({variable}))
    return float(sympy.simplify(sympy.diff(given, sympy.Symbol(variable)) - integrand) == 0)


_CLOSE_PROBABILITY = 1e-4
_PARSEABLE = 0.05
"""What the library gives for any formula of numbers in `countdown`."""
_UNREADABLE = {"countdown": 0.01, "puzzle24": 0.01}
"""What it gives for any text."""
_OWN_SCORERS: dict[str, Scorer] = {
    "coin_flip": _probability,
    "countdown": _countdown,
    "game_of_life_halting": _same_word,
    "intermediate_integration": _antiderivative,
    "polynomial_multiplication": _polynomial,
    "puzzle24": _puzzle24,
    "simple_integration": _antiderivative,
}
"""The library's scorer of `coin_flip` takes 0 for any probability, and that of `game_of_life_halting` every text for
"True"; its others run what the model wrote."""
