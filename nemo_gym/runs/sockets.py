"""Where a collector can be asked while it is at work: a socket in a private folder of the user, and how to talk to it.

The folder is nobody else's (mode 0700, as the socket is 0600), and both ends make sure that the other one is the same
user. It is never beside the output: that may be on a file system without sockets, or have too long a name for one. The
address is in the lock file of the output; all addresses together are what the folder holds.

What is said is JSON, one object per line: a request `{"do": ...}`, an answer `{"ok": true, ...}` or `{"ok": false,
"error": ...}`. Nobody waits for the other side longer than a few seconds.
"""

import asyncio
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from nemo_gym.errors import ConfigError, GymError
from nemo_gym.process_inputs import runtime_folder
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import address_in, is_being_written
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Answering: TypeAlias = Callable[[Request], Awaitable[Answer]]
"""What answers a request; a `GymError` that it raises is told to whoever asked."""

MOST_REQUEST_BYTES = 64 << 10
MOST_ANSWER_BYTES = 4 << 20
ANSWERS_WITHIN_S = 10.0
_LISTS_WITHIN_S = 2.0
_CONNECTS_WITHIN_S = 0.2
_MOST_CLIENTS = 16
_PAUSE_S = 0.05
"""After each answer, so that nobody keeps a run busy with questions."""
_SAYS_WITHIN_S = 30.0
_TAKES_WITHIN_S = 10.0
_LOOK_EVERY_S = 20.0
_LONGEST_ADDRESS = 103
"""Bytes that every system takes; Linux would take 107."""
_PRIVATE = 0o700
_BACKLOG = 64
_ASKED_AT_ONCE = 16
_LEFT_BEHIND_S = 60.0
_SHORTEST_ID = 4
_ID_LENGTH = 12
_NAME = re.compile(rf"(?P<id>[0-9a-f]{{{_ID_LENGTH}}})-[0-9a-f]{{8}}\.sock", re.ASCII)
_UNFINISHED = ".new"


class NoAnswerError(GymError):
    """A collector that cannot be asked: it has ended, is not ours, or says nothing."""


def run_id(rollouts: Path) -> str:
    """What a run is called in addresses; the same as long as its file keeps its place."""
    return hashlib.sha256(os.fsencode(rollouts.absolute())).hexdigest()[:_ID_LENGTH]


def socket_folders() -> list[Path]:
    """Where sockets may be, the best place first; they need not exist."""
    given = runtime_folder()
    own = f"nemo_gym-{os.geteuid()}"
    folders = [Path(given) / "nemo_gym"] if given is not None else []
    temporary = Path(tempfile.gettempdir(), own)
    return [*folders, temporary if _is_short(temporary) else Path("/tmp", own)]


