"""Whole rollouts with real servers, over sockets and in memory: sessions hold, results arrive, failures say where."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from omegaconf import DictConfig, OmegaConf
from pydantic import PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import SESSION_ID_KEY, WANTS_PARTIAL, ServerClient, SimpleServer
from nemo_gym.testing import Address, listen, register_local_app
from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentRunRequest, SimpleAgentVerifyResponse
from responses_api_models.scripted_model.app import ScriptedModel

EXAMPLES = Path(__file__).parents[3] / "resources_servers" / "example_single_tool_call" / "data" / "example.jsonl"
AGENT_REFS = {
    "resources_server": {"type": "resources_servers", "name": "environment"},
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
}


class CountingServer(SimpleResourcesServer):
    """Remembers which sessions called what; one tool always crashes."""

    config: BaseResourcesServerConfig
    _events: list[tuple[str, str]] = PrivateAttr(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/count")(self.count)
        app.post("/crash")(self.crash)
        app.post("/hang")(self.hang)
        return app

    async def count(self, request: Request) -> dict[str, int]:
        self._events.append(("count", request.session[SESSION_ID_KEY]))
        return {"count": self._calls_of(request)}

    async def crash(self, request: Request) -> None:
        raise ValueError("this tool is broken")

    async def hang(self) -> None:
        await asyncio.sleep(600)

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**dict(body), reward=float(self._calls_of(request)))

    async def end_session(self, session_id: str) -> None:
        self._events.append(("end", session_id))

    def _calls_of(self, request: Request) -> int:
        return self._events.count(("count", request.session[SESSION_ID_KEY]))


class OfferingSession(BaseSeedSessionResponse):
    tools: list[dict[str, Any]]


class OfferingServer(CountingServer):
    """Decides when a session begins which tools it has."""

    async def seed_session(self, body: BaseSeedSessionRequest) -> OfferingSession:
        return OfferingSession(tools=[{"type": "function", "name": "count", "parameters": {}}])


class PoliteAgent(SimpleAgent):
    """Has its own `responses`, so that a rollout goes through its own route."""

    async def responses(  # type: ignore[override]
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        answer = await super().responses(request, response, body)
        return answer.model_copy(update={"user": "polite"})


class Run:
    """Three servers that know each other by name."""

    def __init__(self, servers: dict[str, tuple[type[SimpleServer], dict[str, Any]]]) -> None:
        self.sockets = {name: listen("127.0.0.1", 0, name, "another port") for name in servers}
        blocks: dict[str, Any] = {"session_secret": "secret of this test"}
        for name, (_, settings) in servers.items():
            port = self.sockets[name].getsockname()[1]
            inner = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **settings}
            blocks[name] = {"resources_servers": {"implementation": inner}}
        self.config: DictConfig = OmegaConf.create(blocks)
        self.servers = {name: self._make(name, cls) for name, (cls, _) in servers.items()}

    def _make(self, name: str, server_class: type[SimpleServer]) -> SimpleServer:
        block: Any = OmegaConf.to_container(self.config[name]["resources_servers"]["implementation"])
        config_class: Any = server_class.model_fields["config"].annotation
        return server_class(config=config_class(name=name, **block), server_client=self.client())

    def client(self) -> ServerClient:
        return ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=self.config
        )

    def register_in_memory(self) -> None:
        for name, server in self.servers.items():
            address = Address("127.0.0.1", self.sockets[name].getsockname()[1])
            register_local_app(name, server.complete_app(), [address], cancellable_paths=server.CANCELLABLE_PATHS)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve on the sockets, each server in a thread of its own."""
        running: list[tuple[uvicorn.Server, threading.Thread]] = []
        for name, server in self.servers.items():
            config = uvicorn.Config(server.complete_app(), log_level="critical", timeout_graceful_shutdown=0)
            served = uvicorn.Server(config)
            thread = threading.Thread(target=served.run, kwargs={"sockets": [self.sockets[name]]}, daemon=True)
            thread.start()
            running.append((served, thread))
        deadline = time.monotonic() + 20
        while not all(served.started for served, _ in running):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield
        finally:
            for served, thread in running:
                served.should_exit = True
                thread.join(10)


Play = Callable[..., list[tuple[aiohttp.ClientResponse, Any]]]


@pytest.fixture(params=["sockets", "memory"])
def play(request: pytest.FixtureRequest) -> Play:
    """Make rollouts of rows, one after the other."""
    in_memory = request.param == "memory"

    def play_rows(run: Run, *rows: Any) -> list[tuple[aiohttp.ClientResponse, Any]]:
        async def post_all() -> list[tuple[aiohttp.ClientResponse, Any]]:
            if in_memory:
                run.register_in_memory()
            answers = [await run.client().post("agent", "/run", json=row) for row in rows]
            return [(answer, json.loads(await answer.read())) for answer in answers]

        with nullcontext() if in_memory else run.served():
            results = asyncio.run(post_all())
        for bound in run.sockets.values():
            bound.close()
        return results

    return play_rows


