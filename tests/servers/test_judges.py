"""A judge beside the policy, on real servers: caps of its own, retries under its name, failures that are no verdict.

Both ask the same endpoint, so that nothing but the model server tells them apart.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import nemo_gym
from nemo_gym.collect.summary import RunSummary
from nemo_gym.notebooks import RunningServers
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rollout_collection import RolloutCollectionConfig
from tests.collection.fakes import FakeRun, Row, serve, write_rows
from tests.collection.pace_lab import model_at
from tests.collection.paced_endpoint import RESPONSE

EQUIVALENCE = PARENT_DIR / "resources_servers/equivalence_llm_judge/configs/equivalence_llm_judge.yaml"
AGENT, JUDGED_BY_ITSELF = "equivalence_llm_judge_simple_agent", "judged_by_itself_agent"
POLICY, JUDGE = "policy", "judge"
CAPS = {POLICY: 3, JUDGE: 2}
ROLLOUTS = 12


class Endpoint(FakeRun):
    """Answers both models, and notes how many calls of each are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.begin_anew()

    def begin_anew(self, judge_status: int = 200, busy: int = 0, judge_waits_for: int = 0) -> None:
        """`busy`: so many 429s for the judge; it answers nothing before the policy was asked so often."""
        self.asked: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        self._judge_status, self._busy, self._judge_waits_for = judge_status, busy, judge_waits_for

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/responses", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        self.asked[model] += 1
        self._under_way[model] += 1
        self.most[model] = max(self.most[model], self._under_way[model])
        self.most["both"] = max(self.most["both"], self._under_way.total())
        try:
            status = await self._status(model)
        finally:
            self._under_way[model] -= 1
        return web.json_response(answer("Au [[A=B]]") if status == 200 else {"error": {"message": "no"}}, status=status)

    async def _status(self, model: str) -> int:
        await asyncio.sleep(0.02)
        if model != JUDGE:
            return 200
        if self._busy:
            self._busy -= 1
            return 429
        while self.asked[POLICY] < self._judge_waits_for:  # noqa: ASYNC110 - another thread may begin anew
            await asyncio.sleep(0.01)
        return self._judge_status


def answer(text: str) -> Row:
    response: Row = json.loads(json.dumps(RESPONSE))
    response["output"][0]["content"][0]["text"] = text
    return response


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with serve(endpoint):
        yield endpoint


@pytest.fixture(scope="module")
def servers(endpoint: Endpoint) -> Iterator[RunningServers]:
    def judged_by(model_server: str) -> Row:
        settings = {"entrypoint": "app.py", "domain": "knowledge", "judge_responses_create_params": {"input": []}}
        settings["judge_model_server"] = {"type": "responses_api_models", "name": model_server}
        return {"resources_servers": {"equivalence_llm_judge": settings}}

    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "judged_by_itself"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    models = {
        f"{name}_model": model_at(endpoint.port, openai_model=name, max_concurrent_requests=cap)
        for name, cap in CAPS.items()
    }
    config: dict[str, Any] = {
        **models,
        "equivalence_llm_judge": judged_by("judge_model"),
        "judged_by_itself": judged_by("policy_model"),
        JUDGED_BY_ITSELF: {"responses_api_agents": {"simple_agent": agent}},
    }
    with nemo_gym.servers_of([EQUIVALENCE], **config) as servers:
        yield servers


def collect(servers: RunningServers, agent: str = AGENT, **options: Any) -> RunSummary:
    question = {"input": [{"role": "user", "content": "What is the chemical symbol of gold?"}]}
    write_rows(Path("in.jsonl"), [{"responses_create_params": question, "expected_answer": "Au"}])
    return servers.collect(
        RolloutCollectionConfig(
            agent_name=agent,
            input_jsonl_fpath="in.jsonl",
            output_jsonl_fpath="out.jsonl",
            num_repeats=ROLLOUTS,
            num_samples_in_parallel=64,
            **options,
        )
    )


def lines_of(name: str) -> list[Row]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_waiting_for_the_judge_takes_no_place_of_the_policy_and_retries_are_told_as_the_judges(
    servers: RunningServers, endpoint: Endpoint
) -> None:
    endpoint.begin_anew(busy=2, judge_waits_for=ROLLOUTS)

    summary = collect(servers)

    assert summary.exit_code == 0
    assert [line["reward"] for line in lines_of("out.jsonl")] == [1.0] * ROLLOUTS
    assert endpoint.asked == {POLICY: ROLLOUTS, JUDGE: ROLLOUTS + 2}
    assert {name: endpoint.most[name] for name in CAPS} == CAPS
    (line,) = [line for line in summary.retries.lines() if line.startswith("Retries: ")]
    assert line.startswith(f"Retries: judge_model at http://127.0.0.1:{endpoint.port}/v1: tried again after 2 ")
    of_endpoint = summary.retries.as_json()[f"http://127.0.0.1:{endpoint.port}/v1"]
    assert of_endpoint["by_server"]["judge_model"]["tried_again"] == {"429": 2}
    assert of_endpoint["by_server"]["judge_model"]["paced_s"] > 0
    assert summary.retries.by_server["policy_model"] == {}


def test_a_judge_that_fails_scores_nothing_and_is_asked_again_without_the_policy(
    servers: RunningServers, endpoint: Endpoint
) -> None:
    endpoint.begin_anew(judge_status=401)

    summary = collect(servers)

    assert summary.exit_code == 1
    assert lines_of("out.jsonl") == []
    failures = lines_of("out_failures.jsonl")
    assert {line["_ng_failure_class"] for line in failures} == {"judge_failed"}
    assert {line.get("reward") for line in failures} == {None}
    assert all("judge 'judge_model'" in line["_ng_failure_message"] for line in failures)
    assert endpoint.asked[POLICY] == ROLLOUTS

    endpoint.begin_anew()
    again = collect(servers, resume_from_cache=True)

    assert again.exit_code == 0
    assert [line["reward"] for line in lines_of("out.jsonl")] == [1.0] * ROLLOUTS
    assert endpoint.asked == {JUDGE: ROLLOUTS}


def test_a_policy_that_judges_itself_keeps_one_cap_for_both(servers: RunningServers, endpoint: Endpoint) -> None:
    endpoint.begin_anew()

    summary = collect(servers, JUDGED_BY_ITSELF)

    assert summary.exit_code == 0
    assert endpoint.asked == {POLICY: 2 * ROLLOUTS}
    assert endpoint.most["both"] == CAPS[POLICY]
