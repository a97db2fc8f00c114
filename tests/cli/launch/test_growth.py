"""Hosts that are added while those that run are busy (`num_replicas: auto`): real processes under real load."""

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli import RunHelper
from nemo_gym.errors import ServerCrashedError
from nemo_gym.launch.server_processes import HostCount
from nemo_gym.rl.environment import NemoGym
from nemo_gym.runtime import usable_cores
from nemo_gym.server_status import StatusCommand
from tests.programs import Piped

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]
RunCommand = Callable[..., Piped]
WaitFor = Callable[[Callable[[], object]], None]

ENVIRONMENT = """
import os, time
from fastapi import Request
from pydantic import PrivateAttr
from nemo_gym.base_resources_server import (
    BaseRunRequest, BaseSeedSessionRequest, BaseSeedSessionResponse, BaseVerifyRequest, BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY

class Seed(BaseSeedSessionRequest):
    number: int = 0

class Verify(BaseVerifyRequest):
    number: int = 0

class Verdict(BaseVerifyResponse):
    number: int
    pid: int

class Slow(SimpleResourcesServer):
    replicable = True
    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        self._numbers[request.session[SESSION_ID_KEY]] = body.number
        return BaseSeedSessionResponse()

    async def verify(self, request: Request, body: Verify) -> Verdict:
        if not os.path.exists('hurry'):
            time.sleep(0.4)  # nothing else gets on meanwhile, as if it computed
        is_right = self._numbers.get(request.session[SESSION_ID_KEY]) == body.number
        return Verdict(**dict(body), reward=float(is_right), pid=os.getpid())

if __name__ == "__main__":
    Slow.run_webserver()
"""
UNDECLARED = ENVIRONMENT.replace("    replicable = True\n", "")
HOSTED = {"slow": {"isolation": "hosted"}}
MODEL = {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}}
AGENT = {
    "responses_api_agents": {
        "simple_agent": {
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": "slow"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
    }
}
ROLLOUT = {"responses_create_params": {"input": "hello"}}
ANSWER = {
    "id": "1", "created_at": 0, "model": "m", "object": "response", "output": [],
    "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
}  # fmt: skip


def instances(helper: RunHelper) -> list[dict[str, Any]]:
    head = helper._server_client.head_server_config
    with urllib.request.urlopen(f"http://{head.host}:{head.port}/server_instances", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)
        return found


def hosts(helper: RunHelper) -> dict[int, int]:
    """The processes of the hosts that have all their servers, by replica."""
    return {each["replica"]: each["pid"] for each in instances(helper) if each["isolation"] == "hosted"}


@contextmanager
def load_on(url: str) -> Iterator[None]:
    """Ask an environment for verdicts all the time, so that its loop is never free."""
    done = threading.Event()
    request = urllib.request.Request(
        f"{url}/verify", json.dumps({**ROLLOUT, "response": ANSWER}).encode(), {"Content-Type": "application/json"}
    )

    def ask() -> None:
        while not done.is_set():
            with suppress(OSError):
                urllib.request.urlopen(request, timeout=10).close()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(15)


@contextmanager
def polled(helper: RunHelper) -> Iterator[None]:
    """Watch the servers as a command does."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(0.1):
            helper.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(15)


def test_hosts_are_added_while_all_are_busy_and_rollouts_spread_over_them_one_killed_and_started_again(
    write_server: WriteServer,
    start_run: StartRun,
    tmp_path: Path,
    wait_for: WaitFor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_server("slow", ENVIRONMENT)
    helper = start_run(
        "slow", blocks=HOSTED, agent=AGENT, policy_model=MODEL, num_replicas="auto:3", restart_crashed_servers=True
    )
    assert len(hosts(helper)) == 1
    rows = [{**ROLLOUT, "number": number, "agent_ref": {"name": "agent"}} for number in range(200)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    port = helper._server_client.head_server_config.port
    with polled(helper):
        arguments = ["+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl", f"+head_server.port={port}"]
        collector = Piped("ng_collect_rollouts", *arguments, "+num_samples_in_parallel=12", folder=tmp_path)
        wait_for(lambda: len(hosts(helper)) == 3)
        os.kill(hosts(helper)[2], signal.SIGKILL)
        (tmp_path / "hurry").touch()
        _, errors = collector.communicate(timeout=60)
    assert collector.returncode == 0, errors
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(record["number"] for record in records) == list(range(200))
    assert all(record["reward"] == 1.0 for record in records)
    assert len({record["pid"] for record in records}) >= 2
    wait_for(lambda: helper.poll() or len(hosts(helper)) == 3)
    status = StatusCommand(helper._server_client.head_server_config)
    status.display_status(status.discover_servers())
    assert "9 servers found (9 healthy, 0 unhealthy) in 3 host processes, at most 3" in capsys.readouterr().out


class NumberTokenizer:
    """The scripted model numbers its tokens."""

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, sequence)) for sequence in sequences]


def test_a_trainer_has_hosts_added_and_sends_rollouts_to_them(
    write_server: WriteServer, config_for: Callable[..., dict[str, Any]]
) -> None:
    write_server("slow", ENVIRONMENT)
    model = {"responses_api_models": {"scripted_model": {"entrypoint": "app.py", "return_token_id_information": True}}}
    config = config_for("slow", blocks=HOSTED, agent=AGENT, policy_model=model, num_replicas="auto:2")
    rows = [{**ROLLOUT, "number": 7, "agent_ref": {"name": "agent"}, "_rowidx": index} for index in range(4)]
    pids: set[int] = set()

    async def train(gym: NemoGym) -> None:
        while len(pids) < 2:
            results, _ = await gym.run_rollouts(rows, NumberTokenizer(), "rollout")
            assert [result["full_result"]["reward"] for result in results] == [1.0] * 4
            pids.update(result["full_result"]["pid"] for result in results)

    async def both(gym: NemoGym) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(train(gym), train(gym))

    with NemoGym({"model_name": "m", "base_urls": ["http://127.0.0.1:1"], "initial_global_config_dict": config}) as gym:
        asyncio.run(both(gym))
        assert gym._run_helper is not None
        assert set(hosts(gym._run_helper).values()) == pids


@pytest.mark.parametrize("isolation", ["hosted", "process"])
def test_an_environment_that_declares_nothing_keeps_one_host(
    write_server: WriteServer,
    start_run: StartRun,
    wait_for: WaitFor,
    caplog: pytest.LogCaptureFixture,
    isolation: str,
) -> None:
    write_server("busy", ENVIRONMENT.replace("Slow", "Busy"))
    write_server("slow", UNDECLARED)
    blocks = {"slow": {"isolation": isolation}, "busy": {"isolation": "hosted"}}
    helper = start_run("slow", "busy", blocks=blocks, num_replicas="auto:3")
    busy = next(each["url"] for each in instances(helper) if each["process_name"] == "busy")
    with caplog.at_level("INFO"), load_on(busy):
        wait_for(lambda: helper.poll() or "the run stays with 1 host process: " in caplog.text)
    assert "'slow', which does not declare `replicable = True`" in caplog.text
    assert len(hosts(helper)) == 1


def test_an_environment_in_a_process_of_its_own_declares_too_and_a_host_that_dies_ends_the_run(
    write_server: WriteServer, start_run: StartRun, wait_for: WaitFor
) -> None:
    write_server("busy", ENVIRONMENT.replace("Slow", "Busy"))
    write_server("slow", ENVIRONMENT)
    helper = start_run("slow", "busy", blocks={"busy": {"isolation": "hosted"}}, num_replicas="auto:2")
    busy = next(each["url"] for each in instances(helper) if each["process_name"] == "busy")
    with load_on(busy):
        wait_for(lambda: helper.poll() or len(hosts(helper)) == 2)
    os.kill(hosts(helper)[1], signal.SIGKILL)
    with pytest.raises(ServerCrashedError, match=r"Process `host 1` finished unexpectedly \(killed by signal 9"):
        wait_for(lambda: helper.poll())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_hosts_that_were_added(
    write_server: WriteServer,
    ng_run: RunCommand,
    wait_for: WaitFor,
    processes_of: Callable[[int], list[int]],
    is_gone: Callable[[int], bool],
    number: signal.Signals,
    free_port: int,
) -> None:
    write_server("slow", ENVIRONMENT)
    run = ng_run("slow", blocks={"slow": {"isolation": "hosted", "port": free_port}}, num_replicas="auto:2")
    assert any("servers ready!" in line for line in run.stdout)
    before = processes_of(run.pid)
    with load_on(f"http://127.0.0.1:{free_port}"):
        wait_for(lambda: len(processes_of(run.pid)) >= len(before) + 2)  # one that forks, and the host
    pids = processes_of(run.pid)
    run.send_signal(number)
    run.communicate(timeout=20)
    wait_for(lambda: all(map(is_gone, pids)))


def test_a_library_with_threads_is_no_reason_to_do_without(
    write_server: WriteServer, start_run: StartRun, wait_for: WaitFor, caplog: pytest.LogCaptureFixture
) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    write_server("slow", thread + ENVIRONMENT)
    helper = start_run("slow", blocks=HOSTED, num_replicas="auto:2")
    with caplog.at_level("INFO"), load_on(instances(helper)[0]["url"]):
        wait_for(lambda: helper.poll() or len(hosts(helper)) == 2)
    assert (
        "hosts are started anew rather than forked: a library that its servers use has started threads" in caplog.text
    )


def test_the_default_depends_on_the_cores_and_a_bound_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, most in ((1, 1), (2, 1), (3, 3), (64, 64)):
        monkeypatch.setattr("nemo_gym.launch.server_processes.usable_cores", lambda cores=cores: cores)
        assert HostCount.of("auto") == (1, most)
        assert HostCount.of("auto:4") == (1, 4)
        assert HostCount.of(5) == (5, 5)
    assert not HostCount.of("auto:1").may_grow


def test_cores_are_those_that_the_process_and_its_container_may_use(tmp_path: Path) -> None:
    here = usable_cores(tmp_path)
    assert 1 <= here <= (os.cpu_count() or 1)
    group = tmp_path / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    for text, expected in (("max 100000", here), ("100000 100000", 1), ("50000 100000", 1), ("nonsense", here)):
        (group / "cpu.max").write_text(text)
        assert usable_cores(tmp_path) == expected
    (group / "cpu.max").unlink()
    (tmp_path / "sys/fs/cgroup/cpu").mkdir()
    for quota, expected in (("-1", here), ("100000", 1)):
        (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text(quota)
        (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000")
        assert usable_cores(tmp_path) == expected
