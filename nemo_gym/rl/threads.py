"""Threads for calls that may block, kept for the next call, and never waited for.

Unlike those of `concurrent.futures` there is no bound on them and the interpreter ends without them: a call that
never returns keeps neither other calls nor the program waiting.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_IDLE_FOR_S = 30.0


class DaemonThreads:
    """Runs jobs at once, each in a thread of its own; a thread with nothing to do ends after a while."""

    def __init__(self, idle_for_s: float = _IDLE_FOR_S) -> None:
        self._idle_for_s = idle_for_s
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._free = 0
        """Threads that wait, less jobs that wait."""
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise."""
        with self._lock:
            self._free -= 1
            is_short = self._free < 0
            if is_short:
                self._free += 1
        self._jobs.put(job)
        if is_short:
            threading.Thread(target=self._work, name="nemo-gym-rl-call", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_for_s)
            except Empty:
                with self._lock:
                    if self._free <= 0:  # a job that counts on this thread is about to be put
                        continue
                    self._free -= 1
                    return
            job()
            with self._lock:
                self._free += 1
