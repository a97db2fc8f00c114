"""As many rollouts at once as open files allow, and a million rows that wait."""

import contextlib
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.fleet import Fleet
from tests.chaos.ledger import read_lines
from tests.chaos.processes import Command, program
from tests.collection.fakes import FakeRun, serve

MOST_AT_ONCE = 16_384
PER_REPLICA = 8_192
KEPT_BACK = 512
LATENCY_S = 2.0
MAX_MEMORY_MB = 2_048
MAX_ROW_US = 30.0
BOUND_S = 300.0


@dataclass
class LoadRow:
    """One measurement."""

    what: str
    measured: str
    bound: str
    is_good: bool

    def line(self) -> str:
        """For the terminal."""
        return f"{'ok  ' if self.is_good else 'FAIL'} {self.what:<74} {self.measured} (bound: {self.bound})"

    def cells(self) -> list[str]:
        """For the page."""
        return [self.what, self.measured, self.bound]


def check_load(folder: Path, add: Callable[[Any], None]) -> None:
    """Both, one after the other."""
    _many_at_once(folder / "load", add)
    _million_rows(folder / "million", add)


def _many_at_once(folder: Path, add: Callable[[Any], None]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    rollouts = MOST_AT_ONCE if hard == resource.RLIM_INFINITY else min(MOST_AT_ONCE, hard - KEPT_BACK)
    replicas = -(-rollouts // PER_REPLICA)
    config: dict[str, Any] = {
        "config_paths": ["resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"],
        "policy_model": {
            "responses_api_models": {
                "scripted_model": {
                    "entrypoint": "app.py",
                    "script": {"latency_s": LATENCY_S, "rules": [{"reply": {"text": "done"}}]},
                }
            }
        },
    }
    fleet = Fleet(folder, config, f"+num_replicas={replicas}")
    try:
        _write_rows(folder / "in.jsonl", rollouts)
        options = [
            f"+head_server.port={fleet.head_port}",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
        ]
        options += ["+agent_name=example_single_tool_call_simple_agent", f"+num_samples_in_parallel={rollouts}"]
        started_s = time.monotonic()
        collector = Command([program("ng_collect_rollouts"), *options], folder, "collect")
        gauge = _Gauge([collector.pid, fleet.launcher.pid])
        collector.look = gauge.look  # type: ignore[method-assign]
        code = collector.wait(BOUND_S)
        took_s = time.monotonic() - started_s
    finally:
        fleet.stop()
    found, failures = len(read_lines(folder / "out.jsonl")), len(read_lines(folder / "out_failures.jsonl"))
    what = f"{rollouts:,} rollouts in flight, {LATENCY_S:g} s latency, {replicas} replicas, open files ≤ {hard:,}"
    is_good = code == 0 and found == rollouts and not failures
    add(LoadRow(what, f"{found:,} finished in {took_s:.0f} s, {failures} failed attempts", "all, none failed", is_good))
    add(LoadRow("… most connections of the collector at a time", f"{gauge.sockets:,}", "", True))
    memory = f"{gauge.peak_mb:,.0f} MB"
    add(LoadRow("… memory of all processes (PSS)", memory, f"{MAX_MEMORY_MB:,} MB", gauge.peak_mb < MAX_MEMORY_MB))


class _Gauge:
    """The memory of process trees, looked at once a second."""

    def __init__(self, roots: list[int]) -> None:
        self._roots = roots
        self._next_s = 0.0
        self.peak_mb = 0.0
        self.sockets = 0

    def look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        total = 0
        for root in self._roots:
            try:
                processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
                total += sum(process.memory_full_info().pss for process in processes)
            except psutil.Error:
                continue
        self.peak_mb = max(self.peak_mb, total / 2**20)
        with contextlib.suppress(psutil.Error):
            self.sockets = max(self.sockets, psutil.Process(self._roots[0]).num_fds())
        self._next_s = time.monotonic() + 1.0


def _write_rows(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for n in range(number):
            file.write(f'{{"responses_create_params":{{"input":"task {n}, with some words to it"}},"n":{n}}}\n')


def _million_rows(folder: Path, add: Callable[[Any], None]) -> None:
    cost_us: dict[int, float] = {}
    with serve(FakeRun("alpha")) as run:
        for rows in (100_000, 1_000_000):
            cost_us[rows], printed = _cost_before_first_request(run, folder / str(rows), rows)
    few, many = cost_us.values()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    add(
        LoadRow(
            "1,000,000 rows that wait, CPU time for each before the first request",
            f"{many:.1f} µs",
            f"{MAX_ROW_US:g} µs",
            many <= MAX_ROW_US,
        )
    )
    add(
        LoadRow(
            "… compared with 100,000 rows: grows linearly",
            f"{many / few:.2f} times per row",
            "1.25 times",
            many <= 1.25 * few,
        )
    )
    warning = next((line for line in printed.splitlines() if " fit, so " in line), "")
    said = warning.partition("files open: ")[2].partition(",")[0]
    if hard != resource.RLIM_INFINITY and hard < 60_000:
        add(
            LoadRow(
                f"65,535 at once asked for, open files ≤ {hard:,}: said before the first request",
                f"“{said}”",
                "how many fit",
                bool(said),
            )
        )


def _cost_before_first_request(run: FakeRun, folder: Path, rows: int) -> tuple[float, str]:
    _write_rows(folder / "in.jsonl", rows)
    run.rows.clear()
    options = ["+agent_name=alpha", "+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl"]
    options += [f"+head_server.port={run.port}", "+num_samples_in_parallel=0"]
    collector = Command([program("ng_collect_rollouts"), *options], folder, "collect")
    try:
        if not collector.wait_until(lambda: bool(run.rows)):
            raise AssertionError(collector.printed[-2000:])
        used = psutil.Process(collector.pid).cpu_times()
        printed = collector.printed
    finally:
        collector.send(signal.SIGKILL)
        collector.wait()
    return (used.user + used.system) / rows * 1e6, printed
