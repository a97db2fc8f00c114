import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from nemo_gym.launch.process import ChildProcess, CommandLine
from nemo_gym.launch.warden import Warden

SLEEPER = "import time; time.sleep(60)"
GENEROUS_S = 20.0


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


LAUNCHER = """
import sys, time
from pathlib import Path
from nemo_gym.launch.process import ChildProcess, CommandLine
from nemo_gym.launch.warden import Warden
warden = Warden()
warden.remove(Path(sys.argv[1]))
polite = ChildProcess(CommandLine([sys.executable, "-c", "import time; time.sleep(60)"]), print, warden)
stubborn = ChildProcess(CommandLine([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"]),
    lambda line: print(polite.pid, stubborn.pid, warden.pid, flush=True), warden)
time.sleep(60)
"""


def test_a_launcher_that_is_killed_leaves_neither_processes_nor_its_file(tmp_path: Path) -> None:
    secret = tmp_path / "config.yaml"
    secret.write_text("api_key: x")
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(secret)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert not any(map(is_gone, pids))
        launcher.kill()
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid))  # type: ignore[misc]
    assert not secret.exists()


def test_closing_ends_the_warden_and_spares_what_it_was_told_to_forget() -> None:
    warden = Warden()
    child = ChildProcess(CommandLine([sys.executable, "-c", SLEEPER]), lambda line: None, warden)
    warden.forget(child.pid)
    warden.close()
    assert is_gone(warden.pid)
    assert child.exit_code() is None
    child.kill()


def test_ctrl_c_in_the_terminal_does_not_reach_the_warden() -> None:
    warden = Warden()
    assert os.getsid(warden.pid) == warden.pid
    warden.close()


def test_a_run_goes_on_without_its_warden() -> None:
    warden = Warden()
    os.kill(warden.pid, 9)
    child = ChildProcess(CommandLine([sys.executable, "-c", "print('fine')"]), lambda line: None, warden)
    assert child.wait(GENEROUS_S) == 0
    warden.close()
