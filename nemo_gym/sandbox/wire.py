"""What the two sides say to each other: JSON, each message after its length, and how long one waits for it."""

import json
import os
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_CHUNK = 1 << 20


class ConnectionLostError(Exception):
    """The other side has gone."""


class TooLateError(Exception):
    """The other side did not answer in time."""


def send(descriptor: int, message: Any) -> None:
    """Write one message.

    Raises:
        ConnectionLostError: nobody reads any more.
        ValueError: the message is too long.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long; at most {MAX_MESSAGE_BYTES} are allowed")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        except BrokenPipeError:
            raise ConnectionLostError from None


def receive(descriptor: int, timeout_s: float | None = None) -> Any:
    """Read one message.

    Raises:
        ConnectionLostError: the stream ended.
        TooLateError: it was not complete within `timeout_s`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionLostError
    return json.loads(_read(descriptor, length, deadline))


def _read(descriptor: int, length: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while length:
        if deadline is not None and not _is_ready(descriptor, deadline):
            raise TooLateError
        part = os.read(descriptor, min(length, _CHUNK))
        if not part:
            raise ConnectionLostError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _is_ready(descriptor: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
