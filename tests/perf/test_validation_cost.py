"""What reading a trajectory costs, next to merely parsing its JSON.

Servers validate the bytes that arrive, so that is what is measured; validating the
parsed dict, with the parsing counted in, is reported as well. Both sides are timed
alternately in one run and the best of many rounds counts, so a busy machine slows
them alike.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from timeit import timeit

import orjson

from nemo_gym.openai_utils import NeMoGymResponse

TRAJECTORY = Path(__file__).parent / "data" / "single_tool_call_response.json"
LIMIT = 12.0
ROUNDS, CALLS = 60, 200


def best_seconds_per_call(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            best[name] = min(best[name], timeit(function, number=CALLS) / CALLS)
    return best


def test_validating_a_trajectory_costs_at_most_12_times_parsing_it() -> None:
    body = TRAJECTORY.read_bytes()
    NeMoGymResponse.model_validate_json(body)

    seconds = best_seconds_per_call(
        {
            "orjson.loads": lambda: orjson.loads(body),
            "validate bytes": lambda: NeMoGymResponse.model_validate_json(body),
            "loads, then validate": lambda: NeMoGymResponse.model_validate(orjson.loads(body)),
        }
    )

    floor = seconds["orjson.loads"]
    for name, taken in seconds.items():
        sys.stdout.write(f"\n{name:>21}: {taken * 1e6:6.1f} µs  {taken / floor:4.1f} x orjson.loads")
    sys.stdout.write(f"  ({len(body)} bytes)\n")
    assert seconds["validate bytes"] <= LIMIT * floor
    assert seconds["loads, then validate"] <= LIMIT * floor


def test_the_trajectory_is_a_complete_dump_of_a_single_tool_call() -> None:
    body = orjson.loads(TRAJECTORY.read_bytes())

    response = NeMoGymResponse.model_validate(body)

    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call_output", "message"]
    assert list(response.model_dump()) == list(body)
    assert response.model_dump(mode="json") == body
