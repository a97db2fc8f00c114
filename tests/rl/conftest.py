"""Stand-ins for a tokenizer and for a run of servers, the latter real HTTP servers on a loopback port."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn
import yaml
from fastapi import FastAPI, Request, Response

from nemo_gym import global_config
from nemo_gym.rl.environment import NemoGym, NemoGymConfig
from nemo_gym.servers.gateway import Duties, Gateway

AGENT = "some_agent"
Handler = Callable[[dict[str, Any]], Any]


class CharacterTokenizer:
    """One token per character: its code point."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        ids = [ord(character) for character in text]
        try:
            import torch
        except ImportError:
            return {"input_ids": [ids]}
        return {"input_ids": torch.tensor([ids], dtype=torch.int64)}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(token)) for token in token_ids if not (skip_special_tokens and int(token) == 0))

    def batch_decode(self, sequences: Any, **_: Any) -> list[str]:
        return [self.decode(sequence) for sequence in sequences]

    def apply_chat_template(self, conversation: Any, *, return_dict: bool = True, **_: Any) -> Any:
        """As in transformers 5: a mapping, unless the ids alone are asked for."""
        ids = [ord(character) for message in conversation for character in message["content"]]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@contextmanager
def served(app: FastAPI) -> Iterator[int]:
    """The port of an app that is served while the block lasts."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[FastAPI], int]]:
    """Serve an app until the test ends; its port is returned."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(served(app))


@pytest.fixture
def attached(serve: Callable[[FastAPI], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NemoGym]]:
    """A `NemoGym` attached to a run with one agent, whose `/run` is what the test says."""
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    gyms: list[NemoGym] = []

    def attach(run: Handler, run_config: dict[str, Any] | None = None, **settings: Any) -> NemoGym:
        app = FastAPI()
        app.add_middleware(Gateway, duties=Duties(AGENT, cancellable_paths=frozenset({"/run"})))
        address: dict[str, Any] = {"host": "127.0.0.1"}

        @app.get("/global_config_dict_yaml")
        async def config() -> str:
            block = {"entrypoint": "app.py", **address}
            return yaml.safe_dump({AGENT: {"responses_api_agents": {"some_impl": block}}, **(run_config or {})})

        @app.get("/server_instances")
        async def instances() -> list[Any]:
            return []

        @app.post("/run")
        async def answer(request: Request) -> Response:
            result = run(await request.json())
            if hasattr(result, "__await__"):
                result = await result
            if isinstance(result, Response):
                return result
            return Response(json.dumps(result), media_type="application/json")

        address["port"] = serve(app)
        cfg: NemoGymConfig = {"head_server": dict(address), **settings}  # type: ignore[typeddict-item]
        gyms.append(NemoGym(cfg))
        gyms[-1].start()
        return gyms[-1]

    yield attach
    for gym in gyms:
        gym.shutdown()


@pytest.fixture
def rows() -> Callable[[int], list[dict[str, Any]]]:
    """Rows for the agent of `attached`."""

    def make(count: int) -> list[dict[str, Any]]:
        params = {"input": [{"role": "user", "content": "hi"}]}
        return [
            {"_rowidx": index, "agent_ref": {"name": AGENT}, "responses_create_params": params}
            for index in range(count)
        ]

    return make


@pytest.fixture
def result_of() -> Callable[..., dict[str, Any]]:
    """An agent's answer: one turn with these tokens."""

    def make(row: dict[str, Any], log_probs: list[float] | None = None, **more: Any) -> dict[str, Any]:
        item = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes"}],
            "prompt_token_ids": [104, 105],
            "generation_token_ids": [121, 101, 115],
            "generation_log_probs": log_probs if log_probs is not None else [-0.1, -0.2, -0.3],
        }
        return {**row, "response": {"output": [item]}, "reward": 1.0, **more}

    return make
