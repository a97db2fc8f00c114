"""The worker's side: a line of JSON in, a line of JSON out, again and again.

A worker ends by itself, also when nobody is left to stop it: at the end of its input, and by SIGPROF when it
has used more processor time on one request than it was granted.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

READY = "ready"

Handle = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[], Handle]) -> None:
    """Answer requests with what `load` returns until the input ends; what is printed meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    handle = load()
    _write(answers, READY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_limit_s"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, json.dumps(answer))


def _write(answers: Any, line: str) -> None:
    answers.write(line + "\n")
    answers.flush()
