"""`AsyncSandbox` and `Sandbox`: one sandbox of whatever provider, from its start to its end.

    async with AsyncSandbox({"docker": {}}, SandboxSpec(image="python:3.12")) as sandbox:
        await sandbox.start()
        result = await sandbox.exec("python --version")

A command that fails is a result, not an exception. Terminals are in `SandboxPty`, for providers that have them.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from nemo_gym.sandbox.providers.base import (
    RUNTIME_RETURN_CODE,
    TIMEOUT,
    ConnectableProvider,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    SandboxPtyError,
    SandboxPtySession,
    SandboxPtySpec,
    SandboxSpec,
    SandboxStatus,
    SupportsSandboxEndpoint,
    SupportsSandboxPty,
    SupportsSandboxPtyAttach,
)
from nemo_gym.sandbox.providers.registry import create_provider
from nemo_gym.sandbox.utils import exec_alone, exec_in_shell

SYNC_OPERATION_TIMEOUT_S = 3600.0
SANDBOX_PTY_RUNTIME_RETURN_CODE = RUNTIME_RETURN_CODE
SYNC_LOOP_CLOSE_TIMEOUT_S = 5.0
_Result = TypeVar("_Result")


class AsyncSandbox:
    """One sandbox. It is started once, and stopped when the `async with` around it ends."""

    def __init__(self, provider: Mapping[str, Any] | SandboxProvider, spec: SandboxSpec | None = None) -> None:
        """Start nothing yet.

        Args:
            provider: `{name: settings}`, as a config has it, or a provider; it is closed with the sandbox.
            spec: The sandbox that is wanted, if `start` is not told.

        Raises:
            ValueError: there is no such provider, or it does not take these settings.
        """
        self._provider: SandboxProvider = create_provider(provider) if isinstance(provider, Mapping) else provider
        self._spec = spec or SandboxSpec()
        self._handle: SandboxHandle | None = None
        self._is_stopped = False
        self._creating: asyncio.Future[SandboxHandle] | None = None
        self._stopping: asyncio.Future[None] | None = None
        self.pty = SandboxPty(self)
        """Terminals in it."""

    @property
    def provider(self) -> SandboxProvider:
        """Where it comes from."""
        return self._provider

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._spec

    @property
    def handle(self) -> SandboxHandle:
        """The running sandbox.

        Raises:
            RuntimeError: it was not started, or has been stopped.
        """
        if self._is_stopped:
            raise RuntimeError("Sandbox has been stopped")
        if self._handle is None:
            raise RuntimeError("Sandbox has not been started")
        return self._handle

    async def start(self, spec: SandboxSpec | None = None) -> "AsyncSandbox":
        """Make the sandbox and put the files of its spec inside.

        Raises:
            RuntimeError: it was started before, or stopped meanwhile; or `SandboxCreateError`, it could not be made.
        """
        if self._is_stopped:
            raise RuntimeError("Sandbox has been stopped and cannot be started again; make another one")
        if self._handle is not None or self._creating is not None:
            raise RuntimeError("Sandbox has been started already")
        self._spec = spec or self._spec
        creating = self._creating = asyncio.ensure_future(self._provider.create(self._spec))
        try:
            self._handle = await creating
        except asyncio.CancelledError:
            if self._has_made(creating):
                await self.stop()
            if not self._is_stopped or asyncio.current_task().cancelling():
                raise
        finally:
            self._creating = None
        if self._is_stopped:
            raise RuntimeError("Sandbox has been stopped while it was started")
        try:
            for target, text in self._spec.files.items():
                await self._put_text(text, target)
        except BaseException:
            await self.stop()
            raise
        return self

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = 180,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a shell command to its end, in the folder of the spec if none is named.

        Never raises for what the command does: one that cannot be run to its end returns 125 and an `error_type`.
        """
        folder = self._spec.workdir if cwd is None else cwd
        return await self._provider.exec(self.handle, command, cwd=folder, env=env, timeout_s=timeout_s, user=user)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy one file into the sandbox, with the folders that its path needs.

        Raises:
            FileNotFoundError: there is no such file here.
            RuntimeError: it could not be copied.
        """
        source = Path(local_path)
        if not await asyncio.to_thread(source.is_file):
            raise FileNotFoundError(f"{source} is no file, and cannot be copied into a sandbox")
        await self._provider.upload_file(self.handle, source, remote_path)

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Copy one file out of the sandbox, with the folders that its new path needs.

        Raises:
            RuntimeError: it could not be copied.
        """
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._provider.download_file(self.handle, remote_path, target)

    async def status(self) -> SandboxStatus:
        """What is known of it."""
        if self._is_stopped:
            return SandboxStatus.STOPPED
        return SandboxStatus.UNKNOWN if self._handle is None else await self._provider.status(self._handle)

    async def endpoint(self, port: int) -> SandboxEndpoint:
        """How a port of its spec is reached from here.

        Raises:
            ValueError: the spec does not name this port.
            NotImplementedError: the provider has no such thing.
        """
        if port not in self._spec.ports:
            raise ValueError(f"port {port} is not among the `ports` of the sandbox's spec: {list(self._spec.ports)}")
        if not isinstance(self._provider, SupportsSandboxEndpoint):
            raise NotImplementedError(f"sandboxes of {self._provider.name!r} cannot be called from outside")
        return await self._provider.endpoint(self.handle, port)

    async def stop(self) -> None:
        """Remove the sandbox with all that is in it, and close its provider; a second call only waits for the first.

        It goes on when its caller is cancelled, which happens over and over where a server has lost its client.
        """
        if self._stopping is None:
            self._is_stopped = True
            self._stopping = asyncio.ensure_future(self._remove())
            await asyncio.shield(self._stopping)
        elif not self._stopping.done():
            await asyncio.wait([self._stopping])

    async def _remove(self) -> None:
        try:
            await self._give_up_creating()
            await self.pty.close()
        finally:
            try:
                if self._handle is not None:
                    await self._provider.close(self._handle)
            finally:
                await self._provider.aclose()

    async def serialize(self, *, scope: str | None = None) -> dict[str, Any]:
        """What another process needs in order to `connect` to it.

        Raises:
            NotImplementedError: the provider has no such thing.
        """
        if not isinstance(self._provider, ConnectableProvider):
            raise NotImplementedError(f"sandboxes of {self._provider.name!r} cannot be handed to another process")
        return await self._provider.serialize_handle(self.handle, scope=scope)

    @classmethod
    async def connect(cls, descriptor: Mapping[str, Any] | Any, *, provider: SandboxProvider) -> "AsyncSandbox":
        """The sandbox that `serialize` described.

        Raises:
            NotImplementedError: the provider has no such thing.
        """
        if not isinstance(provider, ConnectableProvider):
            raise NotImplementedError(f"sandboxes of {provider.name!r} cannot be taken over from another process")
        if not isinstance(descriptor, Mapping):
            descriptor = descriptor.model_dump() if hasattr(descriptor, "model_dump") else vars(descriptor)
        sandbox = cls(provider)
        sandbox._handle = await provider.connect(descriptor)
        return sandbox

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _give_up_creating(self) -> None:
        """What is just being made is not to be left behind: its maker removes it, or it is known from here on."""
        if (creating := self._creating) is None:
            return
        creating.cancel()
        await asyncio.wait([creating])
        self._has_made(creating)

    def _has_made(self, creating: "asyncio.Future[SandboxHandle]") -> bool:
        """Whether there is a sandbox, which is known from here on, whoever waited for it."""
        if creating.done() and not creating.cancelled() and creating.exception() is None:
            self._handle = creating.result()
        return self._handle is not None

    async def _put_text(self, text: str, target: str) -> None:
        with tempfile.TemporaryDirectory(prefix="nemo-gym-upload-") as folder:
            source = Path(folder) / "file"
            source.write_text(text, encoding="utf-8")
            await self._provider.upload_file(self.handle, source, target)


