"""Programs as their authors write them, in processes of their own, observed: agents, an environment, a harness."""

import json
import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from nemo_gym.rollout_observability import TrajectoryRecord
from tests.collection.fakes import lines_in, write_rows
from tests.programs import run_program

ENVIRONMENT = """
    # A Gymnasium-style environment: reset and step are routes, the verdict asks a judge.
    from fastapi import FastAPI, Request
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer,
    )
    from nemo_gym.config_types import ModelServerRef
    from nemo_gym.rollout_correlation import current_rollout_id
    from nemo_gym.server_utils import get_response_json, raise_for_status
    from pydantic import ConfigDict

    class Config(BaseResourcesServerConfig):
        judge: ModelServerRef

    class Asked(BaseVerifyRequest):
        model_config = ConfigDict(extra="allow")

    class Told(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class NotesPaths:
        # The prefix of the rollout has been taken off when an author's middleware sees the path.
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            await self.app({**scope, "sent_to": scope.get("path")}, receive, send)

    class GymEnvironment(SimpleResourcesServer):
        config: Config

        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.add_middleware(NotesPaths)
            app.post("/reset")(self.reset)
            app.post("/step")(self.step)
            return app

        async def reset(self, request: Request) -> dict:
            return {"observation": "start", "rollout": current_rollout_id(), "path": request.url.path}

        async def step(self, request: Request, body: dict) -> dict:
            seen = {"rollout": current_rollout_id(), "sent_to": request.scope["sent_to"]}
            return {"observation": body["action"], "terminated": True, **seen}

        async def verify(self, body: Asked) -> Told:
            answer = await self.server_client.post(
                server_name=self.config.judge.name, url_path="/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "Is this right?"}]},
            )
            await raise_for_status(answer)
            judged = (await get_response_json(answer))["choices"][0]["message"]["content"]
            return Told(**body.model_dump(), reward=1.0, judged=judged, resolved=True, judged_for=current_rollout_id())

    if __name__ == "__main__":
        GymEnvironment.run_webserver()
"""
URL_AGENT = """
    # An agent that calls itself and its model by the helpers for paths.
    from fastapi import Request
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.server_utils import get_response_json, raise_for_status
    from pydantic import ConfigDict

    class Config(BaseResponsesAPIAgentConfig):
        model_server: ModelServerRef
        resources_server: ResourcesServerRef

    class Row(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class Verdict(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class UrlAgent(SimpleResponsesAPIAgent):
        config: Config

        async def call(self, server: str, path: str, **kwargs):
            answer = await self.server_client.post(server_name=server, url_path=path, **kwargs)
            await raise_for_status(answer)
            return await get_response_json(answer)

        async def responses(
            self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
        ) -> NeMoGymResponse:
            path = self.url_path_for_request("/v1/responses", request)
            said = await self.call(self.config.model_server.name, path, json=body)
            return NeMoGymResponse.model_validate({**said, "user": path})

        async def run(self, body: Row) -> Verdict:
            environment = self.config.resources_server.name
            reset = await self.call(environment, self.url_path_for_run("/reset", body))
            step = await self.call(environment, "/step", json={"action": "left"})
            path = self.url_path_for_run("/v1/responses", body)
            said = await self.call(self.config.name, path, json=body.responses_create_params)
            verdict = await self.call(environment, "/verify", json={**body.model_dump(), "response": said})
            return Verdict.model_validate({**verdict, "reset": reset, "step": step, "own_path": path})

    if __name__ == "__main__":
        UrlAgent.run_webserver()
"""
HARNESS_AGENT = """
    # An agent around a program that knows nothing of all this and speaks Anthropic's API.
    import asyncio
    import json
    import sys
    from pathlib import Path

    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.rollout_observability import AgentInvocation, AgentObservationBundle, ToolCallObservation
    from nemo_gym.server_utils import get_response_json, get_server_url, raise_for_status
    from pydantic import ConfigDict

    class Config(BaseResponsesAPIAgentConfig):
        model_server: ModelServerRef
        resources_server: ResourcesServerRef

    class Row(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class Verdict(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class HarnessAgent(SimpleResponsesAPIAgent):
        config: Config

        async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
            raise NotImplementedError

        async def run(self, body: Row) -> Verdict:
            name = self.config.model_server.name
            root = self.base_url_for_run(get_server_url(name), body)
            assert self.resolve_model_base_url(name, self.rollout_id_from_run(body)) == f"{root}/v1"
            harness = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).with_name("harness.py")), root, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await harness.communicate()
            told = json.loads(out)
            part = {"type": "output_text", "text": told["text"], "annotations": []}
            message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
            said = NeMoGymResponse(id="r", created_at=0, model="any", object="response", output=[message])
            answer = await self.server_client.post(
                server_name=self.config.resources_server.name, url_path="/verify",
                json={**body.model_dump(), "response": said.model_dump()},
            )
            await raise_for_status(answer)
            records = [
                AgentInvocation(invocation_id="main", status="completed"),
                ToolCallObservation(invocation_id="main", tool_call_id="t1", tool_name="get_weather"),
            ]
            bundle = AgentObservationBundle(source="claude_code", records=records)
            return Verdict.model_validate({
                **await get_response_json(answer), "base_url": root, "turns": told["turns"],
                "ng_agent_observations": bundle.model_dump(mode="json"),
            })

    if __name__ == "__main__":
        HarnessAgent.run_webserver()
"""
HARNESS = """
    # Anthropic's SDK, a tool, and a loop: streamed, as Claude Code does it.
    import json
    import sys

    import anthropic

    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "get_weather", "description": "Tells the weather", "input_schema": schema}]
    conversation = [{"role": "user", "content": "What is the weather in Oslo?"}]
    turns = 0
    while True:
        turns += 1
        with client.messages.stream(
            model="claude", max_tokens=500, system="Be brief", tools=tools, messages=conversation
        ) as stream:
            message = stream.get_final_message()
        conversation.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        conversation.append({"role": "user", "content": results})
    text = "".join(block.text for block in message.content if block.type == "text")
    print(json.dumps({"text": text, "turns": turns}))
"""
AGENTS = ("url_agent", "harness_agent", "simple_agent")


