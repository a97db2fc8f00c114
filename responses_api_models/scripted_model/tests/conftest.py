"""A scripted model to talk to: in the test's own process, or over a real socket."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import listen
from responses_api_models.scripted_model.app import ScriptedModel, ScriptedModelConfig


def make_model(script: Any = None, **settings: Any) -> ScriptedModel:
    config = ScriptedModelConfig(
        name="policy_model", host="127.0.0.1", port=1, entrypoint="app.py", script=script, **settings
    )
    return ScriptedModel(config=config, server_client=MagicMock(spec=ServerClient))


@pytest.fixture
def model() -> Callable[..., ScriptedModel]:
    return make_model


@pytest.fixture
def client() -> Callable[..., TestClient]:
    return lambda script=None, **settings: TestClient(make_model(script, **settings).complete_app())


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve a model with this script on a free port and return its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(script: Any = None, **settings: Any) -> str:
        bound = listen("127.0.0.1", 0, "a test", "another port")
        app = make_model(script, **settings).complete_app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
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
