import contextlib
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli import RunHelper
from nemo_gym.errors import ConfigError, ServerBlockError
from nemo_gym.launch import fleet
from nemo_gym.launch.fleet import RestartBudget

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]
WaitFor = Callable[[Callable[[], object]], None]

EXAMPLE: dict[str, Any] = {
    "resources_servers": {"example_single_tool_call": {"entrypoint": "app.py", "domain": "other"}}
}


def instance(helper: RunHelper, name: str) -> dict[str, Any]:
    head = helper._server_client.head_server_config
    with urllib.request.urlopen(f"http://{head.host}:{head.port}/server_instances", timeout=10) as answer:
        found: dict[str, Any] = next((one for one in json.load(answer) if one["process_name"] == name), {})
        return found


def failure_of(helper: RunHelper, wait_for: WaitFor) -> str:
    """What `poll` raises, once it does."""
    failures: list[str] = []

    def has_failed() -> bool:
        try:
            helper.poll()
        except RuntimeError as error:
            failures.append(str(error))
        return bool(failures)

    wait_for(has_failed)
    return failures[0]


def crash(url: str) -> None:
    with contextlib.suppress(OSError):  # no answer is the answer: reset, refused or, on a slow machine, timed out
        urllib.request.urlopen(f"{url}/crash", timeout=5)


def test_a_taken_port_is_reported_at_once_with_the_process_that_holds_it(
    write_server: WriteServer, start_run: StartRun, capfd: pytest.CaptureFixture[str]
) -> None:
    write_server("one")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        by_us = rf"in use by process {os.getpid()}"
        with pytest.raises(ConfigError, match=rf"port {port} for server 'one' .*{by_us}.*\+\+one\.resources_servers"):
            start_run("one", blocks={"one": {"port": port}})
        with pytest.raises(ConfigError, match=rf"port {port} for the head server .*{by_us}.*\+head_server\.port"):
            start_run("one", head_server={"port": port})
    assert "listening" not in capfd.readouterr().err


def test_a_server_that_crashes_at_import_is_named_with_its_last_lines(
    write_server: WriteServer, start_run: StartRun, tmp_path: Path
) -> None:
    write_server("fine")
    folder = write_server("broken", "print('so far so good')\nraise ValueError('no luck today')")
    with pytest.raises(RuntimeError) as caught:
        start_run("fine", "broken", nemo_gym_log_dir=str(tmp_path / "logs"))
    message = str(caught.value)
    assert "Process `broken` finished unexpectedly (exit code 1) before it was ready" in message
    assert f"resources_servers/broken in {folder}" in message
    assert "| so far so good" in message
    assert "| ValueError: no luck today" in message
    assert f"log: {tmp_path}/logs/broken.log" in message


def test_a_process_that_ends_without_an_error_has_ended_all_the_same(
    write_server: WriteServer, start_run: StartRun
) -> None:
    write_server("brief", "")
    with pytest.raises(
        RuntimeError, match=r"`brief` finished unexpectedly \(exit code 0\)(?s:.*)It has printed nothing"
    ):
        start_run("brief")


@pytest.mark.parametrize("isolation", ["process", "hosted"])
def test_a_missing_import_comes_with_the_line_to_add(
    write_server: WriteServer, start_run: StartRun, isolation: str
) -> None:
    folder = write_server("mine", "import surely_not_installed.part")
    with pytest.raises(RuntimeError) as caught:
        start_run("mine", blocks={"mine": {"isolation": isolation}})
    assert "Process `mine` finished unexpectedly" in str(caught.value)
    assert f"add the line `surely-not-installed` in {folder}/requirements.txt" in str(caught.value)


def test_a_hosted_server_that_cannot_be_built_is_named(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str]
) -> None:
    write_server("mine", apps["gym"] + "\nraise ValueError('no luck today')")
    with pytest.raises(RuntimeError, match=r"Server `mine` cannot be started: ValueError: no luck today"):
        start_run("mine", tool=EXAMPLE, blocks={"mine": {"isolation": "hosted"}})


