"""What the library's scorers make of answers, and where they are corrected."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from nemo_gym import PARENT_DIR
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
    ("task", "given"),
    [
        ("countdown", "lambdify(x, 'open(1)')(1)"),
        ("puzzle24", "exec(chr(105)) or 24"),
        ("simple_integration", "Symbol.__init__"),
        ("polynomial_multiplication", "expand((x + 1)*(x - 1))"),
        ("intermediate_integration", "integrate(x, x)"),
    ],
)
def test_a_formula_is_no_program(task: str, given: str) -> None:
    verdict = run({"task": task, "entry": FORMULAS[task], "given": given})

    assert verdict["score"] == (0.01 if task in ("countdown", "puzzle24") else 0.0)
    assert verdict["error"].startswith("FormulaError: a formula has no ")


FORMULAS: dict[str, dict[str, Any]] = {
    "countdown": {"answer": "9*3 + 4", "metadata": {"numbers": [9, 3, 4], "target": 31}},
    "puzzle24": {"answer": "1*2*3*4", "metadata": {"numbers": [1, 2, 3, 4]}},
    "polynomial_multiplication": {"answer": "x**2 - 1", "metadata": {}},
    "simple_integration": {"answer": "X**3/3 + C", "metadata": {"variable": "X", "integrand": "X**2"}},
    "intermediate_integration": {"answer": "log(x) + C", "metadata": {"variable": "x", "integrand": "1/x"}},
}


@pytest.mark.parametrize(
    ("task", "given", "score"),
    [
        ("countdown", "+(3) *\t9+4", 1.0),
        ("countdown", "(9\n*3) - -4", 1.0),
        ("countdown", "9.*3. + 4", 1.0),
        ("countdown", "sqrt(9)**2*3 + 4", 0.05),
        ("countdown", "9*3 + abs(-4)", 1.0),
        ("countdown", "9*3 + 4 + 0", 0.05),
        ("countdown", "9.0*3 + 4", 0.05),
        ("countdown", "9*3 + 4 # = 31", 0.05),
        ("countdown", "9 + 3 ^ 4", 0.05),
        ("countdown", "9 // 4 % 3", 0.05),
        ("countdown", "0x9*3 + 4", 0.05),
        ("countdown", "9/(4 - 4)*3", 0.01),
        ("countdown", "9*3 + 4 = 31", 0.01),
        ("countdown", "$9*3 + 4$", 0.01),
        ("countdown", "9 x 3 + 4", 0.01),
        ("countdown", "", 0.01),
        ("puzzle24", "(1 + 3)!*(4 - 2)", 0.01),
        ("puzzle24", "4!*(3 - 2)**1", 1.0),
        ("puzzle24", "(1 + 2 + 3)*4", 1.0),
        ("puzzle24", "3!!*4*2*1", 1.0),
        ("puzzle24", "4*3*2", 0.01),
        ("polynomial_multiplication", "- 1 + x*x", 1.0),
        ("polynomial_multiplication", "2*(x**2 - 1)/2", 1.0),
        ("polynomial_multiplication", "(x - 1)*(x + 1)", 0.0),
        ("polynomial_multiplication", "x^2 - 1", 0.0),
        ("polynomial_multiplication", "y**2 - 1", 0.0),
        ("simple_integration", "(1/3)*X**3 + K_1", 1.0),
        ("simple_integration", "Rational(1, 3)*X**3", 1.0),
        ("simple_integration", "S(1)/3*pow(X, 3)", 1.0),
        ("simple_integration", "x**3/3", 0.0),
        ("simple_integration", "1/3 X**3", 0.0),
        ("intermediate_integration", "ln(x) + C + pi", 1.0),
        ("intermediate_integration", "2*log(x**(1/2)) + E", 1.0),
        ("intermediate_integration", "log(abs(x))", 0.0),
    ],
)  # fmt: skip
def test_a_formula_may_be_spelled_in_many_ways(task: str, given: str, score: float) -> None:
    assert run({"task": task, "entry": FORMULAS[task], "given": given})["score"] == score


def test_an_integral_is_an_answer_only_where_the_reference_is_one() -> None:
    entry = FORMULAS["intermediate_integration"]
    unsolved = {**entry, "answer": "Integral(1/x, x) + C"}

    scores = [
        run({"task": "intermediate_integration", "entry": entry, "given": "Integral(1/x, x)"})
        for entry in (entry, unsolved)
    ]

    assert [verdict["score"] for verdict in scores] == [0.0, 1.0]


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "simple_integration"])
def test_the_reference_answers_of_many_rows_score_one(task: str) -> None:
    for row in json.loads(json.dumps(list(generate_rows([task], 50, seed=8)))):
        assert run({"task": task, "entry": row, "given": row["answer"]}) == {"score": 1.0, "error": None}, row
        assert run({"task": task, "entry": row, "given": f"1 + x*({row['answer']})"})["score"] <= 0.05


@pytest.mark.parametrize(
    ("integrand", "answer"),
    [  # one of each kind that the library makes, which takes it seconds
        ("3*sin(3*x - 10)*cos(3*x - 10)**2", "-cos(3*x - 10)**3/3 + C"),
        ("3*atan(x)", "3*x*atan(x) - 3*log(x**2 + 1)/2 + C"),
        ("-(5*x - 5)**4", "-125*x**5 + 625*x**4 - 1250*x**3 + 1250*x**2 - 625*x + C"),
        ("x**3*sin(x)", "-x**3*cos(x) + 3*x**2*sin(x) + 6*x*cos(x) - 6*sin(x) + C"),
        ("-asin(2*x)", "-x*asin(2*x) - sqrt(1 - 4*x**2)/2 + C"),
        ("-3*x**2*sin(x)", "-3*Integral(x**2*sin(x), x) + C"),
        ("12*sqrt(8 - 4*x)", "-2*(8 - 4*x)**(3/2) + C"),
        ("6*exp(-6*x - 10)", "-exp(-6*x - 10) + C"),
        ("-exp(x)*cos(x)", "-exp(x)*sin(x)/2 - exp(x)*cos(x)/2 + C"),
        ("-log(x)", "-x*log(x) + x + C"),
    ],
)
def test_the_reference_answer_of_every_kind_of_integral_scores_one(integrand: str, answer: str) -> None:
    entry = {"answer": answer, "metadata": {"variable": "x", "integrand": integrand}}

    assert run({"task": "intermediate_integration", "entry": entry, "given": answer}) == {"score": 1.0, "error": None}
    assert run({"task": "intermediate_integration", "entry": entry, "given": f"2*x + {answer}"})["score"] == 0.0


_AUDITED = """
import contextlib, io, json, sys, types
from resources_servers.reasoning_gym import scoring
from resources_servers.reasoning_gym.rows import generate_rows, task_names

