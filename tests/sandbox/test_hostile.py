"""Attacks from inside, on a real server and on every combination of layers: all are scored, none gets anywhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nemo_gym.sandbox.process import IsolatedProcess
from tests.sandbox.arena import LIMITS, RIGHT, code_gen, isolated, verdict
from tests.sandbox.hostile import (
    ANSWERS,
    INHERITED,
    REACHING_OUT,
    SIGNALLING,
    UNSCORED,
    changing,
    looking,
    refused,
)

SANDBOXES = ["namespaces landlock seccomp 99", "namespaces seccomp 99", "landlock seccomp 99"]
"""The layers, and the version of Landlock that the kernel is made to offer if it has it."""
OLDER = [f"landlock seccomp {version}" for version in range(1, 7)]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with code_gen() as client:
        yield client


@pytest.mark.parametrize("name", UNSCORED)
def test_a_program_that_wants_out_of_the_score_scores_zero(client: TestClient, name: str) -> None:
    program = verdict(client, f"```python\n{UNSCORED[name]}\n```")

    assert program["reward"] == 0.0, program
    assert program["result"][-1] in (-2, -3, -4)
    assert verdict(client, RIGHT)["reward"] == 1.0


@pytest.mark.parametrize("name", ["kills itself", "writes garbage as its result", "exits early", "reads nowhere"])
def test_a_function_that_wants_out_of_the_score_scores_zero(client: TestClient, name: str) -> None:
    lines = "\n".join(f"    {line}" for line in UNSCORED[name].splitlines())
    program = verdict(client, f"```python\ndef f(n):\n{lines}\n```", fn_name="f")

    assert (program["reward"], program["result"]) == (0.0, [-4])


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_program_scores_zero(client: TestClient, name: str) -> None:
    assert verdict(client, ANSWERS[name])["reward"] == 0.0


def test_three_right_programs_and_six_that_kill_themselves_are_a_third_of_nine(client: TestClient) -> None:
    answers = [RIGHT] * 3 + ["```\nimport os\nos.kill(os.getpid(), 9)\n```"] * 6

    rewards = [verdict(client, answer)["reward"] for answer in answers]

    assert (sum(rewards), len(rewards)) == (3.0, 9)


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedProcess]:
    *layers, landlock_version = request.param.split()
    with isolated(tmp_path_factory.mktemp("work"), layers, int(landlock_version)) as process:
        if process.problems:
            pytest.skip(f"this system lacks a layer: {process.problems}")
        assert process.holds
        yield process


@pytest.mark.parametrize("process", [*SANDBOXES, *OLDER], indirect=True)
@pytest.mark.parametrize("attempts", [SIGNALLING, REACHING_OUT], ids=["signalling", "reaching out"])
def test_others_are_out_of_reach(process: IsolatedProcess, attempts: dict[str, str], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")

    outcome = process.call(refused(attempts, victim), LIMITS)

    assert (outcome.end, outcome.value) == ("done", []), outcome.stderr
    assert victim.read_text() == "as it was"
    assert process.call("out = 'still here'", LIMITS).value == "still here"


@pytest.mark.parametrize("process", SANDBOXES, indirect=True)
def test_nothing_of_one_program_is_inherited_by_the_next(process: IsolatedProcess) -> None:
    before = {name: process.call(looking(name), LIMITS, stdin="input") for name in INHERITED}
    assert {name: it.stderr for name, it in before.items() if it.end != "done"} == {}

    inherited = []
    for name in INHERITED:
        process.call(changing(name), LIMITS, stdin="input")
        after = process.call(looking(name), LIMITS, stdin="input")
        if (after.end, after.value) != ("done", before[name].value):
            inherited.append((name, before[name].value, after.value, after.stderr))

    assert inherited == []
