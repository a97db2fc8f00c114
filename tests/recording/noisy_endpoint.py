"""A model endpoint that never says the same twice, for `example_multi_step`: random tool calls, random words.

It speaks Responses and Chat Completions, counts its requests (`GET /count`) and fails the share of them that it is
told to. Run as a program it prints its port and listens on loopback until its standard input closes.
"""

import argparse
import asyncio
import random
import sys
import time
from typing import Any, cast
from uuid import uuid4

import orjson
import uvloop

WORDS = ["Rapid", "Swift", "Brisk", "Glad", "Merry", "Content", "Tiny", "Small", "Huge", "Vast", "Calm", "Quiet"]
_USAGE = {
    "input_tokens": 180,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 24,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 204,
}


def _said(tool_outputs: int) -> tuple[str, dict[str, Any]]:
    """The tool to call with its arguments, or no tool and a text."""
    if tool_outputs < random.randint(2, 5):
        return "get_synonym_value", {"synonym": random.choice(WORDS)}
    if tool_outputs < 6:
        return "extract_synonym_values", {"synonym_values": random.choices(range(900), k=3)}
    return "", {"text": " ".join(random.choices(WORDS, k=20))}


def response_to(request: dict[str, Any]) -> dict[str, Any]:
    """What the Responses API says."""
    items = request["input"] if isinstance(request["input"], list) else []
    tool, arguments = _said(sum(item.get("type") == "function_call_output" for item in items))
    if tool:
        output: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{uuid4().hex}",
            "call_id": f"call_{uuid4().hex}",
            "name": tool,
            "arguments": orjson.dumps(arguments).decode(),
            "status": "completed",
        }
    else:
        content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": arguments["text"]}]
        output = {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": content}
        output["status"] = "completed"
    return {
        "id": f"resp_{uuid4().hex}",
        "created_at": time.time(),
        "model": "noisy",
        "object": "response",
        "output": [output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "status": "completed",
        "usage": _USAGE,
    }


def completion_to(request: dict[str, Any]) -> dict[str, Any]:
    """What the Chat Completions API says."""
    tool, arguments = _said(sum(message["role"] == "tool" for message in request["messages"]))
    message: dict[str, Any] = {"role": "assistant", "content": arguments.get("text")}
    if tool:
        function = {"name": tool, "arguments": orjson.dumps(arguments).decode()}
        message["tool_calls"] = [{"id": f"call_{uuid4().hex}", "type": "function", "function": function}]
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "noisy",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if tool else "stop"}],
        "usage": {"prompt_tokens": 180, "completion_tokens": 24, "total_tokens": 204},
    }


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests on it come one after another."""

    asked = 0

    def __init__(self, failing: float, delay_s: float) -> None:
        self._failing = failing
        self._delay_s = delay_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer when a request is complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, found, length = head.lower().partition(b"content-length:")
        if found and len(body) < int(length.partition(b"\r\n")[0]):
            return
        self._received = b""
        status, answer = self._answer(head, body)
        start = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n".encode()
        whole = b"%bcontent-length: %d\r\n\r\n%b" % (start, len(answer), answer)
        asyncio.get_running_loop().call_later(self._delay_s, self._write, whole)

    def _answer(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        if head.startswith(b"GET /count"):
            return 200, orjson.dumps(Connection.asked)
        Connection.asked += 1
        if random.random() < self._failing:
            return 400, b'{"error": {"message": "not now"}}'
        request = orjson.loads(body)
        return 200, orjson.dumps(completion_to(request) if b"/chat/completions" in head else response_to(request))

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def serve(failing: float, delay_s: float) -> None:
    """Listen until standard input closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(failing, delay_s), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--failing", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    uvloop.run(serve(given.failing, given.delay))
