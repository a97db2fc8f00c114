"""What looking at runs costs: the first index against parsing the file once, pages of a list, and watching a run.

Processor time counts, so that neighbours on the machine do not. Sizes can be made smaller for a quick look
(`NG_VIEW_ROLLOUTS=10000`); the limits are for the whole.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.view.answers import page_of
from nemo_gym.view.table import RunTable
from tests.perf.side_by_side.estimates import Target, hold
from tests.ports import free_port

LARGE = int(os.environ.get("NG_VIEW_ROLLOUTS", "100000"))
MANY = LARGE * 10
WATCHED = 10_000
BUILT_IN = (
    ("reward < 1 and output_tokens > 2000", "-output_tokens"),
    ("agent == 'agent_1' and not incomplete", "reward,-total_tokens"),
    ("'tool_1' in tools or steps > 1", "-steps"),
    ("outcome == 'scored' and 100 < task < 20000", "task"),
    (None, None),
)
OTHERS = (
    ("level == 'hard' and score > 0.5", "-score"),
    ("meta.n > 3 and solved", "meta.source"),
    ("uuid > 'id-8'", "uuid"),
)
INDEX = """
import sys, time
from pathlib import Path
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.view.table import RunTable
began = time.process_time()
table = RunTable(RolloutPaths(Path(sys.argv[1])), Path(sys.argv[2]))
assert table.refresh()
table.close()
took = time.process_time() - began
most = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, int(most) / 1024, len(table))
"""
PARSE = """
import sys, time, orjson
began = time.process_time()
with open(sys.argv[1], "rb") as file:
    for line in file:
        orjson.loads(line)
