"""What a run does when its servers, or their endpoints, are not there: it says which, waits as told, and ends."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, keys_in, right_away, rows_of, write_rows
from tests.collection.processes import BOTH_WAYS, COMMAND, Collector, wait_until
from tests.ports import free_port
from tests.programs import WAIT_S, Program

BURNER = """
import time
from pathlib import Path

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

if Path(__file__).with_name("slow").exists():
    time.sleep(6)


class Burner(SimpleResourcesServer):
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        burn = "burn" in str(body.responses_create_params.input)
        while burn:  # a good part of a core, and never back in the event loop
            sum(range(50_000))
            time.sleep(0.002)
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


if __name__ == "__main__":
    Burner.run_webserver()
"""
ROLLOUT = {"responses_create_params": {"input": "hello"}, "agent_ref": {"name": "agent"}}
TOKEN = "+auth_token=none-but-ours-0123456789"
Start = Callable[..., Program]


def server(kind: str, implementation: str, **settings: Any) -> Row:
    return {kind: {implementation: {"entrypoint": "app.py", "host": "127.0.0.1", "port": free_port(), **settings}}}


def burner_config(model: Row) -> Row:
    """An environment in a process of its own, an agent, and a model."""
    references = {
        "resources_server": {"type": "resources_servers", "name": "burner"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    return {
        "burner": server("resources_servers", "burner", isolation="process", domain="other"),
        "agent": server("responses_api_agents", "simple_agent", **references),
        "policy_model": model,
        "http_retry_max_delay_s": 0.3,
        "model_retry_max_delay_s": 0.3,
    }


def scripted(**script: Any) -> Row:
    return server("responses_api_models", "scripted_model", script=script)


def behind(port: int) -> Row:
    """A model server in front of an endpoint."""
    url = f"http://user:secret@127.0.0.1:{port}/v1"
    return server(
        "responses_api_models", "openai_model", openai_base_url=url, openai_api_key="none", openai_model="any"
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program of ours."""
    programs: list[Program] = []

    def begin(*command: str, **settings: Any) -> Program:
        programs.append(Program(*command, **settings))
        return programs[-1]

    yield begin
    for program in reversed(programs):
        if program.is_running:
            program.send(signal.SIGCONT)
            program.send(signal.SIGTERM)
            program.wait()


class Servers:
    """What one `ng_run` has started."""

    def __init__(self, start: Start, config: Row, *options: str, name: str = "servers") -> None:
        folder = Path("resources_servers/burner")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "app.py").write_text(BURNER)
        (folder / "requirements.txt").touch()
        Path(f"{name}.yaml").write_text(yaml.safe_dump(config))
        self.head_port = free_port()
        self._command = ["ng_run", f"+config_paths=[{name}.yaml]", f"+head_server.port={self.head_port}", *options]
        self._start, self._name = start, name
        self.start()

    def start(self) -> None:
        self.launcher = self._start(*self._command, name=self._name)
        self.wait_for(lambda: "servers ready!" in self.launcher.stdout)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert self.launcher.is_running, self.launcher.stdout + self.launcher.stderr
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.02)

    def pid_of(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.head_port}/server_instances", timeout=10) as answer:
            (pid,) = [int(entry["pid"]) for entry in json.load(answer) if entry["process_name"] == name]
        return pid

    def collect(self, *options: str, way: Sequence[str] = COMMAND) -> Collector:
        head = f"+head_server.port={self.head_port}"
        files = ("+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl")
        return Collector(head, *files, *options, name="collector", way=way)


def is_under_way(collector: Collector) -> Callable[[], bool]:
    return lambda: Path("out_materialized_inputs.jsonl").exists() and "Collecting rollouts" in collector.stderr


def assert_stopped_early(collector: Collector, words: str, way: Sequence[str]) -> None:
    """The command counts what is missing; a program gets what there is, at most attempts that failed; both tell why."""
    assert collector.wait() == (1 if way is COMMAND else 0)
    assert re.search(rf"Stopping: .*{words}", collector.stderr)
    if way is COMMAND:
        assert re.search(rf"Stopped early: .*{words}", collector.stdout)
    else:
        assert isinstance(json.loads(collector.stdout), list)
    assert keys_in(Path("out.jsonl")) == []


@BOTH_WAYS
def test_a_killed_launcher_is_named_ends_the_run_and_the_run_can_be_resumed(start: Start, way: Sequence[str]) -> None:
    write_rows(Path("in.jsonl"), [ROLLOUT] * 4)
    servers = Servers(start, burner_config(scripted(latency_s=120.0)))
    collector = servers.collect("+max_refused_s=4", way=way)
    wait_until(is_under_way(collector), collector)

    servers.launcher.send(signal.SIGKILL)

    assert_stopped_early(collector, "'agent' .*longer than max_refused_s=4 allows", way)
    assert re.search(
        r"the head server \(http://127.0.0.1:\d+\) refuses connections since \d\d:\d\d:\d\d", collector.stderr
    )
    gone = r"server 'agent' \(http://127.0.0.1:\d+\).* refuses connections since .*lasts max_refused_s=4"
    assert re.search(gone, collector.stderr)
    Path("servers.yaml").write_text(yaml.safe_dump(burner_config(scripted())))
    servers.start()
    assert servers.collect("+resume_from_cache=true", way=way).wait() == 0
    assert keys_in(Path("out.jsonl")) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_the_time_does_not_run_while_ng_run_starts_a_server_again(start: Start) -> None:
    write_rows(Path("in.jsonl"), [ROLLOUT] * 8)
    servers = Servers(start, burner_config(scripted(latency_s=1.0)), "+restart_crashed_servers=true")
    Path("resources_servers/burner/slow").touch()
    collector = servers.collect("+max_refused_s=3", "+num_samples_in_parallel=1", "+max_attempts=5")
    wait_until(is_under_way(collector), collector)

    os.kill(servers.pid_of("burner"), signal.SIGKILL)

    assert collector.wait() == 0
    assert re.search(
        r"server 'burner' .* since .*: `ng_run` is starting it, so the time does not count", collector.stderr
    )
    assert re.search(r"server 'burner' .* answers again, after \d+ s", collector.stderr)
    assert len(keys_in(Path("out.jsonl"))) == 8


