"""The child process that runs math-verify: a line of JSON in, a line of JSON out, again and again.

A program of its own, started by `library_pool`: symbolic mathematics may take for ever or eat all
memory, and only a process can be stopped. When nobody is left to stop it, it ends by itself: at the
end of its input, or when it has used more processor time on one answer than it was granted.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

READY = "ready"
MAX_MEMORY_BYTES = 4 * 2**30
_MAX_SHOWING_S = 2

Grade = Callable[[str, str], tuple[float, str | None]]


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    _limit_memory()
    grade = _load_library()
    _write(answers, READY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_limit_s"])
        reward, extracted = _graded(grade, request["expected"], request["generated"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, json.dumps({"reward": reward, "extracted_answer": extracted}))


def _write(answers: Any, line: str) -> None:
    answers.write(line + "\n")
    answers.flush()


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MAX_MEMORY_BYTES:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
        except (ValueError, OSError):  # not on every system
            return


def _graded(grade: Grade, expected: str, generated: str) -> tuple[float, str | None]:
    """The grade; an answer on which the library fails is not equal to anything."""
    try:
        return grade(expected, generated)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - out of memory or time, too deep: the answer is beyond the library
        return 0.0, None


def _load_library() -> Grade:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
    from math_verify.errors import TimeoutException  # type: ignore[import-untyped]
    from math_verify.utils import timeout  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    in_gold = (LatexExtractionConfig(),)
    in_prediction = (ExprExtractionConfig(), LatexExtractionConfig())
    shown = timeout(_MAX_SHOWING_S)(str)

    def show(prediction: Any) -> str | None:
        try:
            text: str = shown(prediction)
        except TimeoutException:  # a BaseException
            return None
        return text

    def grade(expected: str, generated: str) -> tuple[float, str | None]:
        golds = parse(f"\\boxed{{{expected}}}", in_gold)
        predictions = parse(generated, in_prediction)
        for prediction in predictions:
            if verify(golds, [prediction]):
                return 1.0, show(prediction)
        return 0.0, show(predictions[0]) if predictions else None

    return grade


if __name__ == "__main__":
    main()
