"""A model endpoint that costs next to nothing: canned `/v1/responses` answers over bare sockets.

It asks for the tool first and answers once a tool's output is in the request. Run as a program it prints
its port, listens on loopback until its standard input closes, and serves any number of connections.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import orjson
import uvloop

CITY = "Reykjavik"
TOOL_OUTPUT = b'"function_call_output"'
TOOL_MESSAGE = b'"role":"tool"'


def response(output: list[dict[str, object]], answer: int) -> bytes:
    """A body of `/v1/responses` with these items."""
    body = {
        "id": f"resp_{answer:032d}",
        "created_at": 1_760_000_000.0,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "canned",
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "Say what the weather is like in a city right now.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": "The city's name, without country"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
                "strict": True,
            }
        ],
        "top_p": 1.0,
        "max_output_tokens": None,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "status": "completed",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "usage": {
            "input_tokens": 180,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 24,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 204,
        },
        "user": None,
        "store": True,
    }
    return orjson.dumps(body)


CALL = response(
    [
        {
            "type": "function_call",
            "id": "fc_0001",
            "call_id": "call_0001",
            "name": "get_weather",
            "arguments": f'{{"city":"{CITY}"}}',
            "status": "completed",
        }
    ],
    1,
)


def message(length: int = 0) -> bytes:
    """The final answer, with as many characters more as a large rollout is to have."""
    text = f"The weather in {CITY} is cold: yes, take gloves." + "x" * length
    content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": text}]
    return response(
        [{"type": "message", "id": "msg_0001", "role": "assistant", "status": "completed", "content": content}], 2
    )


def with_head(body: bytes, content_type: bytes = b"application/json") -> bytes:
    """The body as a whole HTTP response."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (content_type, len(body))
    return head + body


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests on it come one after another."""

    def __init__(self, delay_s: float, answer: Callable[[bytes], bytes]) -> None:
        self._delay_s = delay_s
        self._answer = answer
        self._received = b""
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer when a request is complete."""
        self._received = self._received + data if self._received else data
        if not self._needed:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._received[:end].lower()
            _, found, length = head.partition(b"content-length:")
            self._needed = end + 4 + (int(length.partition(b"\r\n")[0]) if found else 0)
        if len(self._received) < self._needed:
            return
        answer = self._answer(self._received)
        self._received, self._needed = b"", 0
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._write, answer)
        else:
            self._transport.write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def serve(delay_s: float, call: bytes, answer: bytes) -> None:
    """Listen until standard input closes."""
    first, last = with_head(call), with_head(answer)

    def answer_to(request: bytes) -> bytes:
        return last if TOOL_OUTPUT in request or TOOL_MESSAGE in request else first

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(delay_s, answer_to), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--extra-bytes", type=int, default=0)
    parser.add_argument("--call", type=Path, help="file with what is answered first")
    parser.add_argument("--answer", type=Path, help="file with what is answered last")
    given = parser.parse_args()
    called = given.call.read_bytes() if given.call else CALL
    answered = given.answer.read_bytes() if given.answer else message(given.extra_bytes)
    uvloop.run(serve(given.delay, called, answered))
