"""Agents that put no `usage` into their response are counted by what model servers tell of their calls."""

import json
from pathlib import Path

import pytest
import yaml

from tests.collection.fakes import Row, lines_in, write_rows
from tests.ports import free_port
from tests.programs import run_program

JUDGED = "resources_servers/equivalence_llm_judge/configs/equivalence_llm_judge.yaml"
QUESTION = [{"role": "user", "content": "What is the chemical symbol of gold?"}]
SILENT = """
async def run(row, model):
    for _ in range(2):
        answer = await model.create_response(input=row["responses_create_params"]["input"])
    return {**answer.model_dump(mode="json"), "usage": None}
"""

OWN_CLIENT = """
from typing import Any

import aiohttp

from nemo_gym.base_resources_server import BaseRunRequest, Request
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef


class OwnConfig(BaseResponsesAPIAgentConfig):
    model_server: ModelServerRef
    resources_server: ResourcesServerRef


class OwnAgent(SimpleResponsesAPIAgent):
    config: OwnConfig

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def run(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        url = self.resolve_model_base_url(self.config.model_server.name, self.rollout_id_from_run(body))
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(url + "/responses", json=body["responses_create_params"]) as answer:
                    response = {**await answer.json(), "usage": None}
        judged = {**body, "response": response}
        scored = await self.server_client.post(self.config.resources_server.name, "/verify", json=judged)
        return await scored.json()


if __name__ == "__main__":
    OwnAgent.run_webserver()
"""
MATCHED = "resources_servers/string_match/configs/string_match.yaml"


def write_config(folder: Path, *, num_workers: int | None) -> None:
    """An agent that asks its model twice, and an environment whose judge is the same model; all in one process."""
    script: Row = {"usage": {"input_tokens": 50, "output_tokens": 7}}
    model = {"entrypoint": "app.py", "script": script, **({} if num_workers is None else {"num_workers": num_workers})}
    references = {
        "resources_server": {"type": "resources_servers", "name": "equivalence_llm_judge"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    data = [{"name": "example", "type": "example", "jsonl_fpath": "in.jsonl", "num_repeats": 1}]
    agent = {"entrypoint": "app.py", "function": "silent:run", "path": str(folder), **references, "datasets": data}
    config = {
        "policy_model": {"responses_api_models": {"scripted_model": model}},
        "silent_agent": {"responses_api_agents": {"function_agent": agent}},
    }
    (folder / "silent.py").write_text(SILENT)
    (folder / "servers.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("num_workers", [None, 2], ids=["in memory", "over HTTP"])
def test_the_calls_of_an_agent_are_counted_and_those_of_a_judge_are_not(
    tmp_path: Path, num_workers: int | None
) -> None:
    write_config(tmp_path, num_workers=num_workers)
    row = {"responses_create_params": {"input": QUESTION}, "expected_answer": "Au"}
    write_rows(tmp_path / "in.jsonl", [{**row, "n": number} for number in range(5)])

    done = run_program(
        "ng_e2e_collect_rollouts",
        f"+config_paths=[{JUDGED},servers.yaml]",
        "+split=example",
        "+agent_name=silent_agent",
        "+output_jsonl_fpath=out.jsonl",
        f"+head_server.port={free_port()}",
        "+max_total_tokens=1000000",
        "+json=true",
        folder=tmp_path,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["budgets"]["max_total_tokens"]["used"] == 5 * 2 * 57
    for record in lines_in(tmp_path / "out.jsonl"):
        assert record["response"].get("usage") is None
        assert record["_ng_usage"] == {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 14,
            "total_tokens": 114,
            "model": "scripted_model",
        }


@pytest.mark.parametrize(("environment", "used"), [(MATCHED, 2 * 57), (JUDGED, None)], ids=["no judge", "same model"])
def test_calls_of_an_agent_with_a_client_of_its_own_are_counted_where_they_are_captured(
    tmp_path: Path, environment: str, used: int | None
) -> None:
    write_config(tmp_path, num_workers=None)
    place = tmp_path / "responses_api_agents/own_agent"
    place.mkdir(parents=True)
    (place / "app.py").write_text(OWN_CLIENT)
    (place / "requirements.txt").write_text("")
    config = yaml.safe_load((tmp_path / "servers.yaml").read_text())
    agent = config.pop("silent_agent")["responses_api_agents"]["function_agent"]
    of_agent = {key: agent[key] for key in ("entrypoint", "model_server", "datasets")}
    of_agent["resources_server"] = {"type": "resources_servers", "name": Path(environment).stem}
    config["own_agent"] = {"responses_api_agents": {"own_agent": of_agent}}
    (tmp_path / "servers.yaml").write_text(yaml.safe_dump(config))
    row = {"responses_create_params": {"input": QUESTION}, "expected_answer": "Au"}
    write_rows(tmp_path / "in.jsonl", [{**row, "n": number} for number in range(5)])

    done = run_program(
        "ng_e2e_collect_rollouts",
        f"+config_paths=[{environment},servers.yaml]",
        "+split=example",
        "+agent_name=own_agent",
        "+output_jsonl_fpath=out.jsonl",
        f"+head_server.port={free_port()}",
        "+observability_enabled=true",
        f"+model_call_capture_dir={tmp_path / 'calls'}",
        *(() if used is None else ("+max_total_tokens=1000000",)),
        "+prices={scripted_model: {input: 1, output: 2}}",
        "+json=true",
        folder=tmp_path,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    told = [record.get("_ng_usage", {}).get("total_tokens") for record in lines_in(tmp_path / "out.jsonl")]
    assert told == [used] * 5
    if used is None:
        assert summary["cost_usd"] is None
    else:
        assert summary["budgets"]["max_total_tokens"]["used"] == 5 * used
