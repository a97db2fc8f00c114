"""How long people wait: for a help page, for servers, for the first rollout; and what idle servers occupy."""

import subprocess
import sys
import time
from pathlib import Path

from tests.perf.side_by_side import processes


def measure(folder: Path, endpoint_port: int) -> dict[str, float]:
    """Seconds and megabytes, and the bare imports to compare them with."""
    readings = {
        "import fastapi, aiohttp, uvicorn (s)": _seconds([sys.executable, "-c", "import fastapi, aiohttp, uvicorn"]),
        "ng_collect_rollouts --help (s)": _seconds([str(processes.BIN / "ng_collect_rollouts"), "--help"]),
    }
    began = time.perf_counter()
    with processes.servers(folder, endpoint_port) as launcher:
        readings["ng_run until ready (s)"] = time.perf_counter() - began
        readings["idle servers (MB)"] = processes.memory_mb(processes.family(launcher))
        readings["first rollout after ng_collect_rollouts (s)"] = _seconds_to_first(folder)
    return readings


def _seconds(command: list[str]) -> float:
    best = 1e9
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best = min(best, time.perf_counter() - began)
    return best


def _seconds_to_first(folder: Path) -> float:
    output = folder / "first.jsonl"
    quiet = subprocess.DEVNULL
    began = time.perf_counter()
    with subprocess.Popen(processes.collect(folder, output.name, 1, 1), cwd=folder, stdout=quiet, stderr=quiet):
        while not output.exists() or not output.stat().st_size:
            time.sleep(0.005)
        return time.perf_counter() - began