class SandboxPty:
    """The terminals of one sandbox."""

    def __init__(self, sandbox: "AsyncSandbox") -> None:
        self._sandbox = sandbox
        self._shells: list[SandboxPtySession] = []
        self._others: list[SandboxPtySession] = []

    async def create(
        self,
        command: str | None = None,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        rows: int = 24,
        cols: int = 80,
        user: str | int | None = None,
        pty: bool = True,
    ) -> SandboxPtySession:
        """Open a session: the default shell, or a command.

        Raises:
            NotImplementedError: the provider has no terminals.
        """
        provider = self._sandbox.provider
        if not isinstance(provider, SupportsSandboxPty):
            raise NotImplementedError(f"sandboxes of {provider.name!r} have no terminals")
        spec = SandboxPtySpec(command, cwd, env, rows, cols, user, pty)
        session = await provider.create_pty(self._sandbox.handle, spec)
        (self._shells if spec == SandboxPtySpec() else self._others).append(session)
        return session

    async def attach(self, session_id: str, *, takeover: bool = True, since: int | None = None) -> SandboxPtySession:
        """Go on with a session that is known by its id.

        Raises:
            NotImplementedError: the provider has no such thing.
        """
        provider = self._sandbox.provider
        if not isinstance(provider, SupportsSandboxPtyAttach):
            raise NotImplementedError(f"terminal sessions of {provider.name!r} cannot be found again")
        session = await provider.attach_pty(self._sandbox.handle, session_id, takeover=takeover, since=since)
        self._others.append(session)
        return session

    async def exec(
        self,
        command: str,
        *,
        session: SandboxPtySession | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = 180,
        user: str | int | None = None,
        rows: int = 24,
        cols: int = 80,
        pty: bool = True,
    ) -> SandboxExecResult:
        """Run a command in a session: the one given, else the oldest default shell, else one of its own.

        Whoever asks for a folder, variables, a user, a size or no terminal gets a session of its own, which ends with
        the command.
        """
        is_plain = SandboxPtySpec(None, cwd, env, rows, cols, user, pty) == SandboxPtySpec()
        shells = [each for each in self._shells if is_plain and not _is_closed(each)]
        shell = session or (shells[0] if shells else None)
        try:
            async with asyncio.timeout(timeout_s):
                if shell is not None:
                    return await exec_in_shell(shell, command)
                private = await self.create(command, cwd=cwd, env=env, rows=rows, cols=cols, user=user, pty=pty)
                try:
                    return await exec_alone(private, is_terminal=pty)
                finally:
                    await private.close()
        except TimeoutError:
            return _failure(f"the command did not end within {timeout_s:g} s", TIMEOUT)
        except SandboxPtyError as error:
            return _failure(str(error), "sandbox")

    async def close(self) -> None:
        """Close every session that was opened here."""
        for session in [*self._shells, *self._others]:
            if not _is_closed(session):
                with contextlib.suppress(SandboxPtyError):
                    await session.close()


