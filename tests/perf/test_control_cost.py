"""What being asked all the time costs a collector: its processor time with as many clients as it takes, and without.

Each client asks for the status again as soon as it has an answer, and more of them want in.
"""

import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import psutil
import pytest

from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import address_in
from tests.collection.fakes import FakeRun, Row, right_away, rows_of, serve, write_rows
from tests.collection.processes import Collector, wait_until
from tests.perf.side_by_side.estimates import Target, hold

ROLLOUTS = int(os.environ.get("NG_CONTROL_ROLLOUTS", "3000"))
CLIENTS = 24
"""More than are attended to at once."""
MOST = 1.35
RUDE = """
import socket, sys, threading
def ask():
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(sys.argv[1])
                lines = connection.makefile("rb")
                while True:
                    connection.sendall(b'{"do": "status"}\\n')
                    if not lines.readline():
                        break
        except OSError:
            threading.Event().wait(0.01)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=ask, daemon=True).start()
threading.Event().wait()
"""


def cpu_of_collecting(fake_run: FakeRun, name: str, *, rude: bool) -> float:
    paths = RolloutPaths(Path(f"{name}.jsonl"))
    options = [f"+head_server.port={fake_run.port}", "+agent_name=alpha", "+input_jsonl_fpath=in.jsonl"]
    collector = Collector(*options, f"+output_jsonl_fpath={name}.jsonl", "+num_samples_in_parallel=16", name=name)
    clients = None
    used_s = 0.0
    try:
        wait_until(lambda: address_in(paths) is not None, collector)
        if rude:
            clients = subprocess.Popen([sys.executable, "-c", RUDE, str(address_in(paths)), str(CLIENTS)])
        process = psutil.Process(collector.pid)
        while collector.is_running:
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                break
            used_s = max(used_s, used.user + used.system)
            time.sleep(0.02)
        assert collector.wait() == 0, collector.stderr
    finally:
        if clients is not None:
            clients.kill()
            clients.wait()
        collector.stop()
    return used_s


def test_clients_that_ask_all_the_time_take_little_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="ng", dir="/tmp"))
    write_rows(Path("in.jsonl"), rows_of(ROLLOUTS))

    async def answer(row: Row, attempt: int) -> Row:
        return await right_away(row, attempt)

    with serve(FakeRun("alpha")) as fake_run:
        fake_run.answer, fake_run.keep_rows = answer, False
        names = map(str, count())

        def asked_over_alone() -> list[float]:
            alone_s = cpu_of_collecting(fake_run, f"alone{next(names)}", rude=False)
            asked_s = cpu_of_collecting(fake_run, f"asked{next(names)}", rude=True)
            print(f"\n{ROLLOUTS} rollouts: {alone_s:.2f} s of processor time alone, {asked_s:.2f} s asked all the time")
            return [asked_s / alone_s]

        hold(asked_over_alone, Target("processor time asked all the time over alone", most=MOST), rounds=1, more=2)
