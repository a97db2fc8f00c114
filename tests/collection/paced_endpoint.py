"""A model endpoint that allows so many requests a minute and answers 429 above: `python paced_endpoint.py LIMIT LOG`.

It prints its port. Its log has one line per request: the time of the monotonic clock, and the status it answered.
Requests that are allowed come from a bucket that holds one second's worth and is filled evenly.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

ANSWER_AFTER_S = 0.1
MESSAGE = {"type": "output_text", "text": "Au", "annotations": []}
USAGE = {"input_tokens": 20, "output_tokens": 5, "total_tokens": 25}
RESPONSE = {
    "id": "resp_1",
    "created_at": 1,
    "model": "m",
    "object": "response",
    "output": [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [MESSAGE]}],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": USAGE,
}


class Endpoint:
    """The endpoint as an ASGI app."""

    def __init__(self, per_minute: float, log: Path) -> None:
        self._per_s = per_minute / 60
        self._left, self._at_s = self._per_s, time.monotonic()
        self._log = log.open("w", buffering=1)

    def _allows(self, now_s: float) -> bool:
        self._left = min(self._per_s, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        now_s = time.monotonic()
        is_allowed = self._allows(now_s)
        self._log.write(f"{now_s} {200 if is_allowed else 429}\n")
        while (await receive()).get("more_body"):
            pass
        if is_allowed:
            await asyncio.sleep(ANSWER_AFTER_S)
        body = json.dumps(RESPONSE if is_allowed else {"error": {"message": "Rate limit reached"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if is_allowed else 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until killed."""
    per_minute, log = sys.argv[1:]
    config = uvicorn.Config(Endpoint(float(per_minute), Path(log)), log_level="critical", lifespan="off", port=0)
    bound = config.bind_socket()
    server = uvicorn.Server(config)
    sys.stdout.write(f"{bound.getsockname()[1]}\n")
    sys.stdout.flush()
    server.run(sockets=[bound])


if __name__ == "__main__":
    main()
