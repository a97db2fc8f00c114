"""What it costs to bring up a whole environment, against what importing the libraries alone costs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.perf.side_by_side.estimates import Target, hold

IMPORTS = "import fastapi, aiohttp, uvicorn"
CONFIGS = (
    "+config_paths=[resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,"
    "responses_api_models/openai_model/configs/openai_model.yaml]"
)
MODEL = ["+policy_base_url=http://127.0.0.1:9/v1", "+policy_api_key=none", "+policy_model_name=none"]
ROUNDS = 5


def seconds_to_import() -> float:
    """In two processes at a time, as many as `ng_run` has: what others take of the machine falls on both alike."""
    began = time.perf_counter()
    importing = [subprocess.Popen([sys.executable, "-c", IMPORTS]) for _ in range(2)]
    assert [process.wait() for process in importing] == [0, 0]
    return time.perf_counter() - began


def seconds_to_ready(folder: Path) -> tuple[float, float]:
    """Time from the start of ng_run to its last line, and the memory of all its processes then, in MB."""
    command = [str(Path(sys.executable).with_name("ng_run")), CONFIGS, *MODEL, "+head_server.port=0"]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"All 3 / 3 servers ready!", line):
                break
        took = time.perf_counter() - began
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        memory = sum(member.memory_full_info().pss for member in family) / 1e6
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    return took, memory


def test_all_servers_are_ready_within_three_times_the_bare_imports(tmp_path: Path) -> None:
    seconds_to_import()

    def over_imports() -> list[float]:  # side by side, so that other load on the machine falls on both
        bare = seconds_to_import()
        took, used = seconds_to_ready(tmp_path)
        print(f"\nng_run ready in {took:.2f} s, bare imports {bare:.2f} s; {used:.0f} MB")
        return [took / bare, used]

    hold(over_imports, Target("ng_run ready, in bare imports", most=3), Target("MB", most=200), rounds=ROUNDS)
