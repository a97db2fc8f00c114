"""The model of this comparison: canned answers over bare sockets, in every dialect that the contenders speak.

It plays one task. Which turn it is, the number of tool outputs in the request tells. Run as a program it prints its
port, listens on loopback until its standard input closes, and prints how many calls of rollouts it has answered, and
the seconds from the first of them to the last.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from tests.perf.peers.tasks import TASKS, Task
from tests.perf.side_by_side.endpoint import Connection, response, with_head

RESPONSES_OUTPUT, CHAT_OUTPUT = b'"function_call_output"', b'"tool_call_id"'
"""Each stands once in every tool output, in the one dialect and in the other."""
TOOLS = b'"tools"'
"""In every call of a rollout; inspect_ai begins with one of its own, to find out what the endpoint can do."""
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
"""The answer to whatever is no call of the model; some ask what models there are."""
USAGE = {"prompt_tokens": 180, "completion_tokens": 24, "total_tokens": 204}


def responses_answers(task: Task) -> list[bytes]:
    """The answers of `/v1/responses`, by turn."""
    return [with_head(response([_item(task, turn)], turn)) for turn in range(task.model_calls)]


def _item(task: Task, turn: int) -> dict[str, object]:
    if turn == len(task.tool_calls):
        content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": task.text}]
        return {
            "type": "message",
            "id": f"msg_{turn:04d}",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
    name, arguments = task.tool_calls[turn]
    return {
        "type": "function_call",
        "id": f"fc_{turn:04d}",
        "call_id": f"call_{turn:04d}",
        "name": name,
        "arguments": json.dumps(arguments),
        "status": "completed",
    }


def chat_answers(task: Task) -> list[bytes]:
    """The answers of `/v1/chat/completions`, by turn."""
    return [
        with_head(
            json.dumps(
                {
                    **_chat_head(turn, "chat.completion"),
                    "choices": [
                        {
                            "index": 0,
                            "message": message,
                            "logprobs": None,
                            "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
                        }
                    ],
                    "usage": USAGE,
                }
            ).encode()
        )
        for turn, message in enumerate(_chat_messages(task))
    ]


def streamed_answers(task: Task) -> list[bytes]:
    """The same as a stream of one chunk with everything, one with the reason of the end and one with the usage."""
    answers = []
    for turn, message in enumerate(_chat_messages(task)):
        head = _chat_head(turn, "chat.completion.chunk")
        is_call = "tool_calls" in message
        if is_call:
            message = {**message, "tool_calls": [{"index": 0, **message["tool_calls"][0]}]}
        chunks: list[dict[str, Any]] = [
            {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if is_call else "stop"}]},
            {**head, "choices": [], "usage": USAGE},
        ]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        answers.append(with_head(events.encode(), b"text/event-stream"))
    return answers


def _chat_messages(task: Task) -> list[dict[str, Any]]:
    calls = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": f"call_{turn:04d}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
            ],
        }
        for turn, (name, arguments) in enumerate(task.tool_calls)
    ]
    return [*calls, {"role": "assistant", "content": task.text}]


def _chat_head(turn: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn:032d}", "object": kind, "created": 1_760_000_000, "model": "canned"}


class Model:
    """Answers by dialect and turn, and how many calls of rollouts there were, and when."""

    def __init__(self, task: Task) -> None:
        self.calls = 0
        self.first_s = self.last_s = 0.0
        self._responses, self._chat, self._streamed = (
            responses_answers(task),
            chat_answers(task),
            streamed_answers(task),
        )

    def answer(self, request: bytes) -> bytes:
        """The answer to a whole request, its head included."""
        path = request[: request.find(b"\r\n")]
        if not path.startswith(b"POST"):
            return NOT_FOUND
        if TOOLS in request:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.calls += 1
        if b"/responses" in path:
            return self._responses[min(request.count(RESPONSES_OUTPUT), len(self._responses) - 1)]
        is_streamed = b'"stream":true' in request or b'"stream": true' in request
        answers = self._streamed if is_streamed else self._chat
        return answers[min(request.count(CHAT_OUTPUT), len(answers) - 1)]


async def serve(model: Model) -> None:
    """Listen until standard input closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(0.0, model.answer), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    sys.stdout.write(f"{model.calls} {model.last_s - model.first_s}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    uvloop.run(serve(Model(TASKS[parser.parse_args().task])))
