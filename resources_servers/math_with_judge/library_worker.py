"""The child process that runs math-verify.

A program of its own, started by `library_pool`: symbolic mathematics may take for ever or eat all
memory, and only a process can be stopped.
"""

import logging
import resource
from collections.abc import Callable
from typing import Any

from nemo_gym.workers.loop import Handle, serve

MAX_MEMORY_BYTES = 4 * 2**30
_MAX_SHOWING_S = 2

Grade = Callable[[str, str], tuple[float, str | None]]


def main() -> None:
    """Serve until the input ends."""
    _limit_memory()
    serve(_load_grading)


def _load_grading() -> Handle:
    grade = _load_library()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        reward, extracted = _graded(grade, request["expected"], request["generated"])
        return {"reward": reward, "extracted_answer": extracted}

    return answer


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