def make_run(
    script: dict[str, Any] | None = None,
    environment: type[SimpleServer] = CountingServer,
    agent: type[SimpleServer] = SimpleAgent,
    **agent_settings: Any,
) -> Run:
    return Run(
        {
            "environment": (environment, {}),
            "policy_model": (ScriptedModel, {"script": script}),
            "agent": (agent, {**AGENT_REFS, **agent_settings}),
        }
    )


def tool_calls(*names: str) -> dict[str, Any]:
    """A script that calls these tools, one per turn, and then answers."""
    rules: list[dict[str, Any]] = [
        {"match": {"turn": turn}, "reply": {"tool_call": {"name": name, "arguments": {}}}}
        for turn, name in enumerate(names, 1)
    ]
    return {"rules": [*rules, {"reply": {"text": "done"}}]}


def offering(*names: str) -> dict[str, Any]:
    """A row that offers these tools."""
    tools = [{"type": "function", "name": name, "parameters": {}} for name in names]
    return {"responses_create_params": {"input": "go", "tools": tools}, "own_field": "kept"}


ROW = offering("count", "crash")


def test_the_example_environment_rewards_every_row(play: Play) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]

    results = play(make_run(environment=SimpleWeatherResourcesServer), *rows)

    for (answer, result), row in zip(results, rows, strict=True):
        assert (answer.status, result["reward"]) == (200, 1.0)
        kinds = [item["type"] for item in result["response"]["output"]]
        assert kinds[0] == "function_call"
        assert kinds[-2:] == ["function_call_output", "message"]
        said = result["response"]["output"][-1]["content"][0]["text"]
        called = json.loads(result["response"]["output"][0]["arguments"])["city"]
        assert f"The weather in {called} is cold." in said
        assert called in row["responses_create_params"]["input"][1]["content"]
        assert result["response"]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("agent", [SimpleAgent, PoliteAgent])
def test_a_crashing_tool_does_not_change_the_session(play: Play, agent: type[SimpleServer]) -> None:
    run = make_run(tool_calls("count", "crash", "count", "no_such_tool", "count"), agent=agent)

    ((answer, result),) = play(run, ROW)

    outputs = [item["output"] for item in result["response"]["output"] if item["type"] == "function_call_output"]
    assert outputs[0] == '{"count":1}'
    assert outputs[1] == "\"ValueError('this tool is broken')\""
    assert (outputs[2], outputs[4]) == ('{"count":2}', '{"count":3}')
    assert json.loads(outputs[3]) == {"error": "There is no tool 'no_such_tool'. The tools are: count, crash"}
    assert (answer.status, result["reward"], result["own_field"]) == (200, 3.0, "kept")
    assert result["response"]["user"] == ("polite" if agent is PoliteAgent else None)


def test_every_rollout_has_a_session_of_its_own_that_ends(play: Play) -> None:
    run = make_run(tool_calls("count", "count"))

    results = play(run, ROW, ROW)

    assert [result["reward"] for _, result in results] == [2.0, 2.0]
    environment = run.servers["environment"]
    assert isinstance(environment, CountingServer)
    sessions = [session for kind, session in environment._events if kind == "count"]
    ended = [session for kind, session in environment._events if kind == "end"]
    assert len(set(sessions)) == 2
    assert ended == list(dict.fromkeys(sessions))


def test_a_failing_model_fails_the_rollout_with_its_status_and_ends_the_session(play: Play) -> None:
    script = tool_calls("count")
    run = make_run({**script, "faults": [{"kind": "status", "status": 429, "match": {"turn": 2}}]})

    ((answer, _),) = play(run, ROW)

    assert answer.status == 500
    assert answer.headers["x-nemo-gym-error-status"] == "429"
    assert answer.headers["x-nemo-gym-error-server"] == "policy_model"
    environment = run.servers["environment"]
    assert isinstance(environment, CountingServer)
    assert [kind for kind, _ in environment._events] == ["count", "end"]


class CrashingVerifier(CountingServer):
    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        raise ValueError("the verifier is broken")


class AgentWithAWord(SimpleAgent):
    """Adds to verdicts, so that nobody but itself can have a response scored as it does."""

    async def run(  # type: ignore[override]
        self, request: Request, body: SimpleAgentRunRequest
    ) -> SimpleAgentVerifyResponse:
        return await super().run(request, body)


