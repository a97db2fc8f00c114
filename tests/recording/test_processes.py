"""The same with commands and processes as users have them: replicas, and an agent from elsewhere in its own process."""

import json
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.recording.files import call_files
from nemo_gym.recording.upkeep import take_inventory
from tests.ports import free_port
from tests.programs import Program
from tests.readmes import clean_environment
from tests.recording.harness import ENVIRONMENT, GONE, noisy_endpoint

FOREIGN = "foreign_agent"
OURS = "example_multi_step_simple_agent"
APP = '''
"""Written by somebody who has never heard of recordings."""

from pydantic import ConfigDict

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status


class Config(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class Row(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class Verdict(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class ForeignAgent(SimpleResponsesAPIAgent):
    config: Config

    async def _post(self, server, path, body):
        answer = await self.server_client.post(server_name=server, url_path=path, json=body)
        await raise_for_status(answer)
        return await get_response_json(answer)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        request = body.model_dump(exclude_unset=True)
        said = []
        for _ in range(3):
            answer = await self._post(self.config.model_server.name, "/v1/responses", request)
            said += answer["output"]
            request["input"] = [*request["input"], {"role": "user", "content": f"Go on, {len(said)}."}]
        return NeMoGymResponse.model_validate({**answer, "output": said})

    async def run(self, body: Row = Body()) -> Verdict:
        response = await self._post(self.config.name, "/v1/responses", body.responses_create_params)
        verdict = {**body.model_dump(), "response": response}
        return Verdict.model_validate(await self._post(self.config.resources_server.name, "/verify", verdict))


if __name__ == "__main__":
    ForeignAgent.run_webserver()
'''


def write_config(folder: Path) -> None:
    agent = folder / "responses_api_agents" / FOREIGN
    agent.mkdir(parents=True)
    (agent / "app.py").write_text(APP)
    (agent / "requirements.txt").write_text("")
    datasets = [{"name": "example", "type": "example", "jsonl_fpath": f"{ENVIRONMENT}/data/example.jsonl"}]
    foreign = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "example_multi_step_resources_server"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "datasets": [{**datasets[0], "num_repeats": 1}],
    }
    config = {
        "config_paths": [
            f"{ENVIRONMENT}/configs/example_multi_step.yaml",
            "responses_api_models/openai_model/configs/openai_model.yaml",
        ],
        FOREIGN: {"responses_api_agents": {FOREIGN: foreign}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def collect(folder: Path, port: int, mode: str, *options: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    """The rollouts of a run of the command, without their times."""
    output = folder / f"{mode}.jsonl"
    command = Program(
        "ng_e2e_collect_rollouts",
        "+config_paths=[config.yaml]",
        "+split=example",
        "+num_repeats=4",
        f"+policy_base_url=http://127.0.0.1:{port}/v1",
        "+policy_api_key=secret-that-is-long-enough",
        "+policy_model_name=noisy",
        f"+output_jsonl_fpath={output.name}",
        f"+head_server.port={free_port()}",
        "+recording_folder=recorded",
        f"+recording_mode={mode}",
        *options,
        folder=folder,
        environment=clean_environment(),
        name=mode,
    )
    try:
        assert command.wait() == 0, command.stdout + command.stderr
    finally:
        command.stop()
    records = [json.loads(line) for line in output.read_text().splitlines()]
    for record in records:
        del record["_ng_timing"]
    return {
        (record["agent_ref"]["name"], record["_ng_task_index"], record["_ng_rollout_index"]): record
        for record in records
    }


def test_two_replicas_and_a_foreign_agent_record_a_run_that_is_replayed_by_one(tmp_path: Path) -> None:
    write_config(tmp_path)
    with noisy_endpoint() as endpoint:
        recorded = collect(tmp_path, endpoint.port, "record", "+num_replicas=2")
        asked = endpoint.asked
    replayed = collect(tmp_path, GONE, "replay")

    assert len(recorded) == 40
    assert replayed == recorded
    assert len(call_files(tmp_path / "recorded", "policy_model")) == 2
    found = take_inventory(tmp_path / "recorded", verify=True)
    assert (found.damage, found.torn_bytes) == ([], 0)
    (policy,) = found.servers
    assert (policy.calls, policy.rollouts) == (asked, 40)
