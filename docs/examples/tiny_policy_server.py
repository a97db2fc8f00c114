"""The policy behind a Chat Completions endpoint that tells token ids and log-probs, as vLLM does for a large one.

It runs in a thread of the trainer, on the very weights that are trained, so there is nothing to synchronise.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from tiny_policy import Sample, Sampler, ToyTokenizer

MAX_MODEL_LEN = 64
START_TIMEOUT_S = 30.0


def chat_app(sampler: Sampler, tokenizer: ToyTokenizer) -> FastAPI:
    """The endpoint."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(body: dict[str, Any] = Body()) -> Any:
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        if len(prompt) >= MAX_MODEL_LEN:
            words = f"This model's maximum context length is {MAX_MODEL_LEN} tokens; the prompt has {len(prompt)}."
            return JSONResponse({"error": {"message": words, "code": 400}}, status_code=400)
        cap = min(body.get("max_tokens") or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
        return completion(body, prompt, sampler.sample(prompt, cap), tokenizer)

    return app


def completion(body: dict[str, Any], prompt: list[int], said: Sample, tokenizer: ToyTokenizer) -> dict[str, Any]:
    """What the policy said, in the shape of vLLM's answers."""
    tokens = zip(said.token_ids, said.log_probs, strict=True)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": tokenizer.decode(said.token_ids, skip_special_tokens=True)},
        "finish_reason": "length" if said.truncated else "stop",
        "token_ids": said.token_ids,
        "logprobs": {
            "content": [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in tokens]
        },
    }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(said.token_ids)}
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [choice],
        "prompt_token_ids": prompt,
        "usage": {**counts, "total_tokens": sum(counts.values())},
    }


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The base URL under which `app` answers while the block lasts."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if time.monotonic() > deadline_s or not thread.is_alive():
                raise RuntimeError("the policy's server did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