def write_servers(root: Path) -> None:
    written = {
        "resources_servers/gym_environment/app.py": ENVIRONMENT,
        "responses_api_agents/url_agent/app.py": URL_AGENT,
        "responses_api_agents/harness_agent/app.py": HARNESS_AGENT,
        "responses_api_agents/harness_agent/harness.py": HARNESS,
    }
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        (path.parent / "requirements.txt").touch()
    references = {
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "resources_server": {"type": "resources_servers", "name": "gym_environment"},
        "entrypoint": "app.py",
    }
    scripted = {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}}
    judge = {"type": "responses_api_models", "name": "judge_model"}
    block = {"entrypoint": "app.py", "domain": "other", "judge": judge}
    config = {
        "policy_model": scripted,
        "judge_model": scripted,
        "gym_environment": {"resources_servers": {"gym_environment": block}},
        **{
            name: {"responses_api_agents": {name: {**references, "datasets": [data_of(root, name)]}}} for name in AGENTS
        },
    }
    (root / "servers.yaml").write_text(yaml.safe_dump(config))


def data_of(root: Path, agent: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"input": [{"role": "user", "content": f"Which city is the capital of Norway, {agent}?"}]}
    if agent == "simple_agent":
        action = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
        asked["tools"] = [{"type": "function", "name": "step", "parameters": action, "strict": True}]
    write_rows(root / f"{agent}.jsonl", [{"responses_create_params": asked}])
    return {"name": agent, "type": "example", "jsonl_fpath": str(root / f"{agent}.jsonl")}


def collected(root: Path, *options: str) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))}
    ended = run_program(
        "ng_e2e_collect_rollouts",
        "+config_paths=[servers.yaml]",
        "+split=example",
        "+output_jsonl_fpath=out.jsonl",
        "+head_server.port=0",
        *options,
        folder=root,
        environment=environment,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    records = lines_in(root / "out.jsonl")
    return {record["agent_ref"]["name"]: record for record in records}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("observed")
    write_servers(root)
    folder = root / "captures"
    return folder, collected(root, "+observability_enabled=true", f"+model_call_capture_dir={folder}")


def calls_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["model_ref"]["name"], call["dialect"]) for call in record["ng_model_call_capture"]["calls"]]