@pytest.mark.parametrize(
    "app",
    [
        "import time\nprint('thinking', flush=True)\ntime.sleep(60)",
        "import os, socket, time, yaml\nprint('thinking', flush=True)\n"
        "config = yaml.safe_load(open(os.environ['NEMO_GYM_CONFIG_FILE']))\n"
        "silent = socket.create_server(('127.0.0.1', config['mute']['resources_servers']['mute']['port']))\n"
        "time.sleep(60)",
    ],
    ids=["does not listen", "does not answer"],
)
def test_a_server_that_never_becomes_ready_is_named_when_its_time_is_up(
    write_server: WriteServer, start_run: StartRun, app: str
) -> None:
    write_server("mute", app)
    write_server("fine")
    with pytest.raises(RuntimeError) as caught:
        start_run("mute", "fine", server_start_timeout_s=2.5)
    message = str(caught.value)
    assert "`mute` did not become ready within 2.5 s; nothing answers at http://127.0.0.1:" in message
    assert "`fine`" not in message
    assert "| thinking" in message
    assert "+server_start_timeout_s" in message


def test_requirements_that_cannot_be_installed_stop_the_run_before_it_starts(
    write_server: WriteServer, start_run: StartRun, capfd: pytest.CaptureFixture[str]
) -> None:
    write_server("fine")
    folder = write_server("wrong", requirements="--no-index\nsurely-not-there==9\n")
    write_server("also_wrong", requirements="--no-index\nnot-there-either\n")
    with pytest.raises(ConfigError) as caught:
        start_run("fine", "wrong", "also_wrong")
    message = str(caught.value)
    assert f"The requirements of 'wrong' cannot be installed; correct {folder}/requirements.txt" in message or (
        "The requirements of 'also_wrong'" in message
    )
    assert "surely-not-there" in message or "not-there-either" in message
    assert "with +compat_packages=false" in message
    assert "listening" not in capfd.readouterr().err


def test_a_crash_of_a_running_server_is_noticed_with_its_last_lines(
    write_server: WriteServer, start_run: StartRun, wait_for: WaitFor
) -> None:
    write_server("one")
    write_server("two")
    helper = start_run("one", "two")
    crash(instance(helper, "one")["url"])
    message = failure_of(helper, wait_for)
    assert "Process `one` finished unexpectedly (exit code 3)." in message
    assert "| about to crash" in message


def test_a_killed_host_names_every_server_that_was_in_it(start_run: StartRun, wait_for: WaitFor) -> None:
    helper = start_run(first_tool=EXAMPLE, second_tool=EXAMPLE)
    os.kill(instance(helper, "first_tool")["pid"], signal.SIGKILL)
    message = failure_of(helper, wait_for)
    assert "Process `host` finished unexpectedly (killed by signal 9 (SIGKILL" in message
    assert "It served `first_tool`, `second_tool`." in message


