"""The child process that runs math-verify.

A program of its own, started by `library_pool`: symbolic mathematics may take for ever or eat all
memory, and only a process can be stopped.
"""

import logging
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from nemo_gym.workers import Handle, serve

MAX_MEMORY_BYTES = 4 * 2**30
_MAX_STEP_S = 5
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

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    in_gold = (LatexExtractionConfig(),)
    in_prediction = (ExprExtractionConfig(), LatexExtractionConfig())

    def give_up(*_: Any) -> NoReturn:
        raise TimeoutException("it takes too long")

    signal.signal(signal.SIGVTALRM, give_up)

    def within(limit_s: float, step: Callable[[], Any], otherwise: Any) -> Any:
        """A step in so much of the processor's time; the library's own limits go by the clock."""
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, limit_s)  # again: the library catches it at each comparison
        try:
            return step()
        except TimeoutException:  # a BaseException
            return otherwise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def parsed(text: str, targets: tuple[Any, ...]) -> Any:
        return within(_MAX_STEP_S, lambda: parse(text, targets, parsing_timeout=None), [])

    def is_equal(golds: Any, prediction: Any) -> bool:
        return bool(within(_MAX_STEP_S, lambda: verify(golds, [prediction], timeout_seconds=None), False))

    def show(prediction: Any) -> str | None:
        shown: str | None = within(_MAX_SHOWING_S, lambda: str(prediction), None)
        return shown

    def grade(expected: str, generated: str) -> tuple[float, str | None]:
        golds = parsed(f"\\boxed{{{expected}}}", in_gold)
        predictions = parsed(generated, in_prediction)
        for prediction in predictions:
            if is_equal(golds, prediction):
                return 1.0, show(prediction)
        return 0.0, show(predictions[0]) if predictions else None

    return grade


if __name__ == "__main__":
    main()
