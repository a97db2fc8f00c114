"""Taking a port, or holding it for a server to come, and saying who has it when it cannot be taken."""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_gym.errors import ConfigError


def listen(host: str, port: int, who: str, remedy: str, *, exclusive: bool = False) -> socket.socket:
    """A socket that listens on `host:port`; a port in use is a clear error that names its holder when it can be known.

    With `exclusive`, a port that is held for somebody, or that remembers connections, is in use, too.
    """
    with _explained(host, port, who, remedy):
        bound = _bound(host, port, exclusive=exclusive)
        try:
            bound.listen(16_384)
        except OSError:
            bound.close()
            raise
        return bound


def hold(host: str, port: int, who: str, remedy: str, *, exclusive: bool) -> socket.socket | None:
    """Keep a port for a server that will be started: whoever looks for a free one meanwhile takes another.

    The server itself can listen there, as long as the socket that is returned does not. Only Linux has that: elsewhere
    it is looked whether the port is free, and nothing is kept.
    """
    if not exclusive:
        listen(host, port, who, remedy).close()
    with _explained(host, port, who, remedy):
        bound = _bound(host, port, exclusive=exclusive)
    if sys.platform != "linux":
        bound.close()
        return None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound


def _bound(host: str, port: int, *, exclusive: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; without it small answers wait 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if not exclusive:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


@contextlib.contextmanager
def _explained(host: str, port: int, who: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = pid_listening_on(port)
            by = f" by process {holder}" if holder else ""
            raise ConfigError(f"port {port} for {who} is already in use{by}; choose another with {remedy}") from error
        raise ConfigError(f"{who} cannot listen on {host}:{port}: {error.strerror or error}") from error


def pid_listening_on(port: int) -> int | None:
    """The process that listens on `port`, where the system tells (Linux, same user or root)."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return next((pid for pid in _pids() if inodes & _open_files(pid)), None) if inodes else None


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _open_files(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed since
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))  # noqa: PTH115
    return found
