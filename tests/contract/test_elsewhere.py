"""An environment and an agent written elsewhere, as they are in the wild, through every command that reads rollouts.

The agent adds up `usage.input_tokens_details.cached_tokens` without asking whether it is there, the environment builds
its answer from `body.model_dump()`, rows carry the verdict of an earlier run, and rollout files have been written by
programs that leave details out.
"""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.openai_utils import NeMoGymResponse
from tests.ports import free_port

ENVIRONMENT = """
from typing import Optional
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer,
)

class SumsConfig(BaseResourcesServerConfig):
    pass

class SumsRunRequest(BaseRunRequest):
    expected_answer: str

class SumsVerifyRequest(SumsRunRequest, BaseVerifyRequest):
    pass

class SumsVerifyResponse(BaseVerifyResponse):
    expected_answer: str
    extracted_answer: Optional[str] = None

class SumsResourcesServer(SimpleResourcesServer):
    config: SumsConfig

    async def verify(self, body: SumsVerifyRequest) -> SumsVerifyResponse:
        extracted = None
        for item in body.response.output:
            if item.type == "message" and item.role == "assistant":
                extracted = item.content[0].text[:1]
        return SumsVerifyResponse(**body.model_dump(), reward=float(extracted is not None), extracted_answer=extracted)

if __name__ == "__main__":
    SumsResourcesServer.run_webserver()
"""
AGENT = """
from fastapi import Request, Response
from pydantic import ConfigDict
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status

class TwiceConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef

class TwiceRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")

class TwiceVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")

class TwiceVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")

class TwiceAgent(SimpleResponsesAPIAgent):
    config: TwiceConfig

    async def responses(
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        usage, output = None, []
        for _ in range(2):
            answer = await self.server_client.post(
                server_name=self.config.model_server.name, url_path="/v1/responses", json=body, cookies=request.cookies
            )
            await raise_for_status(answer)
            model_response = NeMoGymResponse.model_validate(await get_response_json(answer))
            output.extend(model_response.output)
            if usage is None:
                usage = model_response.usage
            else:
                usage.input_tokens += model_response.usage.input_tokens
                usage.output_tokens += model_response.usage.output_tokens
                usage.total_tokens += model_response.usage.total_tokens
                usage.input_tokens_details.cached_tokens += model_response.usage.input_tokens_details.cached_tokens
                usage.output_tokens_details.reasoning_tokens += (
                    model_response.usage.output_tokens_details.reasoning_tokens
                )
        model_response.output, model_response.usage = output, usage
        return model_response

    async def run(self, request: Request, body: TwiceRunRequest) -> TwiceVerifyResponse:
        environment = self.config.resources_server.name
        seeded = await self.server_client.post(
            server_name=environment, url_path="/seed_session", json=body.model_dump(), cookies=request.cookies
        )
        await raise_for_status(seeded)
        answer = await self.server_client.post(
            server_name=self.config.name, url_path="/v1/responses", json=body.responses_create_params,
            cookies=seeded.cookies,
        )
        await raise_for_status(answer)
        to_verify = TwiceVerifyRequest.model_validate(body.model_dump() | {"response": await get_response_json(answer)})
        verdict = await self.server_client.post(
            server_name=environment, url_path="/verify", json=to_verify.model_dump(), cookies=answer.cookies
        )
        await raise_for_status(verdict)
        return TwiceVerifyResponse.model_validate(await get_response_json(verdict))

if __name__ == "__main__":
    TwiceAgent.run_webserver()
"""
EXTRA = {"uuid": "row", "difficulty": 3, "verifier_metadata": {"level": 2}}
EARLIER = {"reward": 0.25, "extracted_answer": "of old"}
AGENTS = ("twice_agent", "plain_agent")
TASKS = 3


def agent(implementation: str, model: str) -> dict[str, Any]:
    block = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "sums"},
        "model_server": {"type": "responses_api_models", "name": model},
    }
    return {"responses_api_agents": {implementation: block}}


