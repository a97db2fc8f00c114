"""What a rollout with many tokens costs on the servers' path: agent, model server and trainer's side, in CPU time.

The figure is for comparing: an answer of 32k tokens with ids and log-probs from a Chat Completions endpoint, through
`vllm_model` and `simple_agent` in one process, read by the trainer and made a message log of tensors. The endpoint is a
process of its own and not counted. Beside it stands what reading and writing the same JSON once costs.
"""

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.rl.message_log import build_message_log
from nemo_gym.testing import build_server

TOKENS = 32_768
ROLLOUTS = 5
ENDPOINT = """
import json, socket, sys, uvicorn
from fastapi import FastAPI, Response
n = int(sys.argv[1])
ids = [1000 + i % 50000 for i in range(n)]
content = [{"token": f"token_id:{t}", "logprob": -0.123456789 - i % 7, "top_logprobs": []} for i, t in enumerate(ids)]
choice = {"index": 0, "message": {"role": "assistant", "content": "yes " * (n // 2)}, "finish_reason": "stop",
          "token_ids": ids, "logprobs": {"content": content}}
usage = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": n + 3}
body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                   "prompt_token_ids": [1, 2, 3], "usage": usage}).encode()
app = FastAPI()
@app.post("/v1/chat/completions")
async def chat():
    return Response(body, media_type="application/json")
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


class Tokens:
    """Decodes nothing."""

    def batch_decode(self, sequences: Any) -> list[str]:
        return ["" for _ in sequences]


@contextmanager
def endpoint(folder: Path) -> Iterator[int]:
    program = folder / "endpoint.py"
    program.write_text(ENDPOINT)
    command = [sys.executable, str(program), str(TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def client_of_agent(port: int) -> ServerClient:
    """Return a client of an agent whose model server and environment are in the same process."""
    model: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "k", "model": "m"}
    model |= {"entrypoint": "app.py", "return_token_id_information": True, "uses_reasoning_parser": False}
    model |= {"request_prompt_and_generation_token_ids": True}
    config = GlobalConfigDictParser().parse_no_environment(
        OmegaConf.create(
            {
                "config_paths": ["resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"],
                "policy_model": {"responses_api_models": {"vllm_model": model}},
            }
        )
    )
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    for instance in GlobalConfigDictParser().filter_for_server_instance_configs(config):
        server = build_server(instance, client, {})
        address, paths = Address(server.config.host, server.config.port), server.CANCELLABLE_PATHS
        register_local_app(instance.name, server.complete_app(), [address], cancellable_paths=paths)
    return client


async def seconds_of_rollouts(port: int) -> list[float]:
    client = client_of_agent(port)
    row = {"responses_create_params": {"input": "go"}}
    seconds = []
    for _ in range(ROLLOUTS + 1):
        began_s = time.thread_time()
        answer = await client.post("example_single_tool_call_simple_agent", "/run", json=row)
        log = build_message_log(orjson.loads(await answer.read()), Tokens())["message_log"]
        seconds.append(time.thread_time() - began_s)
        assert [len(message["token_ids"]) for message in log] == [3, TOKENS]
        assert len(log[1]["generation_logprobs"]) == TOKENS
    return seconds[1:]


def seconds_of_json() -> float:
    """Reading an answer of that size and writing what remains of it, once each."""
    content = [{"token": f"token_id:{token}", "logprob": -0.123456789, "top_logprobs": []} for token in range(TOKENS)]
    text = json.dumps({"content": content, "token_ids": list(range(TOKENS))})
    began_s = time.thread_time()
    read = orjson.loads(text)
    orjson.dumps({"ids": read["token_ids"], "log_probs": [entry["logprob"] for entry in read["content"]]})
    return time.thread_time() - began_s


def test_what_a_long_answer_costs_by_way_of_the_servers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="message logs are lists without it: install the extra `rl`")
    gc.collect()
    gc.freeze()  # what torch and pytest keep alive is not looked through in a server
    with endpoint(tmp_path) as port:
        seconds = asyncio.run(seconds_of_rollouts(port))
    gc.unfreeze()
    least = min(seconds_of_json() for _ in range(5))
    middle = 1e3 * statistics.median(seconds)
    print(f"\n{TOKENS} tokens by the servers: {middle:.1f} ms of CPU a rollout; the JSON alone {1e3 * least:.1f} ms")
