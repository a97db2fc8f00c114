"""A `/verify` that fails: it is asked again without agent and model, and a bug in it ends the run soon."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from tests.collection.conftest import Collect
from tests.collection.fakes import Row, failing_with, lines_in, rows_of, serve, write_rows
from tests.collection.scoring import FakeEnvironment, response_of
from tests.ports import free_port
from tests.programs import run_program

QUIZ = """
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_resources_server import Request, ReverifyMode, SimpleResourcesServer


class QuizServer(SimpleResourcesServer):
    REVERIFY_MODE = ReverifyMode.{mode}

    config: BaseResourcesServerConfig
    _sessions: dict[str, int] = PrivateAttr(default_factory=dict)

    async def seed_session(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        self._sessions[request.session["session_id"]] = 0
        return {{}}

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        session = request.session["session_id"]
        note("verify")
        self._sessions[session] += 1
        asked = self._sessions[session]
        {verify}

    async def end_session(self, session_id: str) -> None:
        note("end" if self._sessions.pop(session_id, None) is not None else "end of a stranger")


def note(what: str) -> None:
    with Path({notes!r}).open("a") as file:
        file.write(what + chr(10))


if __name__ == "__main__":
    QuizServer.run_webserver()
"""
COUNTING_MODEL = """
from responses_api_models.scripted_model.app import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from responses_api_models.scripted_model.app import ScriptedModel, ScriptedModelConfig


class CountingModel(ScriptedModel):
    config: ScriptedModelConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        with open({notes!r}, "a") as file:
            file.write("model" + chr(10))
        return await super().responses(body)


if __name__ == "__main__":
    CountingModel.run_webserver()
"""
RESUMED = ("+resume_from_cache=true", "+json=true")
WITH_A_BUG = "return BaseVerifyResponse(**body.model_dump(), reward='as good as it gets')"
PASSING = "return BaseVerifyResponse(**body.model_dump(), reward=1.0)"
FAILING_ONCE = """if asked == 1:
            raise KeyError(session)
        return BaseVerifyResponse(**body.model_dump(), reward=asked / 2)"""


def write_servers(folder: Path, verify: str, mode: str = "UNKNOWN") -> None:
    """An environment whose `verify` is given, and a model that notes its calls."""
    notes = str(folder / "notes.txt")
    for path, text in (
        ("resources_servers/quiz", QUIZ.format(verify=verify, mode=mode, notes=notes)),
        ("responses_api_models/counting_model", COUNTING_MODEL.format(notes=notes)),
    ):
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / "app.py").write_text(text)
        (folder / path / "requirements.txt").write_text("")
    references = {
        "resources_server": {"type": "resources_servers", "name": "quiz"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    data = {"name": "example", "type": "example", "jsonl_fpath": "in.jsonl", "num_repeats": 1}
    agent = {"entrypoint": "app.py", **references, "datasets": [data]}
    config = {
        "quiz": {"resources_servers": {"quiz": {"entrypoint": "app.py", "domain": "other"}}},
        "policy_model": {"responses_api_models": {"counting_model": {"entrypoint": "app.py"}}},
        "quiz_agent": {"responses_api_agents": {"simple_agent": agent}},
    }
    (folder / "servers.yaml").write_text(yaml.safe_dump(config))


def collect_all(folder: Path, *options: str) -> tuple[int, str, str]:
    done = run_program(
        "ng_e2e_collect_rollouts",
        "+config_paths=[servers.yaml]",
        "+split=example",
        "+output_jsonl_fpath=out.jsonl",
        f"+head_server.port={free_port()}",
        "+num_samples_in_parallel=4",
        *options,
        folder=folder,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def noted(folder: Path) -> Counter[str]:
    """How often the model, `verify` and `end_session` were called."""
    return Counter((folder / "notes.txt").read_text().split("\n")[:-1])


def test_a_verdict_that_fails_once_is_asked_for_again_in_the_same_session(tmp_path: Path) -> None:
    write_servers(tmp_path, FAILING_ONCE)
    write_rows(tmp_path / "in.jsonl", rows_of(12))

    code, stdout, stderr = collect_all(tmp_path)

    assert code == 0, stdout + stderr
    assert [record["reward"] for record in lines_in(tmp_path / "out.jsonl")] == [1.0] * 12
    assert not lines_in(tmp_path / "out_failures.jsonl")
    assert noted(tmp_path) == {"model": 12, "verify": 24, "end": 12}


def test_a_bug_in_verify_ends_the_run_after_a_handful_of_rollouts_and_costs_no_call_again(tmp_path: Path) -> None:
    write_servers(tmp_path, WITH_A_BUG, "SEEDED")
    write_rows(tmp_path / "in.jsonl", rows_of(100))

    code, stdout, stderr = collect_all(tmp_path, "+nemo_gym_log_dir=logs")

    assert code == 1, stderr
    calls = noted(tmp_path)
    assert calls["model"] <= 12
    assert calls["verify"] == 3 * calls["end"] == 3 * calls["model"]
    (line,) = [line for line in stdout.splitlines() if line.startswith("Stopped early: ")]
    number = QUIZ[: QUIZ.index("{verify}")].count("\n") + 1
    assert "5 rollouts failed for the same reason and none succeeded" in line
    assert "/verify raised ValidationError: 1 validation error for BaseVerifyResponse reward" in line
    assert f"resources_servers/quiz/app.py line {number}; logs/quiz.log has the traceback" in line
    assert WITH_A_BUG in (tmp_path / "logs/quiz.log").read_text()
    failures = lines_in(tmp_path / "out_failures.jsonl")
    assert len(failures) == calls["model"] == len({failure["_ng_task_index"] for failure in failures})

    write_servers(tmp_path, PASSING, "SEEDED")
    code, stdout, stderr = collect_all(tmp_path, "+resume_from_cache=true")

    assert code == 0, stdout + stderr
    assert [record["reward"] for record in lines_in(tmp_path / "out.jsonl")] == [1.0] * 100
    assert noted(tmp_path)["model"] == 100


@pytest.mark.parametrize(
    ("mode", "error", "made"),
    [("stateless", "ServerLostError", 1), ("unsupported", "ServerLostError", 2), ("stateless", "KeyError", 1)],
)
def test_a_response_whose_environment_was_lost_is_scored_or_made_again(
    mode: str, error: str, made: int, collect: Collect
) -> None:
    async def lost_at_first(row: Row, attempt: int) -> web.Response | Row:
        if attempt > 1:
            return {**row, "reward": 1.0, "response": response_of("right")}
        said = {"error": "lost", "partial_response": response_of("right"), "failed_in": "verify"}
        return web.json_response(
            said,
            status=500,
            headers={
                "x-nemo-gym-has-partial": "true",
                "x-nemo-gym-error-status": "500",
                "x-nemo-gym-error-server": "judge_of_words",
                "x-nemo-gym-error-class": error,
            },
        )

    environment = FakeEnvironment()
    environment.mode, environment.answer = mode, lost_at_first
    write_rows(Path("in.jsonl"), rows_of(3))
    with serve(environment):
        agent = {"entrypoint": "app.py", "host": "127.0.0.1", "port": environment.port}
        environment.config = {"alpha": {"responses_api_agents": {"fake_agent": agent}}}
        done = collect(f"+head_server.port={environment.port}", "+max_total_tokens=1000", "+json=true")
        again = collect(f"+head_server.port={environment.port}", "+max_total_tokens=1001", *RESUMED, "+num_repeats=2")

    assert (done.exit_code, again.exit_code) == (0, 0), done.stderr + again.stderr
    assert json.loads(done.stdout)["budgets"]["max_total_tokens"]["used"] == 3 * made * 5
    assert json.loads(again.stdout)["budgets"]["max_total_tokens"]["used"] == 6 * made * 5
    records = lines_in(Path("out.jsonl"))
    assert [record["reward"] for record in records] == [1.0] * 6
    assert all("duration_s" in record["_ng_timing"] for record in records)
    assert environment.asked["/run"] == 6 * made
    assert environment.asked["/verify"] == (6 if made == 1 else 0)
    assert len(lines_in(Path("out_failures.jsonl"))) == 6


def test_an_environment_that_is_gone_when_asked_how_it_scores_is_asked_again_for_the_next_rollout(
    collect: Collect,
) -> None:
    asked = []

    class Restarting(FakeEnvironment):
        async def _mode(self, request: web.Request) -> web.Response:
            asked.append(request.path)
            if len(asked) == 1:
                assert request.transport is not None
                request.transport.abort()
            return await super()._mode(request)

    async def without_reward(row: Row, attempt: int) -> Row:
        return {**row, "reward": 1.0 if attempt > 1 else None, "response": response_of("right")}

    environment = Restarting()
    environment.answer = without_reward
    write_rows(Path("in.jsonl"), rows_of(3))
    with serve(environment):
        agent = {"entrypoint": "app.py", "host": "127.0.0.1", "port": environment.port}
        environment.config = {"alpha": {"responses_api_agents": {"fake_agent": agent}}}
        done = collect(f"+head_server.port={environment.port}", "+num_samples_in_parallel=1")

    assert done.exit_code == 0, done.stderr
    assert [record["reward"] for record in lines_in(Path("out.jsonl"))] == [1.0] * 3
    assert (environment.asked["/run"], environment.asked["/verify"], len(asked)) == (4, 2, 2)


def test_a_reward_that_is_no_number_costs_no_call_again_where_the_response_can_be_scored(collect: Collect) -> None:
    async def without_reward(row: Row, attempt: int) -> Row:
        return {**row, "reward": "high", "response": response_of("right")}

    environment = FakeEnvironment()
    environment.answer, environment.score = without_reward, lambda body: 1.0 if body["n"] else None
    write_rows(Path("in.jsonl"), rows_of(3))
    with serve(environment):
        agent = {"entrypoint": "app.py", "host": "127.0.0.1", "port": environment.port}
        environment.config = {"alpha": {"responses_api_agents": {"fake_agent": agent}}}
        done = collect(f"+head_server.port={environment.port}")

    assert done.exit_code == 1
    assert sorted(record["n"] for record in lines_in(Path("out.jsonl"))) == [1, 2]
    failures = Counter(failure["_ng_task_index"] for failure in lines_in(Path("out_failures.jsonl")))
    assert failures == {0: 3, 1: 1, 2: 1}
    assert (environment.asked["/run"], environment.asked["/verify"]) == (3, 4)


@pytest.mark.parametrize("verdict", ["None", "BaseVerifyResponse(**body.model_dump(), reward=float('nan'))"])
def test_verdicts_that_are_none_cost_no_call_again_and_end_the_run_soon(verdict: str, tmp_path: Path) -> None:
    write_servers(tmp_path, f"return {verdict}", "SEEDED")
    write_rows(tmp_path / "in.jsonl", rows_of(60))

    code, stdout, stderr = collect_all(tmp_path)

    assert code == 1, stdout + stderr
    assert "5 rollouts failed for the same reason and none succeeded" in stdout
    assert "Received an invalid verdict from resources server 'quiz'" in stdout
    failures = lines_in(tmp_path / "out_failures.jsonl")
    assert noted(tmp_path)["model"] == len({failure["_ng_task_index"] for failure in failures}) < 60


def raised_in(answer: web.Response, raised: str) -> web.Response:
    """An error answer whose headers say which exception of the environment is behind it."""
    for name, value in {"status": "500", "server": "quiz", "class": "KeyError", "raised": raised}.items():
        answer.headers[f"x-nemo-gym-error-{name}"] = value
    return answer


@pytest.mark.parametrize(("raised", "per_rollout"), [("/verify KeyError app.py line 3", 1), ("/run KeyError x", 2)])
def test_the_same_exception_of_any_agent_ends_a_run_without_a_success(
    raised: str, per_rollout: int, fake_run: FakeEnvironment, collect: Collect
) -> None:
    refuse = failing_with(500)

    async def failing(row: Row, attempt: int) -> web.Response:
        answer = raised_in(await refuse(row, attempt), raised)
        answer.headers["x-nemo-gym-error-message"] = f"no {row['n']} here"
        return answer

    fake_run.answer = failing
    write_rows(Path("in.jsonl"), rows_of(200))

    done = collect("+num_samples_in_parallel=1", "+json=true")

    assert done.exit_code == 1
    assert json.loads(done.stdout)["stopped"]["kind"] == "hopeless"
    times = Counter(failure["_ng_task_index"] for failure in lines_in(Path("out_failures.jsonl")))
    assert sum(count >= per_rollout for count in times.values()) >= 5
    assert sum(times.values()) <= 40
    assert re.search(r"5 rollouts failed for the same reason .* no \d+ here", done.stderr)


def test_an_exception_that_some_rollouts_do_not_meet_does_not_end_a_run(
    fake_run: FakeEnvironment, collect: Collect
) -> None:
    refuse = failing_with(500, lambda row: row["n"] > 0)

    async def failing(row: Row, attempt: int) -> web.Response | Row:
        answer = await refuse(row, attempt)
        return raised_in(answer, "/verify KeyError x") if isinstance(answer, web.Response) else answer

    fake_run.answer = failing
    write_rows(Path("in.jsonl"), rows_of(20))

    done = collect("+num_samples_in_parallel=1", "+json=true", "+max_attempts=1")

    assert done.exit_code == 1
    assert json.loads(done.stdout)["stopped"] is None
    assert len(lines_in(Path("out_failures.jsonl"))) == 19
