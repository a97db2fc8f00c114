"""One child process: started without a shell in a process group of its own, its output read, its group stopped.

A group of its own means that Ctrl-C in the terminal reaches the launcher only, and that stopping the
child stops everything it started itself, such as uvicorn's workers.

Its output goes to the terminal or to a log file per server, and its last lines are remembered. Lines that a host
prints for one of its servers arrive as `(name) text`; a server alone in its process may or may not prefix its own
lines. Here every line gets its owner, once, and loses what could act on a terminal. When it ends, its last lines
help to say why, and what to do about it.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from nemo_gym.errors import ConfigError
from nemo_gym.keys import NEMO_GYM_LOG_DIR_KEY_NAME, SERVER_TYPES
from nemo_gym.launch.requirements import PROJECT_FILE, canonical
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import OWN_NAME
from nemo_gym.terminal import harmless

logger = logging.getLogger(__name__)

KEPT_LINES = 50
_KEPT_LINE_LENGTH = 2_000
_PREFIX = re.compile(r"\((?P<owner>[^()]+)\) ?(?P<text>.*)", re.DOTALL)
_TERMINAL_LOCK = threading.Lock()
_LONGEST_LINE_BYTES = 64 * 1024
_DRAIN_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.02
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>[\w.]+)'")
_PACKAGE_OF_MODULE = {
    "Crypto": "pycryptodome",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "GitPython",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Where the package to install is not called like the module."""


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


@dataclass(frozen=True)
class CommandLine:
    """What to run, where and with which environment."""

    arguments: Sequence[str]
    folder: Path | None = None
    environment: Mapping[str, str] | None = None
    keep_descriptors: tuple[int, ...] = ()


class Running(Protocol):
    """A process that leads a group of its own and was started already, in the words of `subprocess.Popen`."""

    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or `subprocess.TimeoutExpired`."""


class ChildProcess:
    """A process in a group of its own; every line it writes to stdout or stderr goes to `take_line`."""

    def __init__(
        self, command: CommandLine | Running, take_line: Callable[[bytes], None], warden: Warden | None = None
    ) -> None:
        self._warden = warden
        self._ended = threading.Lock()
        self._is_cleaned_up = False
        self._process: Running = _start(command) if isinstance(command, CommandLine) else command
        if warden is not None:
            warden.watch(self.pid)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, take_line), name=f"output of {self.pid}", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process, which is also the number of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; a negative number is a signal. Whatever it left in its group is killed."""
        code = self._process.poll()
        if code is not None:
            self._clean_up()
        return code

    def send_signal(self, number: int) -> None:
        """Signal the whole group."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """End the whole group at once and wait until the process is gone."""
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
            self._clean_up()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.exit_code()

    def _clean_up(self) -> None:
        """Once the leader is gone: end the rest of its group and read what is still unread."""
        with self._ended:
            if self._is_cleaned_up:
                return
            self._is_cleaned_up = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if self._warden is not None:
                self._warden.forget(self.pid)
            self._reader.join(_DRAIN_TIMEOUT_S)


def _start(command: CommandLine) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command.arguments,
        cwd=command.folder,
        env=command.environment,
        pass_fds=command.keep_descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop_all(children: Iterable[ChildProcess], grace_s: float) -> list[ChildProcess]:
    """Ask every group to end, kill what is left after `grace_s`; those that had to be killed.

    SIGTERM rather than SIGINT: a launcher in the background of a script has SIGINT ignored, and so have its children.
    """
    running = [child for child in children if child.exit_code() is None]
    for child in running:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while running and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        running = [child for child in running if child.exit_code() is None]
    for child in running:
        child.send_signal(signal.SIGKILL)
    for child in running:
        child.kill()
    return running


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"


def _read_lines(stream: IO[bytes], take_line: Callable[[bytes], None]) -> None:
    with stream, contextlib.suppress(OSError, ValueError):
        for line in iter(lambda: stream.readline(_LONGEST_LINE_BYTES), b""):
            take_line(line)


def missing_module(lines: Sequence[str]) -> str | None:
    """The module of somebody else that the last lines show to be missing, if any."""
    found = [match["module"] for line in lines if (match := _MISSING_MODULE.search(line))]
    if not found:
        return None
    first = found[-1].partition(".")[0]
    return None if canonical(first) == OWN_NAME or first in SERVER_TYPES else found[-1]


def package_of(module: str) -> str:
    """The package that has a module, as far as one can tell."""
    name = module.partition(".")[0]
    return _PACKAGE_OF_MODULE.get(name, name.replace("_", "-"))


def missing_import_remedy(lines: Sequence[str], requirements_file: Path) -> str | None:
    """What to add where, when the last lines show that a module is not installed."""
    module = missing_module(lines)
    if module is None:
        return None
    package = package_of(module)
    what = f'"{package}" to `dependencies`' if requirements_file.name == PROJECT_FILE else f"the line `{package}`"
    return f"The package {package!r} (module {module!r}) is not installed: add {what} in {requirements_file}"


def with_output(message: str, lines: Sequence[str], log_files: Sequence[Path], remedy: str | None = None) -> str:
    """`message` followed by where the log is, the last lines, and the remedy."""
    parts = [message]
    parts += [f"  log: {file}" for file in log_files]
    if lines:
        parts += ["  last lines:", *(f"  | {line}" for line in lines)]
    else:
        parts.append("  It has printed nothing.")
    if remedy:
        parts.append(remedy)
    return "\n".join(parts)
