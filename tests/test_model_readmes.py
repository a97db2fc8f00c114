"""The commands in the READMEs of the model servers, word for word, against a model that plays the endpoint."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn

from nemo_gym.paths import PARENT_DIR
from nemo_gym.runtime import listen
from nemo_gym.server_utils import ServerClient
from responses_api_models.scripted_model.app import ScriptedModel, ScriptedModelConfig
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import StandInEngine, serving, tokenizer_folder, tool_user
from tests.ports import free_port
from tests.readmes import modules, play

MODELS = "responses_api_models"
PROXY = "http://127.0.0.1:4000"
LOCAL, SECOND_LOCAL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
AZURE = "https://my-resource.openai.azure.com"
OPENAI = "https://api.openai.com"
WARSAW = '{"city": "Warsaw"}'
ADDRESSES = {
    "azure_openai_model": [AZURE],
    "inference_provider": [LOCAL],
    "litellm_model": [PROXY],
    "openai_model": [OPENAI],
    "scripted_model": [],
    "token_model": [LOCAL],
    "vllm_model": [LOCAL, SECOND_LOCAL],
}
"""Of the endpoints that a README speaks of; the test of a new one fails until it is listed here."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Callable[[str], str]]:
    """Serve a scripted model, each of its paths as `/v1/chat/completions` to Azure's clients; its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(written: str) -> str:
        config = ScriptedModelConfig(name="endpoint", host="127.0.0.1", port=1, entrypoint="app.py")
        app = ScriptedModel(config=config, server_client=MagicMock(spec=ServerClient)).complete_app()
        app.get("/health/readiness/details")(lambda: {"litellm_version": "1.83.4-stable"})

        async def renamed(scope: Any, receive: Any, send: Any) -> None:
            is_renamed = written == AZURE and scope["type"] == "http"
            await app({**scope, "path": "/v1/chat/completions"} if is_renamed else scope, receive, send)

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


@pytest.mark.parametrize("module", modules(MODELS))
def test_every_command_works_and_the_examples_are_all_right(
    module: str, tmp_path: Path, endpoint: Callable[[str], str]
) -> None:
    with ExitStack() as up:
        if module == "token_model":
            folder = tokenizer_folder(tmp_path / "tokenizer")
            engine = StandInEngine(ChatTokenizer(folder), tool_user("get_weather", WARSAW, rounds=1, thinks=True))
            replaced = {LOCAL: up.enter_context(serving(engine.app())), "_tokenizer=Qwen3-8B": f"_tokenizer={folder}"}
        else:
            replaced = {written: endpoint(written) for written in ADDRESSES[module]}
        if module == "scripted_model":
            replaced["8123"] = str(free_port())

        collected = play(PARENT_DIR / MODELS / module / "README.md", tmp_path, replaced)

    assert collected
    for rollouts in collected.values():
        assert [rollout["reward"] for rollout in rollouts] == [1.0] * 5