print(time.process_time() - began)
"""


def write_rollouts(path: Path, count: int, size: int) -> None:
    chance = random.Random(1)
    words = [f"word{number}" for number in range(2000)]
    text = " ".join(chance.choices(words, k=20_000))

    def piece(length: int) -> str:
        start = chance.randrange(len(text) - length)
        return text[start : start + length]

    with path.open("wb") as file:
        for number in range(count):
            items: list[dict[str, Any]] = []
            for turn in range(4 if size > 2000 else 0):
                items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": piece(500)}]})
                call = json.dumps({"q": piece(100)})
                items.append(
                    {"type": "function_call", "name": f"tool_{turn % 3}", "call_id": f"c{turn}", "arguments": call}
                )
                items.append({"type": "function_call_output", "call_id": f"c{turn}", "output": piece(900)})
            rest = piece(max(50, size - 700 - 1700 * (len(items) // 3)))
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": rest}]})
            record = {
                "_ng_task_index": number // 4,
                "_ng_rollout_index": number % 4,
                "agent_ref": {"type": "responses_api_agents", "name": f"agent_{number % 3}"},
                "responses_create_params": {"input": [{"role": "user", "content": f"question {number // 4}"}]},
                "response": {
                    "model": "model",
                    "status": "completed",
                    "output": items,
                    "usage": {
                        "input_tokens": number % 1000,
                        "output_tokens": number * 7919 % 5000,
                        "total_tokens": number % 6000,
                    },
                },
                "reward": float(chance.random() < 0.5),
                "level": ("easy", "medium", "hard")[number % 3],
                "score": chance.random(),
                "solved": number % 2 == 0,
                "uuid": f"id-{number * 2654435761 % 2**32:08x}",
                "meta": {"source": f"source {number % 7}", "n": number % 11},
            }
            file.write(orjson.dumps(record) + b"\n")


def measured(program: str, *arguments: object) -> list[float]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("large")
    write_rollouts(folder / "rollouts.jsonl", LARGE, 10_000)
    yield folder / "rollouts.jsonl", folder / "cache"
    (folder / "rollouts.jsonl").unlink()


def test_the_first_index_costs_little_more_than_parsing(large: tuple[Path, Path]) -> None:
    path, cache = large
    size = path.stat().st_size / 1e6

    def over_parsing() -> list[float]:
        shutil.rmtree(cache, ignore_errors=True)
        (parsing,) = measured(PARSE, path)
        indexing, memory, rows = measured(INDEX, path, cache)
        print(f"\n{LARGE:,} rollouts, {size:.0f} MB: parsed in {parsing:.2f} s, indexed in {indexing:.2f} s;")
        print(f"{memory:.0f} MB of memory, {sum(file.stat().st_size for file in cache.iterdir()) / 1e6:.1f} MB on disk")
        assert rows == LARGE
        return [indexing / parsing, memory]

    hold(over_parsing, Target("indexing over parsing", most=2.5), Target("MB", most=200), rounds=1, more=2)


def test_a_run_that_was_seen_before_opens_at_once(large: tuple[Path, Path]) -> None:
    path, cache = large
    measured(INDEX, path, cache)

    def opened() -> list[float]:
        began = time.process_time()
        table = RunTable(RolloutPaths(path), cache)
        table.refresh()
        page = page_of(table, None, None, 50, 0)
        took = time.process_time() - began
        table.close()
        assert len(page["rows"]) == 50
        return [took]

    hold(opened, Target("seconds until it is open again with its first page", most=0.5))


def seconds_of_pages(table: RunTable, queries: tuple[tuple[str | None, str | None], ...]) -> dict[str, float]:
    """What a page costs, the second time it is asked for and later."""
    costs = {}
    for where, sort in queries:
        page_of(table, where, sort, 50, 0)
        began = time.process_time()
        for offset in (0, 50, 100):
            page_of(table, where, sort, 50, offset)
        costs[f"{where} by {sort}"] = (time.process_time() - began) / 3
    for query, cost in costs.items():
        print(f"{cost * 1000:7.1f} ms  {query}")
    return costs


def hold_pages(table: RunTable, most_built_in_s: float) -> None:
    hold(
        lambda: [max(seconds_of_pages(table, queries).values()) for queries in (BUILT_IN, OTHERS)],
        Target("seconds for a page by what is built in", most=most_built_in_s),
        Target("seconds for a page by other fields", most=1),
        rounds=1,
        more=2,
    )


def test_a_page_of_many_comes_at_once(large: tuple[Path, Path]) -> None:
    path, cache = large
    table = RunTable(RolloutPaths(path), cache)
    table.refresh()
    print(f"\n{LARGE:,} rollouts of 10 KB")
    hold_pages(table, 0.05)


def test_a_page_of_a_million_comes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, MANY, 1_000)
    measured(INDEX, path, tmp_path / "cache")
    table = RunTable(RolloutPaths(path), tmp_path / "cache")
    table.refresh()
    print(f"\n{MANY:,} rollouts of 1 KB")
    try:
        hold_pages(table, 0.15)
    finally:
        path.unlink()


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


CONFIGS = (
    "+config_paths=[resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,"
    "responses_api_models/scripted_model/configs/scripted_model.yaml]"
)
DATA = PARENT_DIR / "resources_servers/example_single_tool_call/data/example.jsonl"
REPEATS = 4
AGENT = "example_single_tool_call_simple_agent"


def write_tasks(path: Path) -> None:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    tasks = ({**rows[number % len(rows)], "id": number} for number in range(WATCHED // REPEATS))
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


class Watched:
    """A viewer with somebody who listens."""

    def __init__(self, folder: Path) -> None:
        command = [script("ng_view"), f"+path={folder}", "+open=false"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        found = re.search(r"(http://[^/]+/)\?token=(\S+)", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1].rstrip("/").rpartition(":")[2])
        self._request = urllib.request.Request(f"{found[1]}api/events", headers={"Authorization": f"Bearer {found[2]}"})
        self.done = 0
        self.is_listening = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with urllib.request.urlopen(self._request) as stream:
            for line in stream:
                self.is_listening = True
                if line.startswith(b"data: "):
                    self.done = max(self.done, json.loads(line[6:])["done"])

    def seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def strangers(self) -> list[Any]:
        """Connections that nobody opened to it."""
        connections = psutil.Process(self.process.pid).net_connections("inet")
        return [connection for connection in connections if connection.laddr.port != self.port]


def test_watching_costs_next_to_nothing_and_asks_no_server(tmp_path: Path) -> None:
    def share() -> list[float]:
        return [share_of_watching(Path(tempfile.mkdtemp(dir=tmp_path)))]

    hold(share, Target("watching over collecting", most=0.05), rounds=1, more=2)


def share_of_watching(tmp_path: Path) -> float:
    """Processor time of the viewer over that of the collector."""
    head = f"+head_server.port={free_port()}"
    output = tmp_path / "results" / "rollouts.jsonl"
    output.parent.mkdir()
    write_tasks(tmp_path / "tasks.jsonl")
    servers = subprocess.Popen([script("ng_run"), CONFIGS, head], stdout=subprocess.PIPE, text=True)
    watched = Watched(output.parent)
    try:
        assert servers.stdout is not None
        next(line for line in servers.stdout if "servers ready!" in line)
        deadline = time.monotonic() + 60
        while not watched.is_listening and time.monotonic() < deadline:
            time.sleep(0.1)
        before = watched.seconds()
        collect = [
            f"+agent_name={AGENT}",
            f"+input_jsonl_fpath={tmp_path / 'tasks.jsonl'}",
            f"+output_jsonl_fpath={output}",
            f"+num_repeats={REPEATS}",
        ]
        collector = subprocess.Popen([script("ng_collect_rollouts"), head, *collect], stdout=subprocess.DEVNULL)
        strangers: list[Any] = []
        while (ended := os.wait4(collector.pid, os.WNOHANG))[0] == 0:
            strangers += watched.strangers()
            time.sleep(0.5)
        collector.returncode = os.waitstatus_to_exitcode(ended[1])
        deadline = time.monotonic() + 60
        while watched.done < WATCHED and time.monotonic() < deadline:
            time.sleep(0.5)
        viewer, collecting = watched.seconds() - before, ended[2].ru_utime + ended[2].ru_stime
    finally:
        for process in (watched.process, servers):
            process.send_signal(signal.SIGINT)
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()
    print(f"\nwatching {viewer:.2f} s, collecting {collecting:.2f} s of processor time")
    assert collector.returncode == 0
    assert watched.done == WATCHED
    assert not strangers
    return viewer / collecting
