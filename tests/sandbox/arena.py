"""The real sandbox and the real server on which hostile programs are let loose."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from fastapi.testclient import TestClient

from nemo_gym.sandbox.child import Limits
from nemo_gym.sandbox.process import IsolatedProcess, Work
from nemo_gym.server_utils import ServerClient
from resources_servers.code_gen.app import CodeGenResourcesServer, CodeGenResourcesServerConfig

RIGHT = "```\nprint(2 * int(input()))\n```"
LIMITS = Limits(wall_s=30, cpu_s=10, memory_mb=512, file_mb=4)
_RUN_PYTHON = """
from nemo_gym.sandbox import confine
offered = confine.landlock_version()
confine.landlock_version = lambda: min(offered, {landlock_version})

def run(code):
    names = {{}}
    exec(code, names)
    return names.get("out")
"""


@contextmanager
def isolated(folder: Path, layers: Sequence[str], landlock_version: int = 99) -> Iterator[IsolatedProcess]:
    """A process that runs code and returns its `out`, with these layers if the system has them.

    Args:
        folder: Where to put what it does.
        layers: What isolates it.
        landlock_version: The newest version of Landlock that the kernel is made to offer.
    """
    (folder / "run_python.py").write_text(_RUN_PYTHON.format(landlock_version=landlock_version))
    process = IsolatedProcess()
    try:
        process.isolate(Work("run_python", (folder,)), layers)
        yield process
    finally:
        process.close()


@contextmanager
def code_gen() -> Iterator[TestClient]:
    """A server of `code_gen` with little patience."""
    config = CodeGenResourcesServerConfig(
        name="code_gen",
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        num_processes=1,
        unit_test_timeout_secs=2,
        memory_limit_mb=256,
    )
    server = CodeGenResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.complete_app(), raise_server_exceptions=False) as client:
        yield client


def verdict(client: TestClient, text: str, fn_name: str | None = None) -> dict[str, Any]:
    """What the server says about an answer; with `reward: None` and `error` when it says nothing."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    tests = {"inputs": ["2", "3"], "outputs": ["4", "6"], "fn_name": fn_name}
    body = {"responses_create_params": {"input": "?"}, "response": response, "verifier_metadata": {"unit_tests": tests}}
    answer = client.post("/verify", content=json.dumps(body), headers={"content-type": "application/json"})
    known: dict[str, Any] = (
        answer.json() if answer.status_code == 200 else {"reward": None, "error": answer.text[-900:]}
    )
    return known
