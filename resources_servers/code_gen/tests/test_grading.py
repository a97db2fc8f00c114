"""How programs fare: what counts as right, which code a failure gets, and that no trick helps."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.sandbox import LAYERS, IsolatedProcess, Work
from resources_servers.code_gen.grading import UnitTests, Verdict, run_tests, same_text, same_value
from resources_servers.code_gen.submission import breaks_reasoning_format, extract_code

ROOT = Path(__file__).parents[3]

Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def process() -> Iterator[IsolatedProcess]:
    process = IsolatedProcess()
    try:
        process.isolate(Work("resources_servers.code_gen.program", (ROOT,)), LAYERS)
        yield process
    finally:
        process.close()


@pytest.fixture
def judge(process: IsolatedProcess) -> Judge:
    def run_code(code: str, *tests: tuple[str, str], fn_name: str | None = None, timeout_s: float = 10.0) -> Verdict:
        if not process.holds:
            pytest.skip(f"this system cannot isolate programs: {process.problems}")
        inputs, outputs = zip(*tests, strict=True)
        unit_tests = UnitTests(inputs=list(inputs), outputs=list(outputs), fn_name=fn_name)
        return run_tests(process, code, unit_tests, timeout_s, memory_mb=256)

    return run_code


def test_a_program_that_passes_every_test_is_right(judge: Judge) -> None:
    verdict = judge("print(sum(map(int, input().split())))", ("1 2", "3"), ("4 5", "9\n"))

    assert (verdict.results, verdict.all_passed) == ([True, True], True)
    assert verdict.metadata == {"execution_time": verdict.seconds}


def test_testing_ends_with_the_first_failure_which_is_shown(judge: Judge) -> None:
    verdict = judge("print(input().upper())", ("a", "A"), ("b", "b"), ("c", "C"))

    assert verdict.results == [True, -2]
    assert verdict.metadata == {
        "error_code": -2, "error_message": "Wrong Answer", "inputs": "b", "expected": "b", "output": "B\n"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('unfinished", "SyntaxError: unterminated string literal"),
        ("input(); input()", "EOFError"),
        ("x = [0] * 10**10", "MemoryError"),
        ("import os; os.abort()", "SIGABRT"),
        ("while True: print('x' * 10**6)", "it printed too much"),
        ("import socket; socket.socket()", "PermissionError"),
    ],
)
def test_a_program_that_breaks_has_a_runtime_error(judge: Judge, code: str, words: str) -> None:
    verdict = judge(code, ("1", "1"))

    assert (verdict.results, verdict.metadata["error_code"]) == ([-4], -4)
    assert words in verdict.metadata["error"]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "try: 1 / 0\nfinally:\n  while 1: 1"]
)
def test_a_program_that_does_not_end_exceeds_the_time_limit(judge: Judge, code: str) -> None:
    verdict = judge(code, ("", "1"), ("", "2"), timeout_s=0.4)

    assert (verdict.results, verdict.metadata["error_message"]) == ([-3], "Time Limit Exceeded")


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint(7)\nsys.exit(1)",
        "print(7)\nexit()",
        "import os\nprint(7, flush=True)\nos._exit(0)",
        "import atexit, sys\natexit.register(lambda: sys.stdout.write('7'))",
        "import threading\nthreading.Thread(target=print, args=(7,)).start()",
        "if __name__ == '__main__':\n    print(7)",
        "import os\nos.write(1, b'7')",
        "import sys\nsys.stdout.buffer.write(b'7\\n')",
        "print(int(gcd(21, 14)), end='  \\n\\n')",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\nprint(P(7).x)",
        "class Node:\n    next: Optional[List[int]] = None\nq = deque([7])\nheapify(a := [7])\nprint(q[0])",
        "print(math.floor(7.5))",
        "print(pow(7, 1, 100))",
    ],
)
def test_programs_are_run_as_programs_are(judge: Judge, code: str) -> None:
    assert judge(code, ("", "7")).results == [True]


def test_a_function_or_a_method_of_a_solution_is_called_with_its_arguments(judge: Judge) -> None:
    function = "def double(numbers, plus):\n    print('noise')\n    return tuple(2 * n + plus for n in numbers)"
    method = """
class Solution:
    def double(self, numbers: List[int], plus: int) -> List[int]:
        return [2 * n + plus for n in numbers]