def _is_short(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len("/012345678901-01234567.sock") <= _LONGEST_ADDRESS


def _is_private(folder: Path) -> bool:
    """Whether a folder is really one, and nobody but this user can look into it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _usable_folder() -> Path:
    problems = []
    for folder in socket_folders():
        if not _is_short(folder):
            problems.append(f"{folder} is too long a name")
            continue
        try:
            folder.mkdir(_PRIVATE)
        except FileExistsError:
            pass
        except OSError as error:
            problems.append(str(error))
            continue
        if _is_private(folder):
            return folder
        problems.append(f"{folder} is not a folder of this user alone (mode 0700)")
    raise OSError(errno.EACCES, "; ".join(problems))


@contextmanager
def listening(rollouts: Path) -> Iterator[tuple[socket.socket, Path]]:
    """A socket that listens for requests about the run of that output, and its address; gone when the block ends.

    Raises:
        OSError: there can be none.
    """
    folder = _usable_folder()
    remove_stale(folder)
    address = folder / f"{run_id(rollouts)}-{secrets.token_hex(4)}.sock"
    unfinished = address.with_suffix(_UNFINISHED)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(unfinished))
        try:
            unfinished.chmod(0o600)
            listener.listen(_BACKLOG)
            unfinished.rename(address)  # only now: whoever finds a socket that refuses takes it for left behind
            yield listener, address
        finally:
            for path in (unfinished, address):
                with suppress(OSError):
                    path.unlink()


def remove_stale(folder: Path) -> list[Path]:
    """Remove the sockets of collectors that are gone; those that are left."""
    left = []
    for path in sorted(folder.glob("*.sock")):
        if _NAME.fullmatch(path.name):
            try:
                _connected(path, _CONNECTS_WITHIN_S).close()
            except ConnectionRefusedError:
                with suppress(OSError):
                    path.unlink()
                continue
            except OSError:
                pass
            left.append(path)
    for path in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFT_BEHIND_S:
                path.unlink()
    return left


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end.

    Raises:
        OSError: that cannot be told.
    """
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", found)[1])
    if sys.platform == "darwin":  # struct xucred, by LOCAL_PEERCRED of SOL_LOCAL
        return int(struct.unpack("II", connection.getsockopt(0, 1, 76)[:8])[1])
    raise OSError(errno.ENOTSUP, "this system does not say who is at the other end of a socket")


async def attend(output: Path, answer: Answering, announce: Callable[[Path], object]) -> None:
    """Answer whoever asks about the run of that output, until cancelled.

    A socket that vanishes, as with a folder that is removed when its user logs out, is made again. Without any, the
    run goes on, and one warning says so.
    """
    while True:
        try:
            with listening(output) as (listener, address):
                announce(address)
                await _until_gone(listener, address, answer)
        except OSError as error:
            logger.warning("This run cannot be steered or asked with ng_control and ng_status: %s", error)
            return


async def _until_gone(listener: socket.socket, address: Path, answer: Answering) -> None:
    loop = asyncio.get_running_loop()
    clients: dict[asyncio.Task[None], socket.socket] = {}

    def leave(client: asyncio.Task[None]) -> None:
        clients.pop(client).close()  # which may not have come to its first step

    try:
        while True:
            try:
                await _readable(listener)
                connection, _ = listener.accept()
            except TimeoutError:
                if not address.exists():  # noqa: ASYNC240 - in a folder of the machine's own, now and then
                    return
                continue
            except BlockingIOError:  # whoever knocked has gone
                continue
            except OSError:  # no more files can be opened just now
                await asyncio.sleep(1.0)
                continue
            if len(clients) >= _MOST_CLIENTS:
                connection.close()
                continue
            client = loop.create_task(_talk(connection, answer))
            clients[client] = connection
            client.add_done_callback(leave)
    finally:
        for client in list(clients):
            client.cancel()


async def _readable(listener: socket.socket) -> None:
    """Wait until somebody knocks; unlike `sock_accept`, a wait that is cancelled loses no connection.

    Raises:
        TimeoutError: nobody has for a while.
    """
    loop, knocked = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, knocked.set)
    try:
        async with asyncio.timeout(_LOOK_EVERY_S):
            await knocked.wait()
    finally:
        loop.remove_reader(listener)


async def _talk(connection: socket.socket, answer: Answering) -> None:
    """Answer one client until it goes, says what nobody understands, or keeps us waiting."""
    loop = asyncio.get_running_loop()
    with connection, suppress(OSError, TimeoutError):
        connection.setblocking(False)
        if peer_uid(connection) != os.geteuid():
            await _send(connection, {"ok": False, "error": "this run is another user's"})
            return
        unread = bytearray()
        while True:
            async with asyncio.timeout(_SAYS_WITHIN_S):
                while b"\n" not in unread and len(unread) <= MOST_REQUEST_BYTES:
                    piece = await loop.sock_recv(connection, MOST_REQUEST_BYTES)
                    if not piece:
                        return
                    unread += piece
            line, end, rest = bytes(unread).partition(b"\n")
            if not end or len(line) > MOST_REQUEST_BYTES:
                await _send(connection, {"ok": False, "error": f"a request has at most {MOST_REQUEST_BYTES} bytes"})
                return
            unread = bytearray(rest)
            await _send(connection, await _answer(line, answer))
            await asyncio.sleep(_PAUSE_S)


async def _answer(line: bytes, answer: Answering) -> Answer:
    try:
        request = orjson.loads(line)
        if not isinstance(request, dict):
            raise ValueError
    except ValueError:
        return {"ok": False, "error": "a request is one JSON object on a line of its own"}
    try:
        return {"ok": True, **await answer(request)}
    except GymError as error:
        return {"ok": False, "error": str(error)}
    except Exception as error:
        logger.exception("a request could not be answered")
        return {"ok": False, "error": f"the collector could not answer: {error!r}"}


