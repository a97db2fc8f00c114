"""What the library's scorers make of answers, and where they are corrected."""

import json
from typing import Any

import pytest

from resources_servers.reasoning_gym.answers import extract_answer
from resources_servers.reasoning_gym.rows import generate_rows


def run(job: dict[str, Any]) -> dict[str, Any]:
    from resources_servers.reasoning_gym import scoring  # with the library, which takes a second

    return scoring.run(job)


def entry_of(task: str, seed: int = 4) -> dict[str, Any]:
    """A generated entry as it comes back from a JSONL file."""
    (row,) = generate_rows([task], 1, seed)
    entry: dict[str, Any] = json.loads(json.dumps(row))
    return entry


def score(task: str, given: str, **changes: Any) -> Any:
    return run({"task": task, "entry": {**entry_of(task), **changes}, "given": given})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no: <answer>\n 2 </answer>", "2"),
        ("<answer>2</answer> \\boxed{3}", "2"),
        (r"\boxed{ \frac{1}{2} } or \boxed{3}", r"\frac{1}{2}"),
        (r"\boxed{4", r"\boxed{4"),
        ("  forty-two\n", "forty-two"),
        ("<answer></answer>", ""),
        (" \n", None),
    ],
)
def test_the_answer_is_in_a_tag_or_a_box_or_all_there_is(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "task",
    ["basic_arithmetic", "countdown", "figlet_font", "game_of_life_halting", "maze", "mini_sudoku", "n_queens",
     "polynomial_equations", "prime_factorization", "rearc", "simple_integration", "spiral_matrix", "sudoku"],
)  # fmt: skip
def test_the_reference_answer_scores_one_and_nonsense_almost_nothing(task: str) -> None:
    assert score(task, entry_of(task)["answer"]) == {"score": 1.0, "error": None}
    assert score(task, "zzz")["score"] <= 0.05


def test_a_task_without_reference_answer_is_scored_too() -> None:
    assert entry_of("graph_color")["answer"] is None
    assert score("graph_color", "{}")["score"] <= 0.05


def test_what_the_scorer_cannot_read_scores_zero_and_says_why() -> None:
    assert score("prime_factorization", "two and three") == {
        "score": 0.0,
        "error": "ValueError: invalid literal for int() with base 10: 'two and three'",
    }


def test_an_answer_is_read_and_never_run() -> None:
    assert score("string_insertion", "[].append(1) or list('x')")["score"] == 0.0
    listed = str(list(entry_of("string_insertion")["answer"]))
    assert score("string_insertion", listed)["score"] == 0.1  # as the library rewards a list where text was asked for


@pytest.mark.parametrize(
    "program", ["lambdify(x, 'open(1)')(1)", "Symbol.__init__", "x.free_symbols", "S . One", 'lambdify(x, "1")']
)
def test_a_formula_is_no_program(program: str) -> None:
    assert score("simple_integration", program) == {
        "score": 0.0,
        "error": "a formula has no quotes, attributes or underscores",
    }
    assert score("countdown", "3.5 * (2. + .5)")["error"] is None


def test_the_game_of_life_is_scored_by_what_was_said() -> None:
    expected = entry_of("game_of_life_halting")["answer"]
    other = {"True": "False", "False": "True"}[expected]

    assert score("game_of_life_halting", expected.lower())["score"] == 1.0
    assert score("game_of_life_halting", other)["score"] == 0.0


def test_a_row_the_scorer_cannot_use_is_not_the_models_fault() -> None:
    problem = score("countdown", "zzz", metadata={})["problem"]

    assert "the scorer of 'countdown' rejects the row's own answer too" in problem


@pytest.mark.parametrize(("task", "words"), [("gdc", "did you mean 'gcd'?"), ("composite", "cannot score")])
def test_a_task_without_scorer_is_not_the_models_fault(task: str, words: str) -> None:
    problem = run({"task": task, "entry": {}, "given": "1"})["problem"]

    assert task in problem
    assert words in problem
