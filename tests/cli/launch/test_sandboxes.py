"""Containers never outlive their run, whichever way it ends: an agent of somebody else, and a stand-in for Docker."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs import Program, run_program
from tests.sandbox.stand_ins import StandIn, docker

__all__ = ["docker"]

AGENT = """
from typing import Any

from pydantic import ConfigDict

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, resolve_provider_config, resolve_provider_metadata


class ShellAgentConfig(BaseResponsesAPIAgentConfig):
    sandbox_provider: str | dict[str, Any] = "sandbox"
    sandbox_spec: dict[str, Any] = {}


class Task(BaseRunRequest):
    model_config = ConfigDict(extra="allow")
    script: str
    expected: str


class Scored(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class ShellAgent(SimpleResponsesAPIAgent):
    config: ShellAgentConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        raise NotImplementedError

    async def run(self, body: Task) -> Scored:
        configs = get_global_config_dict()
        metadata = {**resolve_provider_metadata(self.config.sandbox_provider, configs), "agent": "shell"}
        provider = resolve_provider_config(self.config.sandbox_provider, configs)
        async with AsyncSandbox(provider, SandboxSpec(**self.config.sandbox_spec, metadata=metadata)) as sandbox:
            await sandbox.start()
            done = await sandbox.exec(body.script, timeout_s=600)
        said = {"type": "output_text", "text": done.stdout or "", "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [said]}
        response = NeMoGymResponse(
            id="r", created_at=0, model="shell", object="response", output=[message], parallel_tool_calls=False,
            tool_choice="auto", tools=[],
        )
        reward = float((done.stdout or "").strip() == body.expected)
        return Scored(**body.model_dump(), response=response, reward=reward, return_code=done.return_code)


if __name__ == "__main__":
    ShellAgent.run_webserver()
"""
CONFIG = """
config_paths: [nemo_gym/sandbox/providers/docker/configs/docker.yaml]
head_server: {{port: 0}}
sandbox: {{default_metadata: {{team: red}}}}
shell_agent:
  responses_api_agents:
    shell_agent:
      entrypoint: app.py
      sandbox_provider: sandbox
      sandbox_spec: {{image: "some/image:1", workdir: "{workdir}"}}
"""
ASK = """
import sys, urllib.request
_, url, body = sys.argv
urllib.request.urlopen(urllib.request.Request(url, body.encode(), {"content-type": "application/json"}))
"""
Wait = Callable[[Callable[[], Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    agent = tmp_path / "responses_api_agents/shell_agent"
    agent.mkdir(parents=True)
    (agent / "app.py").write_text(AGENT)
    (agent / "requirements.txt").write_text("")
    (tmp_path / "config.yaml").write_text(CONFIG.format(workdir=tmp_path / "inside"))
    return tmp_path


@pytest.fixture
def run(folder: Path, docker: StandIn, wait_for: Wait) -> Any:
    program = Program("ng_run", "+config_paths=[config.yaml]", folder=folder)
    wait_for(lambda: "servers ready!" in program.stdout or not program.is_running)
    assert program.is_running, program.stderr
    yield program
    program.stop()


def agent_url(run: Program) -> str:
    row = next(line for line in run.stdout.splitlines() if line.startswith("shell_agent "))
    return row.split()[2]


def begin(run: Program, folder: Path, wait_for: Wait) -> "subprocess.Popen[bytes]":
    """A rollout whose command goes on for as long as anybody lets it."""
    body = {"responses_create_params": {"input": "x"}, "script": "touch begun; sleep 600", "expected": ""}
    command = [sys.executable, "-c", ASK, f"{agent_url(run)}/run", json.dumps(body)]
    asking = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for((folder / "inside/begun").exists)
    return asking


def test_rollouts_of_a_sandboxed_agent_are_collected(run: Program, folder: Path, docker: StandIn) -> None:
    rows = [
        {"responses_create_params": {"input": "x"}, "script": f"echo $(({number} * 2))", "expected": str(number * 2)}
        for number in range(3)
    ]
    rows.append({"responses_create_params": {"input": "x"}, "script": "exit 1", "expected": "never"})
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = next(line for line in run.stdout.splitlines() if line.startswith("head server"))
    port = head.split("http://")[1].split()[0].rpartition(":")[2]
    done = run_program(
        "ng_collect_rollouts", "+agent_name=shell_agent", "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl", f"+head_server.port={port}", "+disable_aggregation=true", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sorted((record["reward"], record["return_code"]) for record in records) == [(0, 1), (1, 0), (1, 0), (1, 0)]
    assert docker.containers() == {}
    assert "nemo-gym.metadata.team=red" in docker.calls("run")[0]
    run.send(signal.SIGTERM)
    assert run.wait() == 0
    assert [call[0] for call in docker.calls("ps")] == ["ps", "ps"], "the launcher has looked for what is left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_containers_go_with_their_run_and_no_others(
    run: Program, folder: Path, docker: StandIn, wait_for: Wait, number: signal.Signals
) -> None:
    other = {"pid": os.getpid(), "labels": {"nemo-gym.sandbox": "1", "nemo-gym.run": "another"}, "rm": False}
    (docker.state / "containers/other.json").write_text(json.dumps(other))
    asking = begin(run, folder, wait_for)
    [name] = set(docker.containers()) - {"other"}
    pid = docker.containers()[name]["pid"]
    run.send(number)
    run.wait()
    wait_for(lambda: list(docker.containers()) == ["other"])
    asking.kill()
    asking.wait()
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_what_docker_did_not_let_go_of_is_named(run: Program, folder: Path, docker: StandIn, wait_for: Wait) -> None:
    asking = begin(run, folder, wait_for)
    (docker.state / "down").touch()
    run.send(signal.SIGTERM)
    run.wait()
    asking.kill()
    asking.wait()
    assert "sandboxes of this run may be left behind" in run.stderr
    assert "Cannot connect to the Docker daemon" in run.stderr
    (docker.state / "down").unlink()
    for name in docker.containers():
        docker.run("rm", "-f", name)


def test_what_a_run_left_whose_launcher_and_warden_were_killed_goes_at_the_next_start(
    run: Program, folder: Path, docker: StandIn, wait_for: Wait
) -> None:
    asking = begin(run, folder, wait_for)
    launcher = psutil.Process(run.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()
    asking.kill()
    asking.wait()
    assert len(docker.containers()) == 1

    again = run_program("ng_run", "+config_paths=[config.yaml]", "+dry_run=true", folder=folder)
    assert again.returncode == 0, again.stderr
    wait_for(lambda: docker.containers() == {})
