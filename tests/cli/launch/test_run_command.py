import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import Piped

WriteServer = Callable[..., Path]
RunCommand = Callable[..., Piped]
Find = Callable[[int], list[int]]
IsGone = Callable[[int], bool]
WaitFor = Callable[[Callable[[], object]], None]

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
NEVER_READY = "import time\nprint('not yet', flush=True)\ntime.sleep(60)"


def wait_until_ready(run: Piped) -> str:
    printed = ""
    for line in run.stdout:
        printed += line
        if "servers ready!" in line:
            return printed
    pytest.fail(f"not started: {printed}{run.stderr.read()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(
    write_server: WriteServer,
    ng_run: RunCommand,
    processes_of: Find,
    is_gone: IsGone,
    wait_for: WaitFor,
    number: signal.Signals,
) -> None:
    write_server("one")
    write_server("two")
    run = ng_run("one", "two")
    printed = wait_until_ready(run)
    assert printed.splitlines()[-1] == "All 2 / 2 servers ready!"
    pids = processes_of(run.pid)
    assert len(pids) >= 3  # two servers and the warden
    run.send_signal(number)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 0, errors
    assert "(one) listening" in errors
    assert "Traceback" not in errors
    wait_for(lambda: all(map(is_gone, pids)))  # the warden hears of it a moment later


def test_a_second_ctrl_c_does_not_wait_for_a_stubborn_server(
    write_server: WriteServer,
    ng_run: RunCommand,
    processes_of: Find,
    is_gone: IsGone,
    wait_for: WaitFor,
    apps: dict[str, str],
) -> None:
    write_server("one", STUBBORN + apps["plain"])
    run = ng_run("one", server_stop_timeout_s=600)
    wait_until_ready(run)
    pids = processes_of(run.pid)
    run.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(1.5)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=20)
    assert run.returncode == 130
    wait_for(lambda: all(map(is_gone, pids)))  # the warden hears of it a moment later


def test_a_stubborn_server_is_killed_when_its_time_is_up(
    write_server: WriteServer, ng_run: RunCommand, apps: dict[str, str]
) -> None:
    write_server("one", STUBBORN + apps["plain"])
    run = ng_run("one", server_stop_timeout_s=0.5)
    wait_until_ready(run)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 0
    assert "process 'one' did not stop within 0.5 s and was killed" in errors


def test_ctrl_c_during_start_stops_what_was_started(
    write_server: WriteServer, ng_run: RunCommand, processes_of: Find, is_gone: IsGone, wait_for: WaitFor
) -> None:
    write_server("mute", NEVER_READY)
    run = ng_run("mute")
    while "(mute) not yet" not in run.stderr.readline():
        assert run.poll() is None
    pids = processes_of(run.pid)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in errors
    wait_for(lambda: all(map(is_gone, pids)))  # the warden hears of it a moment later


def test_ctrl_c_during_installation_stops_the_installer(
    write_server: WriteServer, ng_run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: WaitFor
) -> None:
    uv = tmp_path / "programs" / "uv"
    uv.parent.mkdir()
    uv.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}{os.pathsep}{os.environ['PATH']}")
    write_server("one", requirements="surely-not-installed\n")
    run = ng_run("one")
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=20)
    assert run.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_killing_the_launcher_leaves_nothing_running(
    write_server: WriteServer,
    ng_run: RunCommand,
    processes_of: Find,
    is_gone: IsGone,
    wait_for: WaitFor,
    apps: dict[str, str],
) -> None:
    write_server("one", STUBBORN + apps["plain"])
    write_server("two")
    run = ng_run("one", "two")
    wait_until_ready(run)
    pids = processes_of(run.pid)
    run.kill()
    run.communicate(timeout=20)
    wait_for(lambda: all(map(is_gone, pids)))


def test_the_config_file_of_a_run_whose_launcher_and_warden_were_killed_goes_at_the_next_start(
    write_server: WriteServer,
    ng_run: RunCommand,
    processes_of: Find,
    is_gone: IsGone,
    wait_for: WaitFor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write_server("one")
    first = ng_run("one")
    wait_until_ready(first)
    pids = processes_of(first.pid)
    for pid in (first.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=20)
    wait_for(lambda: all(map(is_gone, pids)))
    [left] = tmp_path.glob("nemo_gym_config_*.yaml")

    second = ng_run("one")
    wait_until_ready(second)
    [used] = tmp_path.glob("nemo_gym_config_*.yaml")
    assert used != left
    ng_run("one", arguments=("+dry_run=true",)).communicate(timeout=60)
    assert list(tmp_path.glob("nemo_gym_config_*.yaml")) == [used]
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=30)
    assert not used.exists()


def test_a_crash_ends_the_run_with_a_message_and_exit_code_1(
    write_server: WriteServer, ng_run: RunCommand, processes_of: Find, is_gone: IsGone, wait_for: WaitFor
) -> None:
    write_server("one")
    write_server("two")
    run = ng_run("one", "two")
    row = next(line for line in wait_until_ready(run).splitlines() if line.startswith("two "))
    pids = processes_of(run.pid)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"{row.split()[2]}/crash", timeout=10)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "Error: Process `two` finished unexpectedly (exit code 3)." in errors
    assert "Traceback" not in errors
    wait_for(lambda: all(map(is_gone, pids)))  # the warden hears of it a moment later


def test_what_the_user_can_correct_ends_with_exit_code_2(write_server: WriteServer, ng_run: RunCommand) -> None:
    write_server("one")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        run = ng_run("one", blocks={"one": {"port": holder.getsockname()[1]}})
        _, errors = run.communicate(timeout=30)
    assert run.returncode == 2
    assert f"in use by process {os.getpid()}" in errors
    assert "Traceback" not in errors


def test_a_dry_run_exits_with_0_and_a_failed_one_with_1(write_server: WriteServer, ng_run: RunCommand) -> None:
    write_server("one")
    run = ng_run("one", arguments=("+dry_run=true",))
    printed, errors = run.communicate(timeout=30)
    assert run.returncode == 0, errors
    assert "Dry run passed: 1 / 1" in printed
    write_server("one", "raise SystemExit(3)")
    run = ng_run("one", arguments=("+dry_run=true",))
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "`one`" in errors


def test_without_servers_nothing_is_started(ng_run: RunCommand) -> None:
    run = ng_run()
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 2
    assert "no server" in errors
