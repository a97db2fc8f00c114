"""Taking a port, and saying who has it when it cannot be taken."""

import contextlib
import errno
import os
import socket
from pathlib import Path

from nemo_gym.errors import ConfigError


def listen(host: str, port: int, who: str, remedy: str) -> socket.socket:
    """A socket bound to `host:port`; a port in use is a clear error that names its holder when it can be known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; without it small answers wait 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(16_384)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            holder = pid_listening_on(port)
            by = f" by process {holder}" if holder else ""
            raise ConfigError(f"port {port} for {who} is already in use{by}; choose another with {remedy}") from error
        raise ConfigError(f"{who} cannot listen on {host}:{port}: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound


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
