"""Notices a handler that blocks the event loop, and says whose it is and what helps.

In a host process one blocking handler stops every server in it, and nothing else would show why.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

BLOCKED_AFTER_S = 2.0
_CHECK_EVERY_S = 0.25


@contextmanager
def watch_loop(loop: asyncio.AbstractEventLoop, folders: Mapping[Path, str]) -> Iterator[None]:
    """While inside, log who blocks `loop`; `folders` says which server's code lives where."""
    last_beat = time.monotonic()
    stopped = threading.Event()
    loop_thread = threading.get_ident()

    def beat() -> None:
        nonlocal last_beat
        last_beat = time.monotonic()
        timers[0] = loop.call_later(_CHECK_EVERY_S, beat)

    def watch() -> None:
        reported = False
        while not stopped.wait(_CHECK_EVERY_S):
            blocked_s = time.monotonic() - last_beat
            if blocked_s < BLOCKED_AFTER_S:
                reported = False
            elif not reported:
                reported = True
                _report(sys._current_frames().get(loop_thread), blocked_s, folders)

    timers = [loop.call_later(0, beat)]
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        timers[0].cancel()


def _report(frame: object, blocked_s: float, folders: Mapping[Path, str]) -> None:
    stack = traceback.extract_stack(frame) if frame is not None else []  # type: ignore[arg-type]
    for entry in reversed(stack):
        for folder, name in folders.items():
            if Path(entry.filename).is_relative_to(folder):
                logger.warning(
                    "server %r has blocked its process for %.1f s in %s (%s, line %s); all servers in the process "
                    "wait. Use `await asyncio.to_thread(...)` for blocking work, or give the server a process of its "
                    "own with `isolation: process` in its block",
                    name,
                    blocked_s,
                    entry.name,
                    entry.filename,
                    entry.lineno,
                )
                return
    where = f"{stack[-1].filename}, line {stack[-1].lineno}" if stack else "unknown place"
    logger.warning("the event loop of this process has been blocked for %.1f s at %s", blocked_s, where)