def _is_closed(session: SandboxPtySession) -> bool:
    closed: Any = session.closed
    return bool(closed() if callable(closed) else closed)


def _failure(message: str, error_type: str) -> SandboxExecResult:
    return SandboxExecResult("", message, SANDBOX_PTY_RUNTIME_RETURN_CODE, error_type)


class Sandbox:
    """`AsyncSandbox` for programs without an event loop: it has one of its own, in a thread."""

    def __init__(self, provider: Mapping[str, Any] | SandboxProvider, spec: SandboxSpec | None = None) -> None:
        """Start nothing yet; see `AsyncSandbox`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._first_stop = threading.Lock()
        self._sandbox = AsyncSandbox(provider, spec)

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._sandbox.spec

    def start(self, spec: SandboxSpec | None = None) -> "Sandbox":
        """Make the sandbox and put the files of its spec inside."""
        self._wait_for(self._sandbox.start(spec))
        return self

    def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = 180,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a shell command to its end; what it does is a result, never an exception."""
        return self._wait_for(self._sandbox.exec(command, cwd=cwd, env=env, timeout_s=timeout_s, user=user))

    def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy one file into the sandbox."""
        self._wait_for(self._sandbox.upload(local_path, remote_path))

    def download(self, remote_path: str, local_path: Path | str) -> None:
        """Copy one file out of the sandbox."""
        self._wait_for(self._sandbox.download(remote_path, local_path))

    def status(self) -> SandboxStatus:
        """What is known of it."""
        return self._wait_for(self._sandbox.status())

    def endpoint(self, port: int) -> SandboxEndpoint:
        """How a port of its spec is reached from here."""
        return self._wait_for(self._sandbox.endpoint(port))

    def stop(self) -> None:
        """Remove the sandbox with all that is in it; a second call does nothing."""
        _refuse_in_loop()
        if not self._first_stop.acquire(blocking=False):
            return
        try:
            self._wait_for(self._sandbox.stop())
        finally:
            self._close_loop()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None:
            with contextlib.suppress(Exception):
                try:
                    self.stop()
                except RuntimeError:  # inside an event loop, which is not to be held up
                    threading.Thread(target=self.stop, name="sandbox end", daemon=True).start()

    def _wait_for(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            _refuse_in_loop()
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            future = None if self._sandbox._is_stopped else asyncio.run_coroutine_threadsafe(work, self._running_loop())
        if future is None:  # it only has to be said that it is stopped
            return asyncio.run(work)
        try:
            return future.result(SYNC_OPERATION_TIMEOUT_S)
        except futures.TimeoutError:
            if future.done():  # the work itself raised it
                raise
            future.cancel()
            raise TimeoutError(f"the sandbox did not answer within {SYNC_OPERATION_TIMEOUT_S:g} s") from None
        except futures.CancelledError:
            raise RuntimeError("Sandbox has been stopped") from None
        except BaseException:
            future.cancel()
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
            self._thread.start()
        return self._loop

    def _close_loop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        with contextlib.suppress(futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(_end_others(), loop).result(3 * SYNC_LOOP_CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(SYNC_LOOP_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            loop.close()


def _refuse_in_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("Sandbox blocks and cannot be used inside a running event loop; use AsyncSandbox there")


async def _end_others() -> None:
    """Let everything in this loop that other threads wait for come to its end, or end it."""
    for _ in range(2):
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(others, timeout=SYNC_LOOP_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