async def _send(connection: socket.socket, answer: Answer) -> None:
    content = orjson.dumps(answer, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n"
    async with asyncio.timeout(_TAKES_WITHIN_S):
        await asyncio.get_running_loop().sock_sendall(connection, content)


def _connected(address: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


def ask(address: Path, request: Request, timeout_s: float = ANSWERS_WITHIN_S) -> Answer:
    """What the collector at an address answers.

    Raises:
        ConfigError: it refuses, and says why.
        NoAnswerError: there is none, it is somebody else's, or it says nothing that can be understood in time.
    """
    if not (_NAME.fullmatch(address.name) and _is_private(address.parent)):
        raise NoAnswerError(f"{address} is not in a private folder of this user, and nobody is asked there")
    try:
        with _connected(address, timeout_s) as connection:
            if peer_uid(connection) != os.geteuid():
                raise NoAnswerError(f"another user listens at {address}; nothing is asked there")
            connection.sendall(orjson.dumps(request) + b"\n")
            answer = orjson.loads(_line(connection, time.monotonic() + timeout_s))
    except OSError as error:
        reason = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise NoAnswerError(f"the collector at {address} cannot be asked: {reason}") from error
    except ValueError as error:
        raise NoAnswerError(f"the collector at {address} ended, or answers what nobody understands") from error
    if not isinstance(answer, dict):
        raise NoAnswerError(f"the collector at {address} answers what nobody understands")
    if answer.get("ok") is not True:
        raise ConfigError(str(answer.get("error") or "the collector refuses and does not say why"))
    return answer


def _line(connection: socket.socket, by_s: float) -> bytes:
    """What comes in up to the end of a line, as far as that is in time and not too much."""
    content = bytearray()
    while not content.endswith(b"\n"):
        connection.settimeout(max(0.01, by_s - time.monotonic()))
        piece = connection.recv(1 << 16)
        content += piece
        if not piece or len(content) > MOST_ANSWER_BYTES or time.monotonic() > by_s:
            break
    return bytes(content)


@dataclass(frozen=True)
class LivingRun:
    """A run that a collector of this user on this machine is at work on."""

    address: Path
    status: Answer

    @property
    def output(self) -> Path:
        """Its rollouts file."""
        return Path(str(self.status.get("output", "")))

    @property
    def id(self) -> str:
        """What it is called for short."""
        return str(self.status.get("id", ""))

    def __str__(self) -> str:
        return f"{shown(str(self.output))} ({shown(self.id)})"


def addresses() -> list[Path]:
    """Where collectors of this user listen on this machine."""
    return [path for folder in socket_folders() if _is_private(folder) for path in remove_stale(folder)]


def living_runs() -> list[LivingRun]:
    """The runs that can be asked, each with how it stands; those that say nothing are left out."""
    found = addresses()
    if not found:
        return []
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(found))) as pool:
        statuses = list(pool.map(_status_or_none, found))
    runs = [LivingRun(address, status) for address, status in zip(found, statuses, strict=True) if status is not None]
    return sorted(runs, key=lambda run: str(run.status.get("since")))


def _status_or_none(address: Path) -> Answer | None:
    try:
        return ask(address, {"do": "status"}, _LISTS_WITHIN_S)
    except GymError:
        return None


def find_run(wanted: str | None) -> Path:
    """The address of the run with that output or id; without either, of the only one there is.

    Raises:
        ConfigError: there is none, or more than one; it names those there are.
    """
    if wanted is not None:
        paths = RolloutPaths(Path(wanted).expanduser())
        address = address_in(paths)
        if address is not None:
            return address
        by_id = [path for path in addresses() if len(wanted) >= _SHORTEST_ID and path.name.startswith(wanted)]
        if len(by_id) == 1:
            return by_id[0]
        if is_being_written(paths):
            raise ConfigError(
                f"+run={wanted}: its collector is preparing or concluding it, or is on another machine, and cannot be "
                "asked from here now"
            )
    runs = living_runs()
    named = runs if wanted is None else [run for run in runs if _is_meant(run, wanted)]
    if len(named) == 1:
        return named[0].address
    raise ConfigError(_not_found(wanted, runs))


def _is_meant(run: LivingRun, wanted: str) -> bool:
    return wanted in (run.id, run.output.name, run.output.stem) or run.output == Path(wanted).expanduser().absolute()


def _not_found(wanted: str | None, runs: list[LivingRun]) -> str:
    if not runs:
        what = "no run" if wanted is None else f"+run={shown(wanted)} is not"
        return f"{what} being collected by this user on this machine; ng_status lists those that are"
    what = "name one with +run" if wanted is None else f"+run={shown(wanted)} is not one of them"
    return f"{what}; being collected here: {', '.join(map(str, runs))}"
