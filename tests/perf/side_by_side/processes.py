"""Programs a measurement starts, and what they used: CPU and memory of whole process families."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BIN = Path(sys.executable).parent


def configs(model: str) -> str:
    """The single-tool-call environment, with a model server."""
    environment = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
    return f"+config_paths=[{environment},{model}]"


CONFIGS = configs("responses_api_models/openai_model/configs/openai_model.yaml")
INPUT = "resources_servers/example_single_tool_call/data/example.jsonl"
ROWS = 5
"""Rows of it."""
START_TIMEOUT_S = 60
_ENVIRONMENT = {**os.environ, "NO_COLOR": "1"}


@contextmanager
def helper(*arguments: str) -> Iterator[tuple[psutil.Process, int]]:
    """A program of this folder that prints its port and stops when its standard input closes."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield psutil.Process(process.pid), int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(START_TIMEOUT_S)


@contextmanager
def servers(folder: Path, endpoint_port: int, *options: str, configs: str = CONFIGS) -> Iterator[psutil.Process]:
    """`ng_run` with the single-tool-call environment, ready; it yields the launcher."""
    command = [
        str(BIN / "ng_run"),
        configs,
        f"+policy_base_url=http://127.0.0.1:{endpoint_port}/v1",
        "+policy_api_key=none",
        "+policy_model_name=canned",
        f"+head_server.port={head_port(folder)}",
        *options,
    ]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=_ENVIRONMENT)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"All \d+ / \d+ servers ready!", line):
                break
        else:
            raise RuntimeError(f"ng_run ended with {process.wait()} before its servers were ready")
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=START_TIMEOUT_S)


def head_port(folder: Path) -> int:
    """One port per run, the same for its servers and its collector."""
    path = folder / "head_port"
    if not path.exists():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            path.write_text(str(free.getsockname()[1]))
    return int(path.read_text())


def collect(
    folder: Path, output: str, in_flight: int, repeats: int, *options: str, rows: Path | None = None
) -> list[str]:
    """The command line of a collection of `repeats` rollouts of each example row, or of `ROWS` rows of one's own."""
    return [
        str(BIN / "ng_collect_rollouts"),
        "+agent_name=example_single_tool_call_simple_agent",
        f"+input_jsonl_fpath={rows or ROOT / INPUT}",
        f"+output_jsonl_fpath={folder / output}",
        f"+num_samples_in_parallel={in_flight}",
        f"+num_repeats={repeats}",
        f"+head_server.port={head_port(folder)}",
        "+disable_aggregation=true",
        *options,
    ]


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds used so far, in user and kernel."""
    used = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def memory_mb(processes: list[psutil.Process]) -> float:
    """Memory in use, what is shared counted once."""
    used = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            used += process.memory_full_info().pss
    return used / 1e6


def stolen_s() -> float:
    """Seconds that this machine's cores wanted to run and its hypervisor ran others; 0 where nobody counts them."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
