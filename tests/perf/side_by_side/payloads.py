"""Rollouts that carry much: what they cost from the endpoint to the disk, against one orjson load and dump of it.

Each kind is played through the real `ng_run` and `ng_collect_rollouts` against the canned endpoint. What is compared
with is the largest document of such a rollout, read and written once by orjson.
"""

import base64
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.runs.record import without_garbage_collection
from tests.perf.side_by_side import endpoint, processes
from tests.perf.side_by_side.throughput import Reading, run_collector

IN_FLIGHT = 16
ROUNDS = 3
SPOKEN = f"The weather in {endpoint.CITY} is cold: yes, take gloves."
CHAT_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


@dataclass(frozen=True)
class Kind:
    """One shape of rollouts."""

    name: str
    answer: bytes
    """What the endpoint says last."""
    call: bytes = endpoint.CALL
    """What it says first: it calls the tool."""
    image: str | None = None
    """A data URL that every row shows the model."""
    model_config: str | None = None
    """The config of the model server, if it is not `openai_model`."""

    @property
    def payload(self) -> bytes:
        """The largest document."""
        return self.answer if self.image is None else orjson.dumps(row_with(self.image))


def bundle(tokens: int) -> dict[str, list[Any]]:
    """Token ids and log-probs as a model of 150,000 tokens would sample them."""
    chance = random.Random(tokens)
    return {
        "prompt_token_ids": [chance.randrange(150_000) for _ in range(tokens // 32)],
        "generation_token_ids": [chance.randrange(150_000) for _ in range(tokens)],
        "generation_log_probs": [-5 * chance.random() ** 3 for _ in range(tokens)],
    }


def with_tokens(tokens: int) -> bytes:
    """A final answer in the Responses API whose message carries token ids."""
    answer = orjson.loads(endpoint.message())
    answer["output"][0].update(bundle(tokens))
    return orjson.dumps(answer)


def chat_with_tokens(message: dict[str, Any], tokens: int) -> bytes:
    """A chat completion as vLLM answers when ids are asked for: beside the message, and in the log-probs of each."""
    prompt, ids, log_probs = bundle(tokens).values()
    entries = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": [32, 97], "top_logprobs": []}
        for token, log_prob in zip(ids, log_probs, strict=True)
    ]
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}, "token_ids": ids}
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_760_000_000,
            "model": "canned",
            "prompt_token_ids": prompt,
            "choices": [{**choice, "logprobs": {"content": entries}}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens},
        }
    )


def chat_call() -> bytes:
    """The same for the tool."""
    function = {"name": "get_weather", "arguments": orjson.dumps({"city": endpoint.CITY}).decode()}
    call = {"id": "call_0001", "type": "function", "function": function}
    return chat_with_tokens({"content": None, "tool_calls": [call]}, 32)


def image_of(size: int) -> str:
    """A data URL of so many bytes."""
    return f"data:image/png;base64,{base64.b64encode(random.Random(size).randbytes(size * 3 // 4)).decode()}"


def row_with(image: str | None) -> dict[str, Any]:
    """The first example row, with an image if given."""
    row: dict[str, Any] = orjson.loads((processes.ROOT / processes.INPUT).read_bytes().splitlines()[0])
    if image is not None:
        part = {"type": "input_image", "detail": "auto", "image_url": image}
        row["responses_create_params"]["input"].append({"role": "user", "content": [part]})
    return row


def kinds() -> list[Kind]:
    """What is measured."""
    return [
        Kind("text of 100 KB", endpoint.message(100_000)),
        Kind("text of 1 MB", endpoint.message(1_000_000)),
        Kind("image of 1 MB", endpoint.message(), image=image_of(1_000_000)),
        Kind("32k tokens with ids and log-probs", with_tokens(32 * 1024)),
        Kind(
            "32k tokens of a chat completion",
            chat_with_tokens({"content": SPOKEN}, 32 * 1024),
            call=chat_call(),
            model_config=CHAT_MODEL,
        ),
    ]


@dataclass
class PayloadCost:
    """What was found of one kind."""

    name: str
    payload_bytes: int
    cpu_ms: list[float]
    """Of collector and servers per rollout, round by round."""
    pass_ms: list[float]
    """One orjson load and dump of the payload, in the same rounds."""
    per_s: float
    """Rollouts per second in the best round."""
    has_tokens: bool = False
    """Whether most of the payload is numbers: of a text, moving it through sockets costs more than reading it."""

    @property
    def ratios(self) -> list[float]:
        """CPU over one pass, round by round."""
        return [cpu_ms / pass_ms for cpu_ms, pass_ms in zip(self.cpu_ms, self.pass_ms, strict=True)]


def pass_ms(payload: bytes, times: int = 5) -> float:
    """CPU of one load and dump, as cheap as it gets."""
    return min(_cpu_ms(lambda: orjson.dumps(orjson.loads(payload))) for _ in range(times))


def _cpu_ms(step: Callable[[], object]) -> float:
    with without_garbage_collection():
        began_s = time.process_time()
        step()
        return 1000 * (time.process_time() - began_s)


def measure(folder: Path, kind: Kind, rollouts: int, rounds: int = ROUNDS) -> PayloadCost:
    """One kind, product and pass in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.json").write_bytes(kind.call)
    (folder / "answer.json").write_bytes(kind.answer)
    rows = folder / "rows.jsonl"
    line = orjson.dumps(row_with(kind.image), option=orjson.OPT_APPEND_NEWLINE)
    rows.write_bytes(line * processes.ROWS)
    options = ("--call", str(folder / "call.json"), "--answer", str(folder / "answer.json"))
    configs = processes.CONFIGS if kind.model_config is None else processes.configs(kind.model_config)
    readings: list[Reading] = []
    passes = []
    with (
        processes.helper("endpoint.py", *options) as (asked, port),
        processes.servers(folder, port, "+num_replicas=1", configs=configs) as launcher,
    ):
        repeats = max(2, rollouts // processes.ROWS)
        run_collector(folder, launcher, asked, IN_FLIGHT, 2, rows)
        for _ in range(rounds):
            before = run_collector(folder, launcher, asked, IN_FLIGHT, 1, rows)
            readings.append(run_collector(folder, launcher, asked, IN_FLIGHT, repeats, rows).minus(before))
            passes.append(pass_ms(kind.payload))
    return PayloadCost(
        kind.name,
        len(kind.payload),
        [reading.cpu_ms for reading in readings],
        passes,
        max(reading.per_second for reading in readings),
        has_tokens="tokens" in kind.name,
    )


def measure_all(folder: Path, scale: float) -> list[PayloadCost]:
    """Every kind."""
    found = []
    for number, kind in enumerate(kinds()):
        cost = measure(folder / str(number), kind, max(10, int(60 * scale)))
        ratios = ", ".join(f"{ratio:.1f}" for ratio in cost.ratios)
        print(
            f"{cost.name}: {min(cost.cpu_ms):.1f} ms CPU, one load and dump {min(cost.pass_ms):.2f} ms: {ratios} x; "
            f"{cost.per_s:.0f}/s",
            flush=True,
        )
        found.append(cost)
    return found
