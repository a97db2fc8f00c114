"""Where the output of server processes goes: the terminal or a log file per server, and the memory of its last lines.

Lines that a host prints for one of its servers arrive as `(name) text`; a server alone in its process
may or may not prefix its own lines. Here every line gets its owner, once, and loses what could act on a terminal.
"""

import logging
import re
import sys
import threading
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import IO

from nemo_gym.errors import ConfigError
from nemo_gym.keys import NEMO_GYM_LOG_DIR_KEY_NAME
from nemo_gym.terminal import harmless

logger = logging.getLogger(__name__)

KEPT_LINES = 50
_KEPT_LINE_LENGTH = 2_000
_PREFIX = re.compile(r"\((?P<owner>[^()]+)\) ?(?P<text>.*)", re.DOTALL)
_TERMINAL_LOCK = threading.Lock()


def open_log_folder(log_dir: str | None) -> Path | None:
    """The folder for log files, made if need be; None when output goes to the terminal."""
    if not log_dir:
        return None
    folder = Path(log_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{NEMO_GYM_LOG_DIR_KEY_NAME}: cannot make the folder {folder}: {error.strerror}") from error
    return folder


class ServerOutput:
    """Takes the lines of one process, which belong to it or to one of the servers in it."""

    def __init__(self, owner: str, servers: Collection[str] = (), log_folder: Path | None = None) -> None:
        self._owner = owner
        self._servers = frozenset(servers)
        self._log_folder = log_folder
        self._files: dict[str, IO[str]] = {}
        self._lost: set[str] = set()
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The most recent lines, oldest first."""
        with self._lock:
            return list(self._last)

    def log_file(self, owner: str) -> Path | None:
        """The log file of this process or of one server in it."""
        return None if self._log_folder is None else self._log_folder / f"{owner.replace('/', '_')}.log"

    def write(self, raw: bytes) -> None:
        """Take one line."""
        for line in raw.decode(errors="replace").rstrip("\r\n").split("\r"):  # a progress bar rewrites its line
            self._take(harmless(line))

    def close(self) -> None:
        """Close the log files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _take(self, line: str) -> None:
        prefix = _PREFIX.fullmatch(line)
        owner, text = self._owner, line
        if prefix and (prefix["owner"] == self._owner or prefix["owner"] in self._servers):
            owner, text = prefix["owner"], prefix["text"]
        with self._lock:
            self._last.append((text if owner == self._owner else line)[:_KEPT_LINE_LENGTH])
            if self._log_folder is not None:
                self._write_to_file(owner, text)
                return
        _write_to_terminal(f"({owner}) {text}\n")

    def _write_to_file(self, owner: str, text: str) -> None:
        path = self.log_file(owner)
        assert path is not None
        try:
            if owner not in self._files:
                self._files[owner] = path.open("a", encoding="utf-8", buffering=1)
            self._files[owner].write(text + "\n")
        except OSError as error:  # a full disk is no reason to stop reading, which would stop the server
            if owner not in self._lost:
                logger.warning("%s: output is lost from here on (%s)", path, error.strerror)
            self._lost.add(owner)


def _write_to_terminal(text: str) -> None:
    with _TERMINAL_LOCK:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more; the servers must run on all the same
            return
