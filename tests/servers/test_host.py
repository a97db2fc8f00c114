"""Many servers in one process: what the launcher is told, and what stays in memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.handover import child_environment, write_config_file
from nemo_gym.global_config import GlobalConfigDictParser
from tests.servers.conftest import Running, start_host, stop, write_server

AGENT = textwrap.dedent(
    '''
    """An agent that calls a tool of the probe and can be left waiting."""

    import asyncio
    from pathlib import Path

    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.server_utils import get_response_json


    class Config(BaseResponsesAPIAgentConfig):
        resources_server: ResourcesServerRef
        marks: str


    class Caller(SimpleResponsesAPIAgent):
        config: Config

        async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                with Path(self.config.marks).open("a") as file:
                    file.write("cancelled\\n")
                raise

        async def run(self, body: dict) -> dict:
            tool = body.get("tool", "/echo")
            answer = await self.server_client.post(self.config.resources_server.name, tool, json=body)
            return {
                "status": answer.status,
                "answer": await get_response_json(answer),
                "transport": type(answer).__name__,
                "cookies": list(answer.cookies),
            }
    '''
)


class Host:
    """A host process and what it told its launcher."""

    def __init__(self, root: Path, config: dict[str, Any], names: list[str], *, replica: int = 0) -> None:
        self.marks = root / "marks.txt"
        self.marks.touch()
        self.log = root / f"host{replica}.log"
        self.config = GlobalConfigDictParser().parse_no_environment(OmegaConf.create(config))
        env = child_environment(self.config, write_config_file(self.config), "unused", os.environ)
        env |= {"NEMO_GYM_EXTRA_ROOTS": str(root), "NEMO_GYM_PARENT_PID": str(os.getpid())}
        env.pop("NEMO_GYM_CONFIG_PATH")
        with self.log.open("w") as output:
            self.process, self._stream = start_host(names, env, output, replica=replica)
        self.events = [json.loads(self._stream.readline() or "{}") for _ in names]

    def running(self, name: str) -> Running:
        event = next(event for event in self.events if event["name"] == name)
        url = f"http://{event['host']}:{event['port']}"
        return Running(self.config, name, url, self.marks, self.process, self.log)

    def close(self) -> None:
        self._stream.close()
        stop(self.process)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.close()


def two_servers(root: Path) -> dict[str, Any]:
    write_server(root)
    write_server(root, server_type="responses_api_agents", name="caller", app=AGENT)
    marks = str(root / "marks.txt")
    probe = {"entrypoint": "app.py", "domain": "other", "greeting": "hi", "marks": marks}
    ref = {"type": "resources_servers", "name": "probe_one"}
    return {
        "probe_one": {"resources_servers": {"probe": probe}},
        "an_agent": {
            "responses_api_agents": {"caller": {"entrypoint": "app.py", "resources_server": ref, "marks": marks}}
        },
    }


def test_calls_between_hosted_servers_stay_in_memory(tmp_path: Path, hosts: list[Host]) -> None:
    hosts.append(host := Host(tmp_path, two_servers(tmp_path), ["probe_one", "an_agent"]))

    assert [event["event"] for event in host.events] == ["ready", "ready"]
    answer = host.running("an_agent").call("/run", {"x": 1}).json
    assert answer["transport"] == "LocalResponse"
    assert answer["answer"]["body"] == {"x": 1}
    assert answer["cookies"] == ["ProbeServer___probe_one"]
    failed = host.running("an_agent").call("/run", {"tool": "/boom"}).json
    assert (failed["status"], failed["answer"]) == (500, "ValueError('x')")
    assert "(probe_one) echo was called" in host.log.read_text()


def test_further_replicas_take_ports_of_their_own(tmp_path: Path, hosts: list[Host]) -> None:
    config = two_servers(tmp_path)
    names = ["probe_one", "an_agent"]
    hosts.append(first := Host(tmp_path, config, names))
    ports = {name: first.running(name).url for name in names}
    pinned: Any = OmegaConf.to_container(first.config)
    hosts.append(second := Host(tmp_path, pinned, names, replica=1))

    for name in names:
        assert second.running(name).url != ports[name]
    assert second.running("an_agent").call("/run", {}).json["transport"] == "LocalResponse"


def test_a_caller_who_vanishes_cancels_long_work(tmp_path: Path, hosts: list[Host]) -> None:
    hosts.append(host := Host(tmp_path, two_servers(tmp_path), ["probe_one", "an_agent"]))
    address = host.running("an_agent").url.removeprefix("http://").split(":")
    body = b'{"input": "hi"}'
    head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((address[0], int(address[1]))) as caller:
        caller.sendall(head + body)
        time.sleep(0.3)
    wait_until(lambda: "cancelled" in host.marks.read_text())


def test_what_cannot_be_hosted_is_declined_and_what_cannot_start_is_failed(tmp_path: Path, hosts: list[Host]) -> None:
    config = two_servers(tmp_path)
    write_server(tmp_path, name="two_classes", app=f"{PROBE_TWICE}")
    write_server(tmp_path, name="no_module", app="import a_package_that_does_not_exist\n")
    write_server(tmp_path, name="broken", app=PROBE_BROKEN)
    for name in ("two_classes", "no_module", "broken"):
        config[name] = {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other"}}}
    del config["probe_one"]["resources_servers"]["probe"]["greeting"]
    names = ["two_classes", "no_module", "broken", "probe_one"]
    hosts.append(host := Host(tmp_path, config, names))

    told = {event["name"]: (event["event"], event["reason"]) for event in host.events}
    assert told["two_classes"][0] == "declined"
    assert "exactly one server class" in told["two_classes"][1]
    assert told["no_module"] == ("declined", "ModuleNotFoundError: No module named 'a_package_that_does_not_exist'")
    assert told["broken"] == ("failed", "ZeroDivisionError: division by zero")
    assert told["probe_one"][0] == "refused"
    assert "greeting: Field required" in told["probe_one"][1]


def test_a_taken_port_is_reported_with_its_holder(tmp_path: Path, hosts: list[Host]) -> None:
    config = two_servers(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config["probe_one"]["resources_servers"]["probe"]["port"] = port
        hosts.append(host := Host(tmp_path, config, ["probe_one"]))

    assert host.events[0]["event"] == "refused"
    assert f"port {port}" in host.events[0]["reason"]
    assert str(os.getpid()) in host.events[0]["reason"]


def test_a_dry_run_builds_everything_and_serves_nothing(tmp_path: Path, hosts: list[Host]) -> None:
    config = two_servers(tmp_path) | {"dry_run": True}
    hosts.append(host := Host(tmp_path, config, ["probe_one", "an_agent"]))

    assert [event["event"] for event in host.events] == ["ready", "ready"]
    assert host.process.wait(10) == 0


def test_a_handler_that_blocks_is_named_with_the_remedy(tmp_path: Path, hosts: list[Host]) -> None:
    config = two_servers(tmp_path)
    app = tmp_path / "resources_servers" / "probe" / "app.py"
    app.write_text(app.read_text().replace("await asyncio.sleep(0.5)", "__import__('time').sleep(3)"))
    hosts.append(host := Host(tmp_path, config, ["probe_one"]))
    host.running("probe_one").call("/slow")

    log = host.log.read_text()
    assert "server 'probe_one' has blocked its process" in log
    assert "isolation: process" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_host_at_once_and_cleanly(tmp_path: Path, hosts: list[Host], number: signal.Signals) -> None:
    hosts.append(host := Host(tmp_path, two_servers(tmp_path), ["probe_one", "an_agent"]))
    host.running("probe_one").call("/echo")
    host.process.send_signal(number)

    assert host.process.wait(10) == 0


def test_a_host_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    config = two_servers(tmp_path)
    launcher = textwrap.dedent(
        """
        import os, subprocess, sys, time
        env = dict(os.environ, NEMO_GYM_PARENT_PID=str(os.getpid()))
        arguments = ["-m", "nemo_gym.servers.host", "--events-fd", "1", "probe_one"]
        child = subprocess.Popen([sys.executable, *arguments], env=env)
        print(child.pid, flush=True)
        time.sleep(60)
        """
    )
    parsed = GlobalConfigDictParser().parse_no_environment(OmegaConf.create(config))
    env = child_environment(parsed, write_config_file(parsed), "unused", os.environ) | {
        "NEMO_GYM_EXTRA_ROOTS": str(tmp_path)
    }
    with subprocess.Popen([sys.executable, "-c", launcher], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert "ready" in process.stdout.readline()
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def wait_until(happened: Any) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


_PROBE = Path(__file__).with_name("probe_app.py.txt").read_text().split("if __name__")[0]
PROBE_TWICE = _PROBE + "\n\nclass Another(ProbeServer):\n    pass\n"
PROBE_BROKEN = _PROBE.replace("class ProbeConfig", "1 / 0\n\n\nclass ProbeConfig")