MARK = "mark_of_an_answer"
run = []

def words(code):
    for constant in (*code.co_names, *code.co_varnames, *code.co_consts):
        yield from words(constant) if isinstance(constant, types.CodeType) else [str(constant)]

def listen(event, arguments):
    if event == "exec" and isinstance(arguments[0], types.CodeType) and any(MARK in it for it in words(arguments[0])):
        run.append(task)

task = "eval"
sys.addaudithook(listen)
eval(f"[{MARK!r}]")
for task in task_names():
    row = json.loads(json.dumps(next(generate_rows([task], 1, seed=4))))
    right, quoted = row["answer"], repr(MARK)
    for given in (MARK, f"[{quoted}]", f"[[{quoted}]]", f"{{{quoted}: 1}}", f"{right} + {MARK}", f"[{right},{quoted}]"):
        with contextlib.redirect_stdout(io.StringIO()):
            scoring._score(scoring.scorer_of(task), task, row, given)
print(json.dumps([len(task_names()), run]))
"""


def test_no_scorer_of_any_task_runs_an_answer() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(PARENT_DIR)}
    command = [sys.executable, "-W", "ignore", "-c", _AUDITED]

    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    number_of_tasks, run = json.loads(done.stdout)
    assert number_of_tasks > 90
    assert run == ["eval"]


@pytest.mark.parametrize(
    ("task", "answer", "metadata", "given"),
    [
        ("complex_arithmetic", "8.0 + 3.0i", {"result": [8, 3]}, "nan"),
        ("complex_arithmetic", "8.0 + 3.0i", {"result": [8, 3]}, "1 + nani"),
        ("number_sorting", "['1.0', '2.0']", {"direction": "ascending"}, "[NaN, NaN]"),
        ("number_sorting", "['2.0', '1.0']", {"direction": "descending"}, '["nan", "nan"]'),
        ("calendar_arithmetic", "-1", {"task": "recurring_event_day"}, "10"),
    ],
)
def test_a_score_is_not_what_the_answer_makes_of_it(
    task: str, answer: str, metadata: dict[str, Any], given: str
) -> None:
    entry = {"answer": answer, "metadata": metadata}

    assert run({"task": task, "entry": entry, "given": given})["score"] == 0.0
    assert run({"task": task, "entry": entry, "given": answer})["score"] == 1.0


@pytest.mark.parametrize(
    ("given", "score"),
    [
        ("0.234375", 1.0),
        ("15/64", 1.0),
        (" 0.2344 ", 1.0),
        ("0", 0.125),
        ("0.", 0.125),
        ("0.2", 0.375),
        ("1", 0.0),
        ("0.2300000000000001", 0.5),
        ("half", 0.0),
    ],
)
def test_a_probability_scores_by_the_share_of_right_digits(given: str, score: float) -> None:
    entry = {"answer": "0.234375", "metadata": {}}

    assert run({"task": "coin_flip", "entry": entry, "given": given})["score"] == score


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
