"""How a program fares in its unit tests: run one after the other until one fails.

A result is True for every test passed, and for the one that ended it a code: -1 no verdict in time for all
tests together, -2 wrong answer, -3 time limit of the test, -4 runtime error.
"""

import json
import time
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import BaseModel, Field, model_validator

from nemo_gym.sandbox import IsolatedProcess, Limits, Outcome

GLOBAL_TIMEOUT, WRONG_ANSWER, TIME_LIMIT, RUNTIME_ERROR = -1, -2, -3, -4
_MESSAGES = {
    GLOBAL_TIMEOUT: "Global Timeout",
    WRONG_ANSWER: "Wrong Answer",
    TIME_LIMIT: "Time Limit Exceeded",
    RUNTIME_ERROR: "Runtime Error",
}
_TOO_MUCH = {"output_limit": "it printed too much", "folder_limit": "it put too much into its folder"}
_SHOWN = 300
_MAX_CODE_CHARACTERS = 4_000_000


class UnitTests(BaseModel):
    """What to feed a program and what to expect."""

    inputs: list[str] = Field(min_length=1)
    """Standard input; or with `fn_name` the arguments, each on a line, as JSON."""
    outputs: list[str] = Field(min_length=1)
    """Standard output; or with `fn_name` the value, as JSON."""
    fn_name: str | None = None
    """The function to call. Without it, the program is run."""

    @model_validator(mode="after")
    def _is_usable(self) -> "UnitTests":
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"unit_tests has {len(self.inputs)} inputs and {len(self.outputs)} outputs")
        if self.fn_name is not None:
            for number, (given, expected) in enumerate(zip(self.inputs, self.outputs, strict=True)):
                try:
                    arguments_of(given), json.loads(expected)
                except ValueError as error:
                    raise ValueError(f"test {number} of {self.fn_name!r} is not JSON: {error}") from error
        return self


@dataclass
class Verdict:
    """The results and what there is to say about them."""

    results: list[bool | int] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def all_passed(self) -> bool:
        """Whether every test was passed."""
        return all(result is True for result in self.results)


def run_tests(process: IsolatedProcess, code: str, tests: UnitTests, timeout_s: float, memory_mb: int) -> Verdict:
    """Run `code` on the tests, until one fails.

    Raises:
        SandboxError: the isolated process failed, which says nothing about the program.
    """
    verdict = Verdict()
    if len(code) > _MAX_CODE_CHARACTERS:
        too_long = f"a program of {len(code)} characters is not run; at most {_MAX_CODE_CHARACTERS} are"
        return Verdict([RUNTIME_ERROR], _failure(RUNTIME_ERROR, tests.inputs[0], tests.outputs[0], error=too_long))
    started = time.monotonic()
    deadline = started + (timeout_s + 1) * len(tests.inputs) + 5
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            verdict.results = [GLOBAL_TIMEOUT] * len(tests.inputs)
            verdict.metadata = _failure(GLOBAL_TIMEOUT, given, expected)
            break
        limits = Limits(wall_s=min(timeout_s, left_s), cpu_s=int(timeout_s) + 2, memory_mb=memory_mb)
        result, metadata = _run_test(process, code, tests.fn_name, given, expected, limits)
        verdict.results.append(result)
        if result is not True:
            verdict.metadata = metadata
            break
    verdict.seconds = time.monotonic() - started
    if verdict.all_passed:
        verdict.metadata = {"execution_time": verdict.seconds}
    return verdict


def _run_test(
    process: IsolatedProcess, code: str, fn_name: str | None, given: str, expected: str, limits: Limits
) -> tuple[bool | int, dict[str, Any]]:
    payload: dict[str, Any] = {"code": code, "fn_name": fn_name}
    if fn_name is None:
        outcome = process.call(payload, limits, stdin=given)
    else:
        outcome = process.call({**payload, "arguments": arguments_of(given)}, limits)
    if outcome.end != "done":
        return _stopped(outcome, given, expected)
    output = outcome.stdout if fn_name is None else outcome.value
    if not isinstance(output, str):
        return RUNTIME_ERROR, _failure(RUNTIME_ERROR, given, expected, error="it ended before the function returned")
    is_right = same_text(output, expected) if fn_name is None else same_value(output, expected)
    return True if is_right else WRONG_ANSWER, _failure(WRONG_ANSWER, given, expected, output=_cut(output))


def _stopped(outcome: Outcome, given: str, expected: str) -> tuple[int, dict[str, Any]]:
    if outcome.end in ("timeout", "cpu_limit"):
        return TIME_LIMIT, _failure(TIME_LIMIT, given, expected, error=f"stopped after {outcome.seconds:.1f} s")
    said = _TOO_MUCH.get(outcome.end) or outcome.stderr.strip().rpartition("\n")[2] or outcome.detail
    return RUNTIME_ERROR, _failure(RUNTIME_ERROR, given, expected, error=_cut(said))


def _failure(code: int, given: str, expected: str, **more: Any) -> dict[str, Any]:
    known = {"error_code": code, "error_message": _MESSAGES[code], "inputs": _cut(given), "expected": _cut(expected)}
    return {**more, **known}


def arguments_of(text: str) -> list[Any]:
    """The arguments of a call, one per line.

    Raises:
        ValueError: a line is not JSON.
    """
    return [json.loads(line) for line in text.split("\n")]


def same_text(given: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, apart from white space around lines and how numbers are written."""
    given_lines, expected_lines = _lines(given), _lines(expected)
    return len(given_lines) == len(expected_lines) and all(
        one == other or _same_numbers(one, other) for one, other in zip(given_lines, expected_lines, strict=True)
    )


def same_value(given: str, expected: str) -> bool:
    """Whether two values, as JSON, are equal; one too deep or too long to be read is not."""
    try:
        return bool(json.loads(given) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(given: str, expected: str) -> bool:
    given_parts, expected_parts = given.split(), expected.split()
    if len(given_parts) != len(expected_parts):
        return False
    try:
        return all(Decimal(one) == Decimal(other) for one, other in zip(given_parts, expected_parts, strict=True))
    except InvalidOperation:
        return False


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"
