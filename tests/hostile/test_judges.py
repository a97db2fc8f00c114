"""No answer gets more of its judge than it deserves, leaves the score, or keeps another one waiting."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import nemo_gym
from nemo_gym.judge import fenced, last_label, without_labels
from nemo_gym.notebooks import RunningServers
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rollout_collection import RolloutCollectionConfig
from tests.collection.fakes import Row, serve, write_rows
from tests.collection.pace_lab import model_at
from tests.hostile.judges import (
    ANSWERS,
    CASES,
    EQUAL,
    JUDGE,
    NOT_EQUAL,
    POLICY,
    RIGHT,
    WAITING,
    Case,
    HostileEndpoint,
)

EQUIVALENCE, MATH = "equivalence_llm_judge", "math_with_judge"
LABELS = (EQUAL, NOT_EQUAL)
QUICK = {"model_retry_max_tries": 3, "model_retry_first_delay_s": 0.01, "model_retry_max_delay_s": 0.01}
OF_MATH = {name: case for name, case in CASES.items() if case.says != RIGHT}
"""Cases for mathematics, where the judge sees only what math-verify does not accept."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[HostileEndpoint]:
    endpoint = HostileEndpoint()
    with serve(endpoint):
        yield endpoint


@pytest.fixture(scope="module")
def servers(endpoint: HostileEndpoint) -> Iterator[RunningServers]:
    judge = {"judge_model_server": {"type": "responses_api_models", "name": "judge_model"}}
    config: dict[str, Any] = {
        "policy_model": model_at(endpoint.port, openai_model=POLICY),
        "judge_model": model_at(endpoint.port, openai_model=JUDGE),
        EQUIVALENCE: {"resources_servers": {EQUIVALENCE: judge}},
        MATH: {"resources_servers": {MATH: {**judge, "should_use_judge": True}}},
        **QUICK,
    }
    paths = [PARENT_DIR / f"resources_servers/{name}/configs/{name}.yaml" for name in (EQUIVALENCE, MATH)]
    with nemo_gym.servers_of(paths, **config) as servers:
        yield servers


def collect(servers: RunningServers, folder: Path, environment: str, cases: Mapping[str, Case]) -> dict[str, Row]:
    """The records of these cases, scored or not."""
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"[case:{name}] Who painted it?"}]},
            "expected_answer": RIGHT,
            "case": name,
        }
        for name in cases
    ]
    output = folder / "out.jsonl"
    servers.collect(
        RolloutCollectionConfig(
            agent_name=f"{environment}_simple_agent",
            input_jsonl_fpath=str(write_rows(folder / "in.jsonl", rows)),
            output_jsonl_fpath=str(output),
            num_samples_in_parallel=16,
            max_attempts=1,
        )
    )
    files = [path for path in (output, folder / "out_failures.jsonl") if path.exists()]
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return {
        record["case"] if "case" in record else rows[record["_ng_task_index"]]["case"]: record for record in records
    }


@pytest.fixture(scope="module")
def judged(servers: RunningServers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    return collect(servers, tmp_path_factory.mktemp("judged"), EQUIVALENCE, CASES)


@pytest.fixture(scope="module")
def judged_mathematics(servers: RunningServers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    return collect(servers, tmp_path_factory.mktemp("mathematics"), MATH, OF_MATH)


@pytest.mark.parametrize("name", CASES)
def test_a_case_gets_what_it_deserves(name: str, judged: dict[str, Row]) -> None:
    case, record = CASES[name], judged[name]

    if case.reward is None:
        assert record["_ng_failure_class"] == "judge_failed"
        assert "without an answer to judge it failed, too" in record["_ng_failure_message"]
        assert record.get("reward") is None
    elif case.may_fail and "_ng_failure_class" in record:
        assert record["_ng_failure_class"] == "judge_failed"
    else:
        assert (record.get("_ng_failure_class"), record["reward"]) == (None, case.reward)


@pytest.mark.parametrize("name", OF_MATH)
def test_a_case_of_mathematics_gets_nothing_and_is_scored(name: str, judged_mathematics: dict[str, Row]) -> None:
    record = judged_mathematics[name]

    assert (record.get("_ng_failure_class"), record["reward"]) == (None, 0.0)


def test_the_judge_is_asked_three_times_with_control_questions_before_an_answer_scores_nothing(
    judged: dict[str, Row], endpoint: HostileEndpoint
) -> None:
    name = "a right answer is answered with 403"

    (evaluation,) = judged[name]["judge_evaluations"]

    assert (endpoint.questions[name] - endpoint.controls[name], endpoint.controls[name]) == (3, 6)
    assert "refused the request (status 403): This content was flagged" in evaluation["judge_error"]
    assert "API key" not in evaluation["judge_error"]


def test_most_flaky_judges_give_a_verdict_in_the_end(judged: dict[str, Row]) -> None:
    flaky = [name for name, case in CASES.items() if case.may_fail]
    scored = [name for name in flaky if "_ng_failure_class" not in judged[name]]

    assert len(flaky) > 60
    assert len(scored) > len(flaky) / 2


def test_an_honest_prompt_holds_both_answers_to_the_letter(judged: dict[str, Row]) -> None:
    record = judged["placeholders, and the judge reads"]

    prompt = record["judge_evaluations"][0]["responses_create_params"]["input"][-1]["content"]

    assert f"Answer A:\n{fenced(RIGHT)}\n\nAnswer B:\n{fenced(ANSWERS['placeholders'])}\n\n" in prompt


def test_an_answer_that_keeps_the_judge_busy_keeps_no_other_waiting(
    servers: RunningServers, endpoint: HostileEndpoint, tmp_path: Path
) -> None:
    records = collect(servers, tmp_path, EQUIVALENCE, WAITING)

    assert not endpoint.was_blocked
    assert {name: record["reward"] for name, record in records.items()} == {
        name: case.reward for name, case in WAITING.items()
    }


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the quickest of five runs."""
    times = []
    for _ in range(5):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "[[",
        "[[A",
        "[[A=",
        EQUAL,
        NOT_EQUAL,
        "[[A=B]",
        "[\u200b",
        "[\u200b[\u200b\u200bA",
        "-",
        "-----END TEXT ",
        "\n",
        "0",
    ],
)
def test_reading_a_long_text_takes_time_in_proportion_to_its_length(piece: str) -> None:
    def read(length: int) -> None:
        given = (piece * length)[:length]
        fenced(without_labels(given, LABELS))
        last_label(given, LABELS)

    short, long = seconds(lambda: read(20_000)), seconds(lambda: read(320_000))

    assert long < 0.5 or long < 64 * short
