"""Ctrl-C, SIGTERM and a closed terminal, as requests to end the run in an orderly way.

The first asks to stop, the second to stop at once. Both are carried out by the event loop; a third,
which means that the loop does not get round to it, interrupts whatever is going on.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RequestStop(Protocol):
    """Asks a run to stop, or to stop at once."""

    def __call__(self, *, at_once: bool) -> None:
        """Ask for it; called in the event loop."""


@contextmanager
def stopping_on_signals(request_stop: RequestStop) -> Iterator[None]:
    """Let signals call `request_stop` in the running event loop.

    Signals that are ignored, as by `nohup`, stay ignored. Outside of the main thread, where Python
    delivers no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    received = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 2:
            raise KeyboardInterrupt
        at_once = received > 1
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to stop
            loop.call_soon_threadsafe(lambda: request_stop(at_once=at_once))

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
