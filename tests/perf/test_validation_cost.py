"""What reading a trajectory costs, next to merely parsing its JSON.

Servers validate the bytes that arrive, so that is what is measured; validating the
parsed dict, with the parsing counted in, is reported as well. Both sides are timed
alternately in one run and the best of many rounds counts, so a busy machine slows
them alike.
"""

from collections.abc import Callable
from pathlib import Path
from timeit import repeat

import orjson

from nemo_gym.openai_utils import NeMoGymResponse
from tests.perf.side_by_side.estimates import Target, hold

TRAJECTORY = Path(__file__).parent / "data" / "single_tool_call_response.json"
LIMIT = 12.0
ROUNDS, CALLS = 10, 200


def over_the_first(functions: dict[str, Callable[[], object]]) -> list[float]:
    floor, *others = [min(repeat(function, repeat=6, number=CALLS)) for function in functions.values()]
    return [seconds / floor for seconds in others]


def test_validating_a_trajectory_costs_at_most_12_times_parsing_it() -> None:
    body = TRAJECTORY.read_bytes()
    NeMoGymResponse.model_validate_json(body)

    functions: dict[str, Callable[[], object]] = {
        "orjson.loads": lambda: orjson.loads(body),
        "validate bytes": lambda: NeMoGymResponse.model_validate_json(body),
        "loads, then validate": lambda: NeMoGymResponse.model_validate(orjson.loads(body)),
    }
    targets = [Target(f"{name}, over orjson.loads", most=LIMIT) for name in list(functions)[1:]]
    hold(lambda: over_the_first(functions), *targets, rounds=ROUNDS)


def test_the_trajectory_is_a_complete_dump_of_a_single_tool_call() -> None:
    body = orjson.loads(TRAJECTORY.read_bytes())

    response = NeMoGymResponse.model_validate(body)

    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call_output", "message"]
    assert list(response.model_dump()) == list(body)
    assert response.model_dump(mode="json") == body
