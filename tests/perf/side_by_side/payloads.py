"""Rollouts that carry much: what they cost from the endpoint to the disk, against one orjson load and dump of it.

Each kind is played through the real `ng_run` and `ng_collect_rollouts` against the canned endpoint. What is compared
with is the largest document of such a rollout, read and written once by orjson. Beside it: what the payload adds to a
rollout that carries nothing, and the floor, which only moves the same bytes through as many sockets and files.
"""

import base64
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.runs.record import without_garbage_collection
from tests.perf.side_by_side import endpoint, processes
from tests.perf.side_by_side.throughput import Reading, run_collector

IN_FLIGHT = 16
ROUNDS = 5
FLOOR_TIMES = 100
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
    rollouts: int = 60
    """In one reading: as many as it takes for the start of a collector not to matter."""

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


NOTHING = Kind("nothing", endpoint.message(), rollouts=400)
"""What others add to."""


def kinds() -> list[Kind]:
    """What is measured."""
    return [
        Kind("text of 100 KB", endpoint.message(100_000), rollouts=400),
        Kind("text of 1 MB", endpoint.message(1_000_000), rollouts=150),
        Kind("image of 1 MB", endpoint.message(), image=image_of(1_000_000), rollouts=80),
        Kind("32k tokens with ids and log-probs", with_tokens(32 * 1024), rollouts=100),
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
    nothing_ms: float = 0.0
    """What a rollout without payload cost."""
    floor_ms: list[float] = field(default_factory=list)
    """To move the same bytes through as many sockets and files, in the same rounds."""

    @property
    def added_ratios(self) -> list[float]:
        """What the payload adds over one pass, round by round."""
        readings = zip(self.cpu_ms, self.pass_ms, strict=True)
        return [(cpu_ms - self.nothing_ms) / pass_ms for cpu_ms, pass_ms in readings]

    @property
    def floor_ratios(self) -> list[float]:
        """The floor over one pass, round by round."""
        return [floor / pass_ms for floor, pass_ms in zip(self.floor_ms, self.pass_ms, strict=False)]

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


class Floor:
    """What the kernel alone takes to move bytes through loopback sockets and into files, in ms of CPU."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "floor.bin"

    def ms(self, kind: Kind, record_bytes: int) -> float:
        """Of one rollout, without the endpoint's side.

        An answer of the endpoint comes once, the record goes to the collector and into its file; a row with an image
        goes into a file, out of it, to the agent and twice to the endpoint.
        """
        size = len(kind.payload)
        sent_ms, received_ms = self._socket_ms(record_bytes)
        moved_ms = sent_ms + received_ms + self._file_ms(record_bytes)[0]
        sent_ms, received_ms = self._socket_ms(size)
        if kind.image is None:
            return moved_ms + received_ms
        return moved_ms + 3 * sent_ms + received_ms + sum(self._file_ms(size))

    def _socket_ms(self, size: int) -> tuple[float, float]:
        """To send and to receive so many bytes, each in a thread that knows its own time."""
        sending: list[float] = []
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            content, buffer = b"x" * size, bytearray(size)

            def send() -> None:
                began_s = time.thread_time()
                for _ in range(FLOOR_TIMES):
                    client.sendall(content)
                sending.append(time.thread_time() - began_s)

            thread = threading.Thread(target=send)
            thread.start()
            began_s = time.thread_time()
            with accepted:
                for _ in range(FLOOR_TIMES):
                    left = memoryview(buffer)
                    while left:
                        left = left[accepted.recv_into(left) :]
            receiving_s = time.thread_time() - began_s
            thread.join()
        return 1000 * sending[0] / FLOOR_TIMES, 1000 * receiving_s / FLOOR_TIMES

    def _file_ms(self, size: int) -> tuple[float, float]:
        """To write and to read so many bytes."""
        content = b"x" * size
        with self._path.open("w+b", buffering=0) as file:
            began_s = time.thread_time()
            for _ in range(FLOOR_TIMES):
                os.write(file.fileno(), content)
            written_s = time.thread_time()
            file.seek(0)
            while file.read(size):
                pass
            read_s = time.thread_time()
        self._path.unlink()
        return 1000 * (written_s - began_s) / FLOOR_TIMES, 1000 * (read_s - written_s) / FLOOR_TIMES


def measure(folder: Path, kind: Kind, rollouts: int, nothing_ms: float = 0.0, rounds: int = ROUNDS) -> PayloadCost:
    """One kind: product, pass and floor in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.json").write_bytes(kind.call)
    (folder / "answer.json").write_bytes(kind.answer)
    rows = folder / "rows.jsonl"
    line = orjson.dumps(row_with(kind.image), option=orjson.OPT_APPEND_NEWLINE)
    rows.write_bytes(line * processes.ROWS)
    options = ("--call", str(folder / "call.json"), "--answer", str(folder / "answer.json"))
    configs = processes.CONFIGS if kind.model_config is None else processes.configs(kind.model_config)
    readings: list[Reading] = []
    passes, floors = [], []
    floor = Floor(folder)
    with (
        processes.helper("endpoint.py", *options) as (asked, port),
        processes.servers(folder, port, "+num_replicas=1", configs=configs) as launcher,
    ):

        def run(repeats: int) -> tuple[Reading, int]:
            """A reading and the size of a record; files go at once, so that memory need not grow with the rounds."""
            reading = run_collector(folder, launcher, asked, IN_FLIGHT, repeats, rows)
            outputs = [path for path in folder.glob("rollouts-*") if path.is_file()]
            record_bytes = max(path.stat().st_size for path in outputs) // (processes.ROWS * repeats)
            for path in outputs:
                path.unlink()
            return reading, record_bytes

        repeats = max(2, rollouts // processes.ROWS)
        run(repeats)
        for _ in range(rounds):
            before, _ = run(1)
            reading, record_bytes = run(repeats)
            readings.append(reading.minus(before))
            passes.append(pass_ms(kind.payload))
            floors.append(floor.ms(kind, record_bytes))
    return PayloadCost(
        kind.name,
        len(kind.payload),
        [reading.cpu_ms for reading in readings],
        passes,
        max(reading.per_second for reading in readings),
        has_tokens="tokens" in kind.name,
        nothing_ms=nothing_ms,
        floor_ms=floors,
    )


def measure_all(folder: Path, scale: float) -> list[PayloadCost]:
    """Every kind."""
    found = []
    bare = measure(folder / "nothing", NOTHING, max(10, int(NOTHING.rollouts * scale)))
    nothing_ms = statistics.median(bare.cpu_ms)
    print(f"a rollout without payload: {nothing_ms:.2f} ms CPU", flush=True)
    for number, kind in enumerate(kinds()):
        cost = measure(folder / str(number), kind, max(10, int(kind.rollouts * scale)), nothing_ms)
        ratios = ", ".join(f"{ratio:.1f}" for ratio in cost.added_ratios)
        print(
            f"{cost.name}: {min(cost.cpu_ms):.1f} ms CPU, one load and dump {min(cost.pass_ms):.2f} ms, the floor "
            f"{min(cost.floor_ms):.2f} ms; added: {ratios} x; {cost.per_s:.0f}/s",
            flush=True,
        )
        found.append(cost)
    return found