def test_every_call_of_a_rollout_is_in_its_record_and_its_trajectory_is_one(
    observed: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, records = observed
    assert set(records) == set(AGENTS)
    for record in records.values():
        assert record["reward"] == 1.0
        assert record["ng_model_call_capture"].get("gaps") is None
        trajectory = TrajectoryRecord.model_validate(record["ng_trajectory"])
        assert len(trajectory.model_calls) == record["ng_model_call_capture"]["metrics"]["num_calls"]
        assert all(call.request and call.response for call in trajectory.model_calls)
        assert "request" not in record["ng_model_call_capture"]["calls"][0]
        rollout_id = f"{record['_ng_task_index']}-0"
        assert trajectory.rollout_id == rollout_id
        assert (folder / f"{rollout_id}.capture.jsonl").exists()


def test_an_agent_that_uses_the_helpers_names_its_rollout_in_every_path(
    observed: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    record = observed[1]["url_agent"]
    assert record["own_path"] == "/ng-rollout/2-0/v1/responses"
    assert record["response"]["user"] == "/ng-rollout/2-0/v1/responses"
    assert calls_of(record) == [("policy_model", "responses"), ("judge_model", "chat")]
    assert {gap["code"] for gap in record["ng_trajectory"]["gaps"]} == {"turns_unavailable", "conversation_unavailable"}


def test_an_environment_knows_the_rollout_it_serves_and_so_does_its_judge(
    observed: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    record = observed[1]["url_agent"]
    assert record["reset"] == {"observation": "start", "rollout": "2-0", "path": "/reset"}
    seen = {"rollout": "2-0", "sent_to": "/step"}
    assert record["step"] == {"observation": "left", "terminated": True, **seen}
    assert record["judged_for"] == "2-0"


def test_a_harness_that_speaks_anthropics_api_is_captured_call_by_call(
    observed: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    record = observed[1]["harness_agent"]
    assert record["base_url"].endswith("/ng-rollout/0-0")
    assert record["turns"] >= 2
    assert calls_of(record) == [("policy_model", "messages")] * record["turns"] + [("judge_model", "chat")]
    first = record["ng_trajectory"]["model_calls"][0]
    assert first["request"]["messages"][0]["content"] == "What is the weather in Oslo?"
    assert first["response_metadata"]["finish_reason"] == "tool_use"
    assert [each["tool_name"] for each in record["ng_trajectory"]["tool_calls"]] == ["get_weather"]
    assert record["ng_agent_observations"]["source"] == "claude_code"


def test_simple_agent_tells_its_turns(observed: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    record = observed[1]["simple_agent"]
    trajectory = TrajectoryRecord.model_validate(record["ng_trajectory"])
    turn, last = trajectory.turns
    assert [(each.turn_no, each.step_count, each.resolved) for each in trajectory.turns] == [(1, 1, None), (2, 1, True)]
    assert turn.question == [{**record["responses_create_params"]["input"][0], "type": "message"}]
    assert turn.answer[0]["name"] == "step"  # type: ignore[index]
    assert [item["type"] for item in last.question] == ["message", "function_call", "function_call_output"]  # type: ignore[union-attr]
    (tool,) = trajectory.tool_calls
    assert (tool.tool_name, tool.status, tool.timing_source) == ("step", "completed", "executor")
    assert '"terminated":true' in str(tool.output)
    (invocation,) = trajectory.invocations
    assert (invocation.invocation_id, invocation.status) == ("root", "completed")
    captured = record["ng_model_call_capture"]["calls"][0]
    assert turn.model_calls[0].model_call_id == captured["model_call_id"]
    assert trajectory.gaps == []


def test_without_it_the_same_programs_get_back_what_they_gave(tmp_path: Path) -> None:
    write_servers(tmp_path)
    records = collected(tmp_path)

    assert records["url_agent"]["own_path"] == "/v1/responses"
    assert records["url_agent"]["reset"]["rollout"] is None
    assert "/ng-rollout/" not in records["harness_agent"]["base_url"]
    assert "ng_trajectory" not in records["simple_agent"]
    for record in records.values():
        assert record["reward"] == 1.0
        assert "ng_model_call_capture" not in record
    assert "/ng-rollout/" not in json.dumps(records)


def test_a_run_that_does_not_say_where_to_capture_is_refused(tmp_path: Path) -> None:
    write_servers(tmp_path)
    ended = run_program(
        "ng_e2e_collect_rollouts",
        "+config_paths=[servers.yaml]",
        "+split=example",
        "+output_jsonl_fpath=out.jsonl",
        "+observability_enabled=true",
        folder=tmp_path,
        timeout=240,
    )
    assert ended.returncode == 2
    assert "model_call_capture_dir is required when observability_enabled=true" in ended.stderr
    assert "Traceback" not in ended.stderr
