"""Logging is set up here and nowhere else: diagnostics go to stderr, stdout carries the product.

Equal warnings are counted, not repeated: the first is written, and after some seconds how many more like it there were.
Half a minute later the next one is written again. What servers print that share a process is told apart by their names.
"""

import atexit
import contextlib
import logging
import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

from nemo_gym.process_inputs import RUNNING_INSTANCE
from nemo_gym.terminal import harmless

LOGGER_NAME = "nemo_gym"
SAME_AS = "ng_same_as"
"""`extra` of a warning that differs from others like it in details only: what those have in common."""
_QUIET_S = 30.0
_REST_AFTER_S = 5.0
_MOST_REMEMBERED = 500
_SHORT = 200


@dataclass
class _Told:
    """A warning that was written."""

    at_s: float
    text: str
    more: int = 0
    """How many like it were not."""


class Repeats:
    """Which warnings have been written lately."""

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._told: dict[tuple[str, int, str], _Told] = {}
        self._forgotten: list[_Told] = []
        """Those that made room for newer ones while there was something left to say of them."""

    def remark_on(self, record: logging.LogRecord) -> str | None:
        """What to add to a warning that is to be written; None when it is only to be counted."""
        text = record.getMessage()
        key = (record.name, record.levelno, getattr(record, SAME_AS, text))
        told, now_s = self._told.get(key), time.monotonic()
        if told is not None and now_s - told.at_s < self._quiet_s:
            told.more += 1
            return None
        if told is None and len(self._told) >= _MOST_REMEMBERED:
            oldest = self._told.pop(next(iter(self._told)))
            if oldest.more:
                self._forgotten.append(oldest)
        self._told[key] = _Told(now_s, text)
        return f" ({_more(told.more)})" if told is not None and told.more else ""

    def rest(self) -> list[str]:
        """What was counted since the last time, one line for each warning."""
        counted = [*self._forgotten, *(told for told in self._told.values() if told.more)]
        lines = [f"{_more(told.more)}: {told.text.partition(chr(10))[0][:_SHORT]}" for told in counted]
        for told in counted:
            told.more = 0
        self._forgotten.clear()
        return lines

    def forget(self) -> None:
        """Forget what was told: the next line of every kind is told again."""
        self._told.clear()


def _more(count: int) -> str:
    return f"\N{HORIZONTAL ELLIPSIS} {count} more like this"


class _LevelPrefixFormatter(logging.Formatter):
    """Plain text for information, the level's name in front of anything that needs attention; no escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        text = harmless(super().format(record))
        return text if record.levelno <= logging.INFO else f"{record.levelname.capitalize()}: {text}"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment, so that a redirected stderr is respected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._repeats = Repeats()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless it is a warning like one that was written a moment ago."""
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        remark = self._repeats.remark_on(record)
        if remark is None:
            self._write_rest_soon()
            return
        if remark:
            told = {**record.__dict__, "msg": f"{record.getMessage()}{remark}", "args": None, "exc_info": None}
            record = logging.makeLogRecord({**told, "exc_text": None})
        super().emit(record)

    def _write_rest_soon(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(_REST_AFTER_S, self.write_rest)
            self._timer.daemon = True
            self._timer.start()

    def write_rest(self) -> None:
        """Say what was only counted."""
        with self.lock or contextlib.nullcontext():
            self._timer = None
            for line in self._repeats.rest():
                super().emit(logging.makeLogRecord({"msg": line, "levelno": logging.WARNING, "levelname": "WARNING"}))

    def begin_anew(self) -> None:
        """Say what was counted, and write every warning that comes, also one that was written before."""
        self.write_rest()
        self._repeats.forget()

    def close(self) -> None:
        """Leave nothing untold when the process ends."""
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            self.write_rest()
        super().close()

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def tell_what_was_counted() -> None:
    """Say of warnings that were only counted how many there were, before the process ends."""
    for handler in logging.getLogger(LOGGER_NAME).handlers:
        if isinstance(handler, _StderrHandler):
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                handler.write_rest()


def setup_logging(*, verbose: bool = False) -> None:
    """Send this package's log records to stderr; safe to call more than once.

    Records still reach the root logger: a program that has handlers of its own there keeps seeing them.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    ours = [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]
    for handler in ours:
        handler.begin_anew()
    if not ours:
        handler = _StderrHandler()
        handler.setFormatter(_LevelPrefixFormatter())
        logger.addHandler(handler)
        atexit.register(tell_what_was_counted)  # logging's own list of handlers is emptied by whoever configures it


class PrefixedStream:
    """A text stream that puts `(instance) ` in front of every line written for an instance."""

    def __init__(self, stream: TextIO, fallback: str) -> None:
        self._stream = stream
        self._fallback = fallback
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Write `text`, each of its lines prefixed."""
        if text:
            prefix = f"({RUNNING_INSTANCE.get() or self._fallback}) "
            body = text.removesuffix("\n").replace("\n", f"\n{prefix}")
            start = prefix if self._at_line_start else ""
            self._at_line_start = text.endswith("\n")
            self._stream.write(f"{start}{body}{text[len(text.removesuffix(chr(10))) :]}")
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def prefix_output(fallback: str) -> None:
    """Attribute everything this process prints to the instance it was printed for."""
    sys.stdout = PrefixedStream(sys.stdout, fallback)
    sys.stderr = PrefixedStream(sys.stderr, fallback)