def servers(endpoint_port: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{endpoint_port}/v1"
    vllm = {"base_url": url, "api_key": "none", "model": "m", "uses_reasoning_parser": True}
    openai = {"openai_base_url": url, "openai_api_key": "none", "openai_model": "m"}
    script = {"usage": {"details": False}}
    return {
        "sums": {"resources_servers": {"sums": {"entrypoint": "app.py", "domain": "other"}}},
        "twice_agent": agent("twice", "vllm"),
        "plain_agent": agent("simple_agent", "openai"),
        "vllm": {
            "responses_api_models": {
                "vllm_model": {"entrypoint": "app.py", "return_token_id_information": False, **vllm}
            }
        },
        "openai": {"responses_api_models": {"openai_model": {"entrypoint": "app.py", **openai}}},
        "endpoint": {
            "responses_api_models": {
                "scripted_model": {
                    "entrypoint": "app.py",
                    "host": "127.0.0.1",
                    "port": endpoint_port,
                    "script": script,
                }
            }
        },
    }


class Elsewhere:
    """A folder of somebody's, with servers running in it and rollouts collected from them."""

    records: list[dict[str, Any]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for kind, name, code in (("resources_servers", "sums", ENVIRONMENT), ("responses_api_agents", "twice", AGENT)):
            home = folder / kind / name
            home.mkdir(parents=True)
            (home / "app.py").write_text(code)
            (home / "requirements.txt").touch()
        (folder / "servers.yaml").write_text(yaml.safe_dump(servers(free_port())))
        rows = [
            {
                "responses_create_params": {"input": f"what is {task} + 2?"},
                "expected_answer": "4",
                "agent_ref": {"name": name},
                "task": f"{name} {task}",
                **EXTRA,
                **EARLIER,
            }
            for name in AGENTS
            for task in range(TASKS)
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.head = f"+head_server.port={free_port()}"
        self._run = subprocess.Popen(
            [script("ng_run"), "+config_paths=[servers.yaml]", self.head, f"+cache_dir={folder / 'cache'}"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = []
        assert self._run.stdout is not None
        for line in self._run.stdout:
            printed.append(line)
            if "servers ready!" in line:
                return
        pytest.fail(f"not started: {''.join(printed)}")

    def do(self, name: str, *arguments: str) -> str:
        done = subprocess.run(
            [script(name), *arguments], cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def collect(self, *options: str) -> list[dict[str, Any]]:
        files = ("+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl")
        self.do("ng_collect_rollouts", self.head, *files, *options)
        return self.lines("out.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def verify(self, record: dict[str, Any]) -> dict[str, Any]:
        listed = self.fetched(f"http://127.0.0.1:{self.head.rpartition('=')[2]}/server_instances")
        url = next(one["url"] for one in listed if one["process_name"] == "sums")
        answer: dict[str, Any] = self.fetched(f"{url}/verify", json.dumps(record).encode())
        return answer

    def fetched(self, url: str, body: bytes | None = None) -> Any:
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def stop(self) -> None:
        if self._run.poll() is None:
            self._run.send_signal(signal.SIGTERM)
            self._run.communicate(timeout=30)


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    there = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    try:
        there.records = there.collect()
        yield there
    finally:
        there.stop()


def test_their_rollouts_are_collected_with_the_whole_row_and_a_new_verdict(elsewhere: Elsewhere) -> None:
    records = elsewhere.records

    assert len(records) == TASKS * len(AGENTS)
    for record in records:
        assert record["reward"] == 1.0
        assert record["extracted_answer"] != EARLIER["extracted_answer"]
        assert {name: record[name] for name in EXTRA} == EXTRA
        usage = record["response"]["usage"]
        assert usage["input_tokens_details"] == {"cached_tokens": 0}
        assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
        assert all(item.get("content", "") is not None for item in record["response"]["output"])


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing told, no content": ({"input_tokens_details": None, "output_tokens_details": None}, {"content": None}),
    "nothing there": ({}, {}),
    "told": (
        {"input_tokens_details": {"cached_tokens": 2}, "output_tokens_details": {"reasoning_tokens": 1}},
        {"content": [{"type": "reasoning_text", "text": "Hm."}]},
    ),
    "empty": ({"input_tokens_details": {}, "output_tokens_details": {"reasoning_tokens": None}}, {"content": []}),
}


def reshaped(record: dict[str, Any], shape: str) -> dict[str, Any]:
    """The record as another program writes it."""
    details, content = SHAPES[shape]
    response = record["response"]
    counts = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    messages = [item for item in response["output"] if item["type"] != "reasoning"]
    output = [{**REASONING, **content}, *messages]
    return {**record, "response": {**response, "usage": {**counts, **details}, "output": output}}


def test_rollouts_that_others_wrote_are_resumed_aggregated_profiled_and_exported(elsewhere: Elsewhere) -> None:
    shapes = list(SHAPES)
    foreign = [reshaped(record, shapes[at % len(shapes)]) for at, record in enumerate(elsewhere.records)]
    (elsewhere.folder / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in foreign[:-1]))

    resumed = elsewhere.collect("+resume_from_cache=true")

    assert resumed[:-1] == foreign[:-1]
    assert resumed[-1]["task"] == foreign[-1]["task"]
    metrics = json.loads((elsewhere.folder / "out_aggregate_metrics.json").read_text())
    assert {entry["agent_ref"]["name"]: entry["agent_metrics"]["mean/reward"] for entry in metrics} == {
        "twice_agent": 1.0,
        "plain_agent": 1.0,
    }
    elsewhere.do(
        "ng_aggregate_rollouts", elsewhere.head, "+input_glob=out.jsonl", "+output_jsonl_fpath=all/merged.jsonl"
    )
    assert elsewhere.lines("all/merged.jsonl") == sorted(resumed, key=lambda one: one["_ng_task_index"])
    elsewhere.do(
        "ng_reward_profile",
        "+materialized_inputs_jsonl_fpath=out_materialized_inputs.jsonl",
        "+rollouts_jsonl_fpath=out.jsonl",
    )
    profile = elsewhere.lines("out_reward_profiling.jsonl")
    assert [task["mean/reward"] for task in profile] == [1.0] * len(resumed)
    assert all(task["mean/total_tokens"] > 0 for task in profile)
    elsewhere.do("ng_export", "+rollouts_jsonl_fpath=out.jsonl", "+output_fpath=sft.jsonl", "+format=sft")
    assert len(elsewhere.lines("sft.jsonl")) == len(resumed)


@pytest.mark.parametrize("shape", SHAPES)
def test_rollouts_that_others_wrote_are_verified_and_come_back_complete(elsewhere: Elsewhere, shape: str) -> None:
    record = reshaped(elsewhere.records[0], shape)

    got = elsewhere.verify(record)

    assert got["reward"] == 1.0
    usage = got["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == (2 if shape == "told" else 0)
    assert usage["output_tokens_details"]["reasoning_tokens"] == (1 if shape == "told" else 0)
    written = {} if SHAPES[shape][1].get("content") is None else SHAPES[shape][1]
    assert {name: value for name, value in got["response"]["output"][0].items() if name == "content"} == written
    assert NeMoGymResponse.model_validate(got["response"]).model_dump(mode="json") == got["response"]