@pytest.mark.parametrize(("agent", "said"), [(SimpleAgent, "verify"), (AgentWithAWord, None)])
def test_what_only_its_verdict_is_missing_of_says_so(agent: type[SimpleServer], said: str | None) -> None:
    run = make_run(tool_calls("count"), CrashingVerifier, agent)

    async def post() -> Any:
        run.register_in_memory()
        answer = await run.client().post("agent", "/run", json=ROW, headers={WANTS_PARTIAL: "true"})
        return json.loads(await answer.read())

    failed = asyncio.run(post())
    for bound in run.sockets.values():
        bound.close()
    assert failed.get("failed_in") == said
    kinds = [item["type"] for item in failed["partial_response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]


def test_a_model_that_only_thinks_gives_a_marked_result(play: Play) -> None:
    ((answer, result),) = play(make_run({"rules": [{"reply": {"reasoning": "hm"}}]}), ROW)

    assert (answer.status, result["reward"]) == (200, 0.0)
    assert result["ng_stop_reason"] == "no_actionable_output"
    assert result["response"]["incomplete_details"]["reason"] == "no_actionable_output"
    assert [item["type"] for item in result["response"]["output"]] == ["reasoning"] * 3


def test_an_unverified_rollout_is_marked_and_its_session_ended(play: Play) -> None:
    run = make_run(tool_calls("count"), skip_verification=True, skip_verification_reward=0.5)

    ((_, result),) = play(run, ROW)

    assert (result["reward"], result["verification_skipped"], result["own_field"]) == (0.5, True, "kept")
    environment = run.servers["environment"]
    assert isinstance(environment, CountingServer)
    assert [kind for kind, _ in environment._events] == ["count", "end"]


NO_TOOLS = [
    *["verify", "seed_session", "end_session", "aggregate_metrics", "reverify_mode", "mcp"],
    *["", "/", ".", "..", "../verify", "count/../verify", "./verify", "verify/", "//verify", "verify?x=1"],
    *["%76erify", "count/%2e%2e/verify", "http://127.0.0.1:1/count", "//127.0.0.1/count", "docs", "openapi.json"],
    *["count ", "Count", "count\n", "count?x=1", "count#", "count/", "c\u00f6unt", "count\x00", "x" * 100_000],
]


def outputs_of(result: dict[str, Any]) -> list[str]:
    return [item["output"] for item in result["response"]["output"] if item["type"] == "function_call_output"]


@pytest.mark.parametrize("agent", [SimpleAgent, PoliteAgent])
def test_only_the_tools_of_the_row_are_called(play: Play, agent: type[SimpleServer]) -> None:
    run = make_run(tool_calls(*NO_TOOLS, "count"), agent=agent)

    ((answer, result),) = play(run, ROW)

    assert (answer.status, result["reward"]) == (200, 1.0)
    *refused, counted = outputs_of(result)
    assert counted == '{"count":1}'
    assert len(refused) == len(NO_TOOLS)
    assert all(json.loads(output)["error"].startswith("There is no tool ") for output in refused)
    environment = run.servers["environment"]
    assert isinstance(environment, CountingServer)
    assert [kind for kind, _ in environment._events] == ["count", "end"]


def test_a_row_cannot_make_a_tool_of_a_route_that_runs_the_environment(play: Play) -> None:
    names = ["verify", "seed_session", "end_session", "aggregate_metrics", "..", "count/../verify", "verify/", "mcp"]
    run = make_run(tool_calls(*names, "count"))

    ((answer, result),) = play(run, offering(*names, "count"))

    assert (answer.status, result["reward"]) == (200, 1.0)
    assert all("belongs to the environment itself" in output for output in outputs_of(result)[:-1])
    environment = run.servers["environment"]
    assert isinstance(environment, CountingServer)
    assert [kind for kind, _ in environment._events] == ["count", "end"]


@pytest.mark.parametrize("agent", [SimpleAgent, PoliteAgent])
def test_an_environment_declares_the_tools_that_rows_do_not_name(play: Play, agent: type[SimpleServer]) -> None:
    run = make_run(tool_calls("count", "crash"), environment=OfferingServer, agent=agent)

    ((answer, result),) = play(run, offering())

    assert (answer.status, result["reward"]) == (200, 1.0)
    assert outputs_of(result)[0] == '{"count":1}'
    assert "There is no tool 'crash'" in outputs_of(result)[1]
    assert result["responses_create_params"]["tools"] == []


def test_a_tool_that_hangs_is_told_to_the_model(play: Play) -> None:
    run = make_run(tool_calls("hang", "count"), tool_timeout_s=0.2)

    ((answer, result),) = play(run, offering("hang", "count"))

    assert (answer.status, result["reward"]) == (200, 1.0)
    assert "The tool hang did not answer within 0.2 s" in outputs_of(result)[0]


def test_a_model_that_calls_tools_for_ever_is_ended_and_scored(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_api_agents.simple_agent.app.MOST_STEPS", 40)
    endless = {"rules": [{"reply": {"tool_call": {"name": "count", "arguments": {}}}}]}

    ((_, result),) = play(make_run(endless), ROW)
    ((_, limited),) = play(make_run(endless, max_steps=3), ROW)

    assert (result["reward"], result["ng_stop_reason"]) == (40.0, "max_steps")
    assert result["response"]["incomplete_details"]["reason"] == "max_steps"
    assert result["response"]["status"] == "incomplete"
    assert (limited["reward"], limited["response"]["status"]) == (3.0, "completed")
    assert "ng_stop_reason" not in limited