"""

    for code in (function, method):
        assert judge(code, ("[1, 2]\n1", "[3, 5]"), ("[]\n0", "[]"), fn_name="double").results == [True, True]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("def other(n): return n", -4),
        ("def f(n): return {n}", -2),
        ("def f(n): return str(n)", -2),
        ("import sys\ndef f(n):\n    sys.set_int_max_str_digits(0)\n    return 10**6000", -2),
        ("def f(n):\n    x = []\n    for _ in range(20000): x = [x]\n    return x", -2),
        ("def f(n):\n    x = []\n    x.append(x)\n    return x", -4),
        ("class Yes:\n    def __eq__(self, other): return True\ndef f(n): return Yes()", -2),
        ("class Yes(int):\n    def __eq__(self, other): return True\ndef f(n): return Yes(3)", -2),
        ("import json\njson.dumps = lambda *a, **k: '1'\ndef f(n): return 2", -2),
        ("import os\ndef f(n): os._exit(0)", -4),
        ("import os\ndef f(n):\n    os.write(3, b'[')\n    os._exit(0)", -4),
        ("import os\ndef f(n):\n    os.write(3, b'1')\n    os._exit(0)", -4),
    ],
)
def test_values_are_compared_where_the_program_has_no_say(judge: Judge, code: str, result: int) -> None:
    assert judge(code, ("1", "1"), fn_name="f").results == [result]


def test_one_program_leaves_nothing_for_the_next(judge: Judge) -> None:
    leave = "import builtins, math, sys\nbuiltins.leak = math.leak = 1\nopen('leak', 'w').write('x')\nprint(1)"
    look = "import builtins, math, os\nprint(hasattr(builtins, 'leak'), hasattr(math, 'leak'), os.listdir('.'))"

    assert judge(leave, ("", "1"), ("", "1")).all_passed
    assert judge(look, ("", "False False []")).all_passed


def test_the_tests_and_the_judge_cannot_be_found_from_inside(judge: Judge) -> None:
    expected = "the expected output nobody tells"
    code = f"""
import gc
needle = "".join(["the expected output", " nobody tells"])
texts = [str(thing)[:10000] for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple))]
print([text for text in texts if needle in text and "needle" not in text])
try:
    print(open({str(Path(__file__))!r}).read())
except OSError as error:
    print("kept out")
"""
    verdict = judge(code, ("", expected))

    assert verdict.metadata["output"] == "[]\nkept out\n"


def test_all_tests_together_have_a_time_limit_too(judge: Judge) -> None:
    verdict = judge("import time; time.sleep(0.3)", ("", ""), timeout_s=-10)

    assert (verdict.results, verdict.metadata["error_message"]) == ([-1], "Global Timeout")


def test_a_program_longer_than_any_program_is_not_run(judge: Judge) -> None:
    verdict = judge("#" * 5_000_000 + "\nprint(1)", ("", "1"))

    assert (verdict.results, verdict.metadata["error_code"]) == ([-4], -4)
    assert "5000009 characters" in verdict.metadata["error"]


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        ("a \n b\n\n", "a\nb", True),
        ("1.50 2", "1.5 2.0", True),
        ("1e3", "1000", True),
        ("1.5 x", "1.50 x", False),
        ("a b", "a  b", False),
        ("a", "a\n\nb", False),
        ("", "0", False),
        ("nan", "NaN", False),
    ],
)
def test_outputs_are_compared_line_by_line(given: str, expected: str, is_same: bool) -> None:
    assert same_text(given, expected) is is_same


def test_values_are_compared_as_json() -> None:
    assert same_value('{"a": [1, 2.0]}', '{"a":[1.0,2]}')
    assert not same_value("[1]", "[1, 2]")
    assert not same_value("[" * 100_000 + "]" * 100_000, "[]")


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({"inputs": ["1"], "outputs": []}, "at least 1 item"),
        ({"inputs": [], "outputs": []}, "at least 1 item"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": ["1\noops"], "outputs": ["1"], "fn_name": "f"}, "test 0 of 'f' is not JSON"),
        ({"inputs": ["1"], "outputs": ["oops"], "fn_name": "f"}, "test 0 of 'f' is not JSON"),
    ],
)
def test_tests_that_cannot_be_passed_are_refused(tests: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        UnitTests.model_validate(tests)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nfirst\n```\nbetter:\n```py\nx = 2\ny = 3\n```\ndone", "x = 2\ny = 3"),
        ("```python\nx = 1", None),
        ("```python\n \n```", None),
        ("no code", None),
        ("", None),
    ],
)
def test_the_program_is_in_the_last_block(text: str, code: str | None) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("said", "thought", "is_broken"),
    [
        ("fine", "a thought", False),
        ("<think>hm</think> fine", "", True),
        ("fine</think>", "", True),
        ("fine", "<think>hm</think>", False),
        ("fine", "<think>hm <think>again", True),
        ("fine", "</think></think>", True),
    ],
)
def test_thoughts_belong_into_the_reasoning_and_are_tagged_once(said: str, thought: str, is_broken: bool) -> None:
    output = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": thought}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
    ]
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": output}

    assert breaks_reasoning_format(NeMoGymResponse.model_validate_json(json.dumps(response))) is is_broken
