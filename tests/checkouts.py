"""Run the commands of any checkout that has a `.venv`, so that two versions can be compared."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
COLLECT_TIMEOUT_S = 600.0

SINGLE_TOOL_CALL = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
ROWS = "resources_servers/example_single_tool_call/data/example.jsonl"
AGENT = "example_single_tool_call_simple_agent"


@dataclass(frozen=True)
class RunningServers:
    """The servers that one `ng_run` has started."""

    process: "subprocess.Popen[bytes]"
    head_port: int
    addresses: Mapping[str, str]


def command_of(root: Path, name: str) -> str:
    """Return the path of a command of a checkout."""
    return str(root / ".venv/bin" / name)


@contextmanager
def servers_of(
    root: Path, folder: Path, config: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[RunningServers]:
    """Run the servers of a config from the checkout at `root` until the block ends."""
    port = free_port()
    path, output = folder / "config.yaml", folder / "ng_run.log"
    path.write_text(yaml.safe_dump({**config, "head_server": {"host": "127.0.0.1", "port": port}}))
    with output.open("wb") as log:
        process = subprocess.Popen(
            [command_of(root, "ng_run"), f"+config_paths=[{path}]"],
            cwd=root,
            env={**os.environ, "NO_COLOR": "1", **(environment or {})},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_ready(process, output)
        yield RunningServers(process, port, _addresses(port))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(process: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"servers ready!" not in output.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"ng_run did not get its servers ready:\n{output.read_text()[-3000:]}")
        time.sleep(0.05)


def _addresses(head_port: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{head_port}/server_instances", timeout=30) as answer:
        servers = json.load(answer)
    return {server["process_name"]: server["url"] for server in servers}


def single_tool_call_config(root: Path, endpoint_port: int) -> dict[str, Any]:
    """Return the config of the single-tool-call environment with `openai_model` in front of an endpoint."""
    config: dict[str, Any] = yaml.safe_load((root / SINGLE_TOOL_CALL).read_text())
    settings = {
        "entrypoint": "app.py",
        "openai_base_url": f"http://127.0.0.1:{endpoint_port}/v1",
        "openai_api_key": "none",
        "openai_model": "canned",
    }
    return {**config, "policy_model": {"responses_api_models": {"openai_model": settings}}}


def collect(
    root: Path, folder: Path, head_port: int, *options: str, environment: Mapping[str, str] | None = None
) -> Path:
    """Collect rollouts of the single-tool-call rows with the collector of a checkout; return the rollouts' file."""
    output = folder / f"rollouts-{time.monotonic_ns()}.jsonl"
    command = [
        command_of(root, "ng_collect_rollouts"),
        f"+agent_name={AGENT}",
        f"+input_jsonl_fpath={root / ROWS}",
        f"+output_jsonl_fpath={output}",
        f"+head_server.port={head_port}",
        "+disable_aggregation=true",
        *options,
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "NO_COLOR": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return output
