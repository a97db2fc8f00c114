"""Verdicts that keep a processor busy: do they use all of them, does the server go on answering, who gets how much?

Real servers in one host process: a regular expression, mathematics, and a program that a model wrote. Both sides of
every ratio come from the same round.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import Any, NamedTuple

import pytest

import nemo_gym
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runtime import usable_cores
from nemo_gym.server_utils import ServerClient, raise_for_status
from tests.collection.pace_lab import model_at
from tests.collection.paced_endpoint import RESPONSE
from tests.perf.side_by_side.estimates import Estimate, Target, hold

CONFIGS = [
    PARENT_DIR / f"resources_servers/{name}/configs/{name}.yaml"
    for name in ("string_match", "math_with_judge", "code_gen")
]
ROUNDS, VERDICTS = 3, 12
OF_THE_PROCESSORS = 0.8
"""That were to be had, at least this part is to be used."""
SLOWEST_ANSWER = 0.5
"""Of the time of one verdict: what a request that costs nothing may take meanwhile. 1 and more where verdicts block."""
GREEDY, MODEST = 40, 8
WORK: dict[str, tuple[dict[str, Any], str]] = {
    "string_match": ({"expected_answer": "(a+)+$", "match": "regex"}, "a" * 21 + "b"),
    "math_with_judge": ({"expected_answer": "(x+1)^{40}"}, "\\boxed{(x+1)^{39}(x+1)+\\sin(x)^2+\\cos(x)^2-1}"),
    "code_gen": (
        {"verifier_metadata": {"unit_tests": {"inputs": ["1\n"], "outputs": ["1\n"]}}},
        "```python\nfor _ in range(4_000_000): pass\nprint(input())\n```",
    ),
}
CONFIGS = [PARENT_DIR / f"resources_servers/{name}/configs/{name}.yaml" for name in WORK]


class Round(NamedTuple):
    """What one round found."""

    each_ms: float
    speed_up: float
    """How much faster all at once were than one by one."""
    part: float
    """Of the processors that were to be had."""
    wait: float
    """The slowest of the other requests, in verdicts."""


def request_of(environment: str) -> dict[str, Any]:
    fields, said = WORK[environment]
    response = json.loads(json.dumps(RESPONSE))
    response["output"][0]["content"][0]["text"] = said
    return {"responses_create_params": {"input": "?"}, **fields, "response": response}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("verdicts"))
        with nemo_gym.servers_of(CONFIGS, policy_model=model_at(1)):
            yield ServerClient.load_from_global_config()


async def verify(client: ServerClient, environment: str, cookies: Any = None) -> None:
    answer = await client.post(environment, "/verify", json=request_of(environment), cookies=cookies)
    await raise_for_status(answer)
    assert "reward" in json.loads(await answer.read())


async def slowest_answer_s(client: ServerClient, until: "asyncio.Future[Any]") -> float:
    """Of requests that cost the host nothing, made one after the other."""
    slowest_s = 0.0
    while not until.done():
        began_s = time.monotonic()
        await raise_for_status(await client.post("string_match", "/seed_session", json={"responses_create_params": {}}))
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.005)
    return slowest_s


def processors_to_be_had() -> float:
    """What is left of them by others on this machine, told by processes that do nothing else than want one each."""
    program = "import time\nwhile time.process_time() < 0.4: pass"
    began_s = time.monotonic()
    busy = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(usable_cores())]
    for process in busy:
        process.wait()
    return usable_cores() * 0.4 / (time.monotonic() - began_s)


@pytest.mark.parametrize("environment", WORK)
def test_all_processors_are_used_and_the_server_goes_on_answering(environment: str, client: ServerClient) -> None:
    async def measure() -> Round:
        began_s = time.monotonic()
        for _ in range(VERDICTS):
            await verify(client, environment)
        one_by_one_s = time.monotonic() - began_s
        to_be_had = processors_to_be_had()
        began_s = time.monotonic()
        together = asyncio.gather(*(verify(client, environment) for _ in range(VERDICTS)))
        slowest_s = await slowest_answer_s(client, together)
        speed_up = one_by_one_s / (time.monotonic() - began_s)
        each_s = one_by_one_s / VERDICTS
        return Round(each_s * 1000, speed_up, speed_up / to_be_had, slowest_s / each_s)

    async def first_of_all() -> None:
        await asyncio.gather(*(verify(client, environment) for _ in range(4)))  # which starts the processes

    found: list[Round] = []

    def used_and_waited() -> list[float]:
        found.append(asyncio.run(measure()))
        return [found[-1].part, found[-1].wait]

    asyncio.run(first_of_all())
    targets = (
        Target(f"{environment}: part of the {usable_cores()} processors that was used", least=OF_THE_PROCESSORS),
        Target(f"{environment}: the slowest request meanwhile, in verdicts", most=SLOWEST_ANSWER),
    )
    hold(used_and_waited, *targets, rounds=ROUNDS)
    each_ms, speed_up = (Estimate.of(list(readings)) for readings in list(zip(*found, strict=True))[:2])
    print(f"{environment}: {each_ms.value:.0f} ms each, together {speed_up} x as fast")


def test_many_verdicts_of_one_session_leave_another_its_part(client: ServerClient) -> None:
    async def session_of(environment: str) -> dict[str, str]:
        seeded = await client.post(environment, "/seed_session", json=request_of(environment))
        return {name: value.value for name, value in SimpleCookie(seeded.headers["set-cookie"]).items()}

    async def measure(modest: str) -> float:
        """How many of the greedy session were made for each of the modest one, from its first to its last."""
        mine, its = await session_of("string_match"), await session_of(modest)
        greedy = [asyncio.create_task(verify(client, "string_match", mine)) for _ in range(GREEDY)]
        await asyncio.sleep(0.1)
        before = sum(task.done() for task in greedy)
        await asyncio.gather(*(verify(client, modest, its) for _ in range(MODEST)))
        after = sum(task.done() for task in greedy)
        await asyncio.gather(*greedy)
        return (after - before) / MODEST

    for modest, kind in (("string_match", "session"), ("code_gen", "environment")):
        target = Target(f"verdicts of a greedy session for each of another {kind}", most=1.5)
        hold(lambda modest=modest: [asyncio.run(measure(modest))], target, rounds=ROUNDS)  # type: ignore[misc]
