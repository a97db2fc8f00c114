"""`token_model` in front of an engine that stands in for vLLM and SGLang, both on real ports."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient
from nemo_gym.testing import use_client_settings
from responses_api_models.token_model.app import TokenModel, TokenModelConfig
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import KEEPING, Say, StandInEngine, serving, tokenizer_folder


@dataclass
class Model:
    """A served model and its engine."""

    url: str
    engine: StandInEngine
    client: httpx.Client

    def respond(self, body: dict[str, Any], status: int = 200) -> Any:
        """Ask for a response."""
        return self._asked("/v1/responses", body, status)

    def chat(self, body: dict[str, Any], status: int = 200) -> Any:
        """Ask for a completion."""
        return self._asked("/v1/chat/completions", body, status)

    def _asked(self, path: str, body: dict[str, Any], status: int) -> Any:
        answer = self.client.post(f"{self.url}{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


Serve = Callable[..., Model]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve a model whose engine says what the test says."""
    use_client_settings(GlobalAIOHTTPAsyncClientConfig(model_retry_max_tries=1))
    with ExitStack() as up:
        up.callback(use_client_settings, None)

        def start(say: Say, template: str = KEEPING, *, is_canonical: bool = False, **settings: Any) -> Model:
            folder = tokenizer_folder(tmp_path / f"tokenizer{len(list(tmp_path.iterdir()))}", template)
            engine = StandInEngine(ChatTokenizer(folder), say, is_canonical=is_canonical)
            address = up.enter_context(serving(engine.app()))
            config = TokenModelConfig(
                name="policy",
                host="127.0.0.1",
                port=1,
                entrypoint="app.py",
                base_url=[f"{address}/v1"],
                api_key="key",
                model="m",
                tokenizer=str(folder),
                **settings,
            )
            model = TokenModel(config=config, server_client=MagicMock(spec=ServerClient, global_config_dict={}))
            url = up.enter_context(serving(model.complete_app()))
            return Model(url, engine, up.enter_context(httpx.Client(timeout=60)))

        yield start
