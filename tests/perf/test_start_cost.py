"""How long people wait, in rounds that measure everything in turn: for servers, a first rollout, an import."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.perf.side_by_side.estimates import Estimate, Target, hold

BIN = Path(sys.executable).parent
ROUNDS = 5
MOST_IMPORTS, MOST_FIRST_S, MOST_PYDANTIC, MOST_OWN_IMPORT_MS = 2.0, 1.5, 2.5, 30
CHOSEN = ["+environment=example_single_tool_call", "+model=scripted", "+head_server.port=0"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(*command: str) -> float:
    began_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT, timeout=60)
    return time.perf_counter() - began_s


def own_import() -> float:
    """Of `nemo_gym` in an interpreter that runs."""
    probe = "import time; began = time.perf_counter(); import nemo_gym; print(time.perf_counter() - began)"
    printed = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, env=ENVIRONMENT, text=True)
    return float(printed.stdout)


def until_ready(folder: Path) -> float:
    began_s = time.perf_counter()
    command = [str(BIN / "ng_run"), *CHOSEN]
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        assert any("servers ready!" in line for line in run.stdout)
        took_s = time.perf_counter() - began_s
        run.send_signal(signal.SIGINT)
    return took_s


def until_first(folder: Path) -> float:
    output = folder / f"{time.monotonic_ns()}.jsonl"
    command = [str(BIN / "ng_e2e_collect_rollouts"), *CHOSEN, "+split=example", f"+output_jsonl_fpath={output}"]
    began_s = time.perf_counter()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=quiet, stderr=quiet) as run:
        while not output.exists() or not output.stat().st_size:
            assert run.poll() is None or output.exists()
            time.sleep(0.005)
        return time.perf_counter() - began_s


def test_nobody_waits_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measures: dict[str, Callable[[], float]] = {
        "import fastapi, aiohttp, uvicorn": lambda: seconds(sys.executable, "-c", "import fastapi, aiohttp, uvicorn"),
        "ng_run until ready": lambda: until_ready(tmp_path),
        "first rollout of ng_e2e_collect_rollouts": lambda: until_first(tmp_path),
        "import pydantic": lambda: seconds(sys.executable, "-c", "import pydantic"),
        "ng_collect_rollouts --help": lambda: seconds(str(BIN / "ng_collect_rollouts"), "--help"),
        "import nemo_gym": own_import,
    }
    for measure in measures.values():  # files are warm, and compiled
        measure()
    rounds: list[dict[str, float]] = []

    def waited() -> list[float]:
        took = {name: measure() for name, measure in measures.items()}
        rounds.append(took)
        return [
            took["ng_run until ready"] / took["import fastapi, aiohttp, uvicorn"],
            took["first rollout of ng_e2e_collect_rollouts"],
            took["ng_collect_rollouts --help"] / took["import pydantic"],
            took["import nemo_gym"] * 1000,
        ]

    targets = (
        Target("ng_run until ready, in imports of fastapi, aiohttp, uvicorn", most=MOST_IMPORTS),
        Target("seconds until the first rollout is there", most=MOST_FIRST_S),
        Target("a help page, in imports of pydantic", most=MOST_PYDANTIC),
        Target("milliseconds to import nemo_gym", most=MOST_OWN_IMPORT_MS),
    )
    with capsys.disabled():
        try:
            hold(waited, *targets, rounds=ROUNDS)
        finally:
            for name in measures if rounds else ():
                sys.stdout.write(f"{name:<42}{Estimate.of([each[name] for each in rounds])} s\n")
