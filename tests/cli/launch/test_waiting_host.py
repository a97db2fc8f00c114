"""The host that a console script starts before it has read its configuration: taken, or ended where it has no use."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nemo_gym.launch.waiting_host import WaitingHost
from tests.programs import still_running

WriteServer = Callable[..., Path]
SCRIPT = str(Path(sys.executable).with_name("ng_run"))
TELLS = """
import os, sys
from nemo_gym.base_resources_server import BaseVerifyResponse, SimpleResourcesServer
print("started with", sys.orig_argv[3:6], os.environ["MARK"], "NEMO_GYM_CONFIG_FILE" in os.environ, flush=True)

class Mine(SimpleResourcesServer):
    async def verify(self, body):
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)

if __name__ == "__main__":
    Mine.run_webserver()
"""


@pytest.fixture
def script(
    tmp_path: Path, config_for: Callable[..., dict[str, Any]]
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `ng_run` by its console script, with one server in the host or in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, isolation: str = "hosted") -> "subprocess.Popen[str]":
        blocks = {"mine": {"isolation": isolation}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_for("mine", blocks=blocks)))
        started.append(
            subprocess.Popen(
                [SCRIPT, "+config_paths=[config.yaml]", *arguments],
                cwd=tmp_path,
                env={**os.environ, "MARK": "inherited"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for each in started:
        if each.poll() is None:
            each.kill()
        each.communicate(timeout=20)


def ready(run: "subprocess.Popen[str]") -> list[list[str]]:
    """The command lines of what runs, once the servers do."""
    assert run.stdout is not None
    assert any("servers ready!" in line for line in run.stdout)
    return [child.cmdline() for child in still_running(psutil.Process(run.pid))]


def test_the_host_is_the_one_that_waited_and_has_the_environment_of_a_host(
    write_server: WriteServer, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    write_server("mine", TELLS)
    run = script()
    hosts = [line for line in ready(run) if "nemo_gym.servers.host" in line]
    assert [line[-2] for line in hosts] == ["--orders-fd"]
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 0
    assert "'nemo_gym.servers.host', '--orders-fd'" in errors
    assert "inherited True" in errors


def test_it_is_ended_where_nothing_is_hosted(
    write_server: WriteServer, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    write_server("mine", TELLS)
    run = script(isolation="process")
    assert not [line for line in ready(run) if "--orders-fd" in line]


def test_a_mistake_leaves_none_behind(script: Callable[..., "subprocess.Popen[str]"]) -> None:
    run = script("+no_such_option=1")
    group: set[int] = set()
    while not group:
        assert run.poll() is None, "it has started none"
        group = {child.pid for child in psutil.Process(run.pid).children(recursive=True)}
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 2
    assert "no_such_option" in errors
    assert not [pid for pid in group if psutil.pid_exists(pid)]


def test_one_that_has_died_is_not_used() -> None:
    waiting = WaitingHost()
    assert waiting.is_there
    waiting._process.kill()
    waiting._process.wait(20)
    assert not waiting.is_there


def test_a_launcher_that_is_killed_does_not_leave_it_waiting(tmp_path: Path) -> None:
    code = "from nemo_gym.launch import waiting_host as w; w.start(); print(w.take()._process.pid, flush=True); input()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert launcher.stdout is not None
    host = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate(timeout=20)
    gone, _ = psutil.wait_procs([host], timeout=20)
    assert gone or host.status() == psutil.STATUS_ZOMBIE