@BOTH_WAYS
@pytest.mark.parametrize(
    ("prompt", "number", "words"),
    [
        ("burn the CPU", None, "is busy with CPU and does not answer"),
        ("hello", signal.SIGSTOP, "is stopped by a signal and says nothing"),
    ],
)
def test_a_busy_server_is_called_busy_and_a_stopped_one_stopped_and_both_have_max_silence_s(
    start: Start, prompt: str, number: signal.Signals | None, words: str, way: Sequence[str]
) -> None:
    write_rows(Path("in.jsonl"), [{**ROLLOUT, "responses_create_params": {"input": prompt}}])
    servers = Servers(start, burner_config(scripted(latency_s=1.0)))
    burner = servers.pid_of("burner")
    collector = servers.collect("+max_refused_s=1", "+max_silence_s=6", way=way)
    wait_until(is_under_way(collector), collector)
    if number is not None:
        os.kill(burner, number)

    try:
        assert_stopped_early(collector, f"server 'burner' .*{words} since .*longer than max_silence_s=6", way)
    finally:
        os.kill(burner, signal.SIGCONT)


def test_an_endpoint_that_never_answers_is_named_with_its_setting_and_ends_the_run(start: Start) -> None:
    port = free_port()
    write_rows(Path("in.jsonl"), [ROLLOUT] * 2)
    servers = Servers(start, burner_config(behind(port)), TOKEN)

    collector = servers.collect("+model_endpoint_readiness_timeout_seconds=4", TOKEN)

    assert collector.wait() == 1
    where = rf"no answer from http://[^ ]*127.0.0.1:{port}/v1"
    setting = r"correct policy_base_url \(openai_base_url of policy_model\)"
    assert re.search(rf"{where} yet: connection refused; {setting}, or wait while it loads", collector.stderr)
    assert re.search(
        rf"Stopped early: {where}: connection refused; {setting}.*{'model_endpoint_readiness_timeout_seconds'}=4",
        collector.stdout,
    )
    assert "secret" not in collector.stderr + collector.stdout
    assert Path("out_failures.jsonl").read_text() == ""


def test_an_endpoint_that_comes_up_late_and_then_takes_its_time_loses_nothing(start: Start) -> None:
    model = behind(free_port())
    write_rows(Path("in.jsonl"), [ROLLOUT] * 2)
    servers = Servers(start, burner_config(model))
    collector = servers.collect("+max_attempts=1", "+max_refused_s=2")
    wait_until(lambda: "or wait while it loads" in collector.stderr, collector)

    port = int(re.search(r":(\d+)/v1", str(model))[1])  # type: ignore[index]
    endpoint = scripted(latency_s=3.0)
    endpoint["responses_api_models"]["scripted_model"]["port"] = port
    Servers(start, {"endpoint": endpoint}, name="endpoint")

    assert collector.wait() == 0
    assert f"127.0.0.1:{port}/v1 can be reached now" in collector.stderr
    assert len(keys_in(Path("out.jsonl"))) == 2


def test_an_endpoint_that_is_slow_to_answer_for_the_first_time_is_not_missing(start: Start) -> None:
    endpoint = scripted(latency_s=6.0)
    port = endpoint["responses_api_models"]["scripted_model"]["port"]
    write_rows(Path("in.jsonl"), [ROLLOUT])
    servers = Servers(start, {**burner_config(behind(port)), "endpoint": endpoint})

    collector = servers.collect("+model_endpoint_readiness_timeout_seconds=2")

    assert collector.wait() == 0
    assert "no answer from" not in collector.stderr


def needing_a_dead_model(fake_run: FakeRun) -> None:
    """The agent waits for ever, and what it needs is not there."""

    async def answer(row: Row, attempt: int) -> Any:
        if row["n"]:
            await asyncio.sleep(600)
        return await right_away(row, attempt)

    model = {"type": "responses_api_models", "name": "policy_model"}
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": fake_run.port, "model_server": model}
    fake_run.answer = answer
    fake_run.config = {
        "alpha": {"responses_api_agents": {"fake_agent": block}},
        "policy_model": {"responses_api_models": {"fake_model": {**block, "port": free_port()}}},
    }


def test_the_command_and_the_python_entry_end_alike(
    fake_run: FakeRun, collect: Collect, head_config: None, caplog: pytest.LogCaptureFixture
) -> None:
    needing_a_dead_model(fake_run)
    write_rows(Path("in.jsonl"), rows_of(3, "alpha"))

    done = collect("+max_refused_s=1")

    assert done.exit_code == 1
    assert re.search("Stopped early: server 'policy_model' .* refuses connections since .*max_refused_s=1", done.stdout)
    assert keys_in(Path("out.jsonl")) == [(0, 0)]
    files = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "again.jsonl"}
    config = RolloutCollectionConfig.model_validate({**files, "max_refused_s": 1.0})
    results = asyncio.run(RolloutCollectionHelper().run_from_config(config))
    assert [result["n"] for result in results] == [0]
    assert re.search("Stopping: server 'policy_model' .* refuses connections since .*max_refused_s=1", caplog.text)
    assert Path("again_failures.jsonl").read_text() == ""