def test_run_forever_ends_with_the_crash_and_stops_the_others(
    write_server: WriteServer, start_run: StartRun, is_gone: Callable[[int], bool]
) -> None:
    write_server("one")
    write_server("two")
    helper = start_run("one", "two")
    other = instance(helper, "two")["pid"]
    os.kill(instance(helper, "one")["pid"], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Process `one` finished unexpectedly"):
        helper.run_forever()
    assert is_gone(other)


def test_the_end_of_the_head_server_is_noticed(
    write_server: WriteServer, start_run: StartRun, wait_for: WaitFor
) -> None:
    write_server("one")
    helper = start_run("one")
    assert helper._head_server is not None
    helper._head_server.should_exit = True
    assert "Head server finished unexpectedly" in failure_of(helper, wait_for)


@pytest.mark.parametrize("hosted", [False, True], ids=["alone", "hosted"])
def test_a_crashed_server_is_started_again_when_asked_for(
    write_server: WriteServer, start_run: StartRun, wait_for: WaitFor, hosted: bool
) -> None:
    write_server("alone")
    name = "tool" if hosted else "alone"
    helper = start_run("alone", tool=EXAMPLE, restart_crashed_servers=True)
    before = instance(helper, name)
    os.kill(before["pid"], signal.SIGKILL)

    def is_back() -> bool:
        helper.poll()
        return instance(helper, name).get("pid") not in (None, before["pid"])

    wait_for(is_back)
    after = instance(helper, name)
    assert after["port"] == before["port"]
    assert after["start_time"] > before["start_time"]
    with urllib.request.urlopen(after["url"], timeout=10) as answer:
        assert answer.status == 200


def test_a_server_that_keeps_crashing_is_given_up(
    write_server: WriteServer,
    start_run: StartRun,
    wait_for: WaitFor,
    apps: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "RestartBudget", partial(RestartBudget, max_restarts=2, first_pause_s=0.01))
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n"
    second_time = f"import os\nif os.path.getsize({str(tmp_path / 'starts')!r}) > 1: raise SystemExit(5)\n"
    write_server("one", count + second_time + apps["plain"])
    helper = start_run("one", restart_crashed_servers=True)
    os.kill(instance(helper, "one")["pid"], signal.SIGKILL)
    message = failure_of(helper, wait_for)
    assert "Process `one` finished unexpectedly (exit code 5)" in message
    assert "started again 2 times within 10 minutes" in message
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_crash_during_start_is_not_retried(write_server: WriteServer, start_run: StartRun) -> None:
    write_server("one", "raise SystemExit(5)")
    with pytest.raises(RuntimeError, match="exit code 5"):
        start_run("one", restart_crashed_servers=True)


def test_a_failed_dry_run_names_every_server_that_failed(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str]
) -> None:
    write_server("fine")
    write_server("broken", "raise ValueError('no luck')")
    write_server("hosted_broken", apps["gym"] + "\nraise ValueError('no luck here')")
    with pytest.raises(RuntimeError) as caught:
        start_run("fine", "broken", "hosted_broken", blocks={"hosted_broken": {"isolation": "hosted"}}, dry_run=True)
    message = str(caught.value)
    assert "Process `broken` finished unexpectedly (exit code 1)" in message
    assert "Server `hosted_broken` cannot be started: ValueError: no luck here" in message
    assert "`fine`" not in message


def test_a_dry_run_that_does_not_end_is_ended(write_server: WriteServer, start_run: StartRun) -> None:
    write_server("endless", "import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="`endless` did not finish the dry run within 1 s"):
        start_run("endless", dry_run=True, server_start_timeout_s=1)


def test_restarts_are_bounded_within_a_time_and_pauses_grow() -> None:
    budget = RestartBudget(max_restarts=3, within_s=100.0, first_pause_s=1.0, max_pause_s=3.0)
    assert [budget.next_pause(at) for at in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, None]
    assert budget.next_pause(101.5) == 2.0


@pytest.mark.parametrize("setting", [{"num_replicas": 0}, {"server_start_timeout_s": "soon"}])
def test_settings_that_make_no_sense_are_refused(
    write_server: WriteServer, start_run: StartRun, setting: dict[str, Any]
) -> None:
    write_server("one")
    with pytest.raises(ConfigError, match=next(iter(setting))):
        start_run("one", **setting)


@pytest.mark.parametrize(("isolation", "dry_run"), [("process", False), ("hosted", False), ("hosted", True)])
def test_a_server_that_refuses_its_block_is_the_users_to_fix_and_takes_one_line(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str], isolation: str, dry_run: bool
) -> None:
    app = (
        apps["gym"]
        .replace("    async def", "    config: MineConfig\n    async def")
        .replace("class Mine", "class MineConfig(BaseResourcesServerConfig):\n    size: int\n\nclass Mine", 1)
    )
    app = app.replace("import BaseVerifyResponse", "import BaseResourcesServerConfig, BaseVerifyResponse")
    write_server("mine", app)
    with pytest.raises(ServerBlockError) as caught:
        start_run("mine", blocks={"mine": {"isolation": isolation, "size": "big"}}, dry_run=dry_run)
    assert isinstance(caught.value, ConfigError)  # exit code 2
    assert isinstance(caught.value, RuntimeError)  # what programs that embed the helper catch
    line = str(caught.value).removeprefix("The dry run failed.\n\n")
    assert "\n" not in line
    assert line.startswith("Server `mine` cannot be started: the config of server 'mine' does not fit MineConfig: size")
    assert "'big'" in line
    assert "ng_validate" in line
