"""The verifier of an environment, asked about the cases of its fixture in a process of its own; nothing is served.

`python -m nemo_gym.launch.verifier_process` reads `{"module": ...}` from stdin and writes one JSON object to stdout:
where the cases are, and for each the rewards that came, or the error. Whether that is right is for others to say.
It runs with the Python that has what the server requires.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.base_resources_server import VerifierFixture

FIXTURE = "VERIFIER_FIXTURE"
_LONGEST = 500


def observe(module_name: str) -> dict[str, Any]:
    """What the verifier of a module says to its cases; `error` instead if it cannot be asked."""
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an author's module may raise anything
        return {"error": f"{module_name} cannot be imported: {_words(error)}"}
    fixture = getattr(module, FIXTURE, None)
    if not isinstance(fixture, VerifierFixture):
        return {"error": f"{module.__file__} has no {FIXTURE} = VerifierFixture(...)"}
    path = Path(module.__file__ or "").parent / fixture.cases_path
    try:
        cases = list(_cases(path))
        server = fixture.server_factory()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the same
        return {"error": f"{FIXTURE} of {module.__file__}: {_words(error)}"}
    return {"fixture_path": str(path), "cases": [_observed(fixture, server, case) for case in cases]}


def _cases(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        case = json.loads(line)
        if not isinstance(case, dict) or not {"name", "kind", "request"} <= case.keys():
            raise ValueError(f"{path}, line {number}: a case is an object with name, kind and request")
        yield case


def _observed(fixture: VerifierFixture, server: Any, case: dict[str, Any]) -> dict[str, Any]:
    rewards: list[float] = []
    try:
        for _ in range(2 if case["kind"] == "determinism" else 1):
            if fixture.reseed is not None and case["kind"] == "determinism":
                takes_server = bool(inspect.signature(fixture.reseed).parameters)
                asyncio.run(_awaited(fixture.reseed(server) if takes_server else fixture.reseed()))
            request = fixture.request_model.model_validate(case["request"])
            rewards.append(_reward(asyncio.run(_verdict(fixture, server, request))))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verifier may raise anything; that is what is looked at
        return {**case, "observed_rewards": rewards, "observed_error": type(error).__name__, "words": _words(error)}
    return {**case, "observed_rewards": rewards, "observed_error": None}


async def _verdict(fixture: VerifierFixture, server: Any, request: Any) -> Any:
    if fixture.invoke is not None:
        return await _awaited(fixture.invoke(server, request))
    parameters = inspect.signature(server.verify).parameters
    given = {name: None if name == "request" and len(parameters) > 1 else request for name in parameters}
    return await _awaited(server.verify(**given))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _reward(verdict: Any) -> float:
    reward = verdict.get("reward") if isinstance(verdict, dict) else getattr(verdict, "reward", None)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise TypeError(f"the verdict has the reward {reward!r}, which is no number")
    return float(reward)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]


def main() -> None:
    """Answer what stdin asks; what authors print goes to stderr."""
    asked = json.loads(sys.stdin.buffer.read())
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.redirect_stdout(sys.stderr):
            told = observe(asked["module"])
        answers.write(json.dumps(told))
    sys.stderr.flush()
    os._exit(0)  # threads that an import has left running would keep the process


if __name__ == "__main__":
    main()
