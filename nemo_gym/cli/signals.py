"""Ctrl-C, SIGTERM and a closed terminal, as requests to stop rather than as exceptions out of nowhere.

A request takes effect between two steps, never between starting a process and noting that it was
started. The second one takes effect at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stoppable(Protocol):
    """Something that can be asked to stop."""

    def request_stop(self, *, at_once: bool = False) -> None:
        """Stop soon, or at once."""


@contextmanager
def stopping_on_signals(target: Stoppable) -> Iterator[None]:
    """Ask `target` to stop on the first signal; on the second, at once, with `KeyboardInterrupt`.

    Signals that are ignored, as by `nohup` or for a job in the background, stay ignored. Main thread only.
    """
    received = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        target.request_stop(at_once=received > 1)
        if received > 1:
            raise KeyboardInterrupt

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
