"""The commands in the READMEs of the model servers, word for word, against a model that plays the endpoint."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn

from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient
from nemo_gym.servers.listening import listen
from responses_api_models.scripted_model.app import ScriptedModel, ScriptedModelConfig

MODELS = PARENT_DIR / "responses_api_models"
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(module: str) -> list[list[str]]:
    blocks = BASH.findall((MODELS / module / "README.md").read_text())
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder; the head server's port alone differs from the default, so that tests can run side by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "env.yaml").write_text(f"head_server:\n  port: {port}\n")
    return tmp_path


@pytest.fixture
def endpoint() -> Iterator[Callable[..., str]]:
    """Serve a scripted model, each of its paths as `path` when given, and return its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(path: str | None = None) -> str:
        config = ScriptedModelConfig(name="endpoint", host="127.0.0.1", port=1, entrypoint="app.py")
        app = ScriptedModel(config=config, server_client=MagicMock(spec=ServerClient)).complete_app()

        async def renamed(scope: Any, receive: Any, send: Any) -> None:
            named = {**scope, "path": path} if path and scope["type"] == "http" else scope
            await app(named, receive, send)

        bound = listen("127.0.0.1", 0, "a test", "another port")
        server = uvicorn.Server(uvicorn.Config(renamed, log_level="critical", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@contextmanager
def servers(arguments: list[str], folder: Path) -> Iterator[None]:
    """`ng_run`, up."""
    with (folder / "ng_run.log").open("wb") as log:
        process = subprocess.Popen(
            [script("ng_run"), *arguments], cwd=folder, env=clean_environment(), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 90
            while "servers ready!" not in (printed := (folder / "ng_run.log").read_text()):
                assert process.poll() is None, printed
                assert time.monotonic() < deadline, printed
                time.sleep(0.1)
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def play(module: str, folder: Path, addresses: dict[str, str]) -> list[str]:
    """Run the commands one after the other, each `ng_run` until the next, and return their names."""

    def real(argument: str) -> str:
        for written, address in addresses.items():
            argument = argument.replace(written, address)
        return argument

    ran = []
    with ExitStack() as up:
        for command, *arguments in commands(module):
            ran.append(command)
            if command == "ng_run":
                up.pop_all().close()
                up.enter_context(servers([real(argument) for argument in arguments], folder))
                continue
            done = subprocess.run(
                [script(command), *map(real, arguments)],
                cwd=folder,
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
    rollouts = [json.loads(line) for line in (folder / "results" / module / "rollouts.jsonl").read_text().splitlines()]
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * 5
    return ran


def test_vllm_model(folder: Path, endpoint: Callable[..., str]) -> None:
    addresses = {"http://127.0.0.1:8000": endpoint(), "http://127.0.0.1:8001": endpoint()}

    assert play("vllm_model", folder, addresses) == ["ng_run", "ng_collect_rollouts", "ng_run"]


def test_inference_provider(folder: Path, endpoint: Callable[..., str]) -> None:
    ran = play("inference_provider", folder, {"http://127.0.0.1:8000": endpoint()})

    assert ran == ["ng_run", "ng_collect_rollouts", "ng_run"]


def test_azure_openai_model(folder: Path, endpoint: Callable[..., str]) -> None:
    resource = endpoint("/v1/chat/completions")

    ran = play("azure_openai_model", folder, {"https://my-resource.openai.azure.com": resource})

    assert ran == ["ng_run", "ng_collect_rollouts", "ng_run"]
