"""One long-lived Docker container per sandbox, made, used and removed by way of the `docker` command.

The container sleeps; commands are run in it one by one. It carries the label of the run it belongs to, by which it is
removed if whoever made it does not (`nemo_gym.sandbox.reaper`).
"""

import asyncio
import logging
import math
import secrets
import shlex
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname
from typing import Any

from nemo_gym.process_inputs import inherited_environment
from nemo_gym.sandbox.providers.base import (
    RUNTIME_RETURN_CODE,
    TIMEOUT,
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)
from nemo_gym.sandbox.providers.programs import (
    KILLER,
    MARK,
    SHELL,
    Ended,
    Program,
    UnfitCommandError,
    begun,
    copy_plain_file,
    failure,
    not_begun,
    not_started,
    result,
    run_book,
    settings_of,
)
from nemo_gym.sandbox.reaper import RUN_LABEL, reason

logger = logging.getLogger(__name__)

SANDBOX_LABEL = "nemo-gym.sandbox"
_COMMAND_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0
_OPTIONS = frozenset({"volumes", "run_args"})
_DAEMON_ERRORS = (
    "error response from daemon",
    "cannot connect to the docker daemon",
    "error during connect",
    "no such container",
    "oci runtime exec failed",
    "failed to connect to the docker api",
    "permission denied while trying to connect",
    "unable to find user",
)
_STATES = {
    "created": SandboxStatus.STARTING,
    "restarting": SandboxStatus.STARTING,
    "running": SandboxStatus.RUNNING,
    "paused": SandboxStatus.RUNNING,
    "removing": SandboxStatus.STOPPED,
    "exited": SandboxStatus.STOPPED,
    "dead": SandboxStatus.ERROR,
}
_KEEP_ALIVE = """
trap '' 1 2 3 4 5 6 7 8 10 11 12 13 14 15 16 20 21 22 23 24 25 26 27 28 29 30 31
read -r now rest < /proc/uptime
end=$((${now%.*} + $1))
while left=$((end - ${now%.*})); [ "$left" -gt 0 ]; do
  sleep "$left" & wait $!
  read -r now rest < /proc/uptime
done
"""
"""The first process of a container, for a number of seconds: nothing inside can end it, not even by killing all.

The kernel lets no process inside kill the first one; an init in front of it would leave with it. As a shell that waits,
it buries what others have left behind, as an init does.
"""
_FOR_EVER_S = 2_000_000_000


@dataclass(frozen=True)
class CreateSettings:
    """How containers are made."""

    start_timeout_s: float = 600.0
    """Fetching the image included; a spec's `ready_timeout_s` goes first."""
    init: bool = True
    """An init process in front of a spec's entrypoint."""
    network: str | None = None
    read_only: bool = False
    cap_drop: list[str] = field(default_factory=list)
    security_opt: list[str] = field(default_factory=list)
    pids_limit: int | None = None
    gpus: str | None = None
    publish_host: str = "127.0.0.1"
    extra_run_args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExecSettings:
    """How commands are run in them."""

    timeout_s: float = 180.0
    """For a command that is given no time of its own."""
    concurrency: int = 32
    """How many `docker` commands run at a time."""


@dataclass(frozen=True)
class ProbeSettings:
    """How it is found out that a container can be used."""

    command: str = "true"
    timeout_s: float = 30.0
    interval_s: float = 0.5
    stable_count: int = 1
    """How often in a row the command must succeed."""
    deadline_s: float | None = None
    """How long it may fail before; None: not at all."""


@dataclass(frozen=True)
class Container:
    """What a handle of this provider holds."""

    name: str
    spec: SandboxSpec


@dataclass(frozen=True)
class Variables:
    """Variables for a container: handed over by the client's own environment, as others can read command lines.

    Those that would change what the client does stand on its command line.
    """

    arguments: list[str]
    hidden: dict[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "Variables":
        """How these are handed over."""
        own = inherited_environment()
        texts = {name: str(value) for name, value in env.items()}
        hidden = {
            name: value
            for name, value in texts.items()
            if own.get(name, value) == value and "DOCKER" not in name.upper()
        }
        given = [name if name in hidden else f"{name}={value}" for name, value in texts.items()]
        return cls([part for each in given for part in ("--env", each)], hidden)


class DockerProvider:
    """Sandboxes that are Docker containers."""

    name = "docker"

    def __init__(
        self,
        create: Mapping[str, Any] | None = None,
        exec: Mapping[str, Any] | None = None,
        probe: Mapping[str, Any] | None = None,
        program: str = "docker",
    ) -> None:
        """Run nothing yet; the arguments are the blocks of its config, and the program to use.

        Raises:
            ValueError: a block has a key that nothing reads.
        """
        self._create = settings_of(CreateSettings, create, "docker.create")
        self._exec = settings_of(ExecSettings, exec, "docker.exec")
        self._probe = settings_of(ProbeSettings, probe, "docker.probe")
        self._program = Program(program, self._exec.concurrency)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a container and return when a command runs in it; whatever fails, it is removed.

        Raises:
            SandboxCreateError: there is no image, no Docker, or it refuses.
            SandboxCreateVerificationError: no command runs in it.
        """
        book = run_book()
        container = Container(f"nemo-gym-{secrets.token_hex(8)}", spec)
        arguments = self._run_arguments(container, book.label)
        try:
            book.note("docker", self._program.path)
            limit_s = spec.ready_timeout_s or self._create.start_timeout_s
            started = await self._program.run(arguments, limit_s, env=Variables.of(spec.env).hidden)
            if started.code or started.is_late:
                why = "it takes too long; raise create.start_timeout_s" if started.is_late else started.text
                raise SandboxCreateError(f"no container of {spec.image!r} could be started: {_masked(why, spec)}")
            handle = SandboxHandle(container.name, self.name, container)
            await self._wait_until_usable(handle)
        except OSError as error:
            raise SandboxCreateError(f"no container of {spec.image!r} could be started: {error}") from error
        except BaseException:
            await asyncio.shield(self._remove(container.name))
            raise
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
        stdin: bytes | None = None,
    ) -> SandboxExecResult:
        """Run a shell command; one that takes too long is killed inside the container, with all that it started."""
        limit_s = self._exec.timeout_s if timeout_s is None else float(timeout_s)
        mark = uuid.uuid4().hex
        arguments = ["exec", *(["-i"] if stdin is not None else []), *_where(cwd, user)]
        variables = Variables.of({**handle.raw.spec.env, **(env or {}), MARK: mark})
        arguments += [*variables.arguments, handle.raw.name, "sh", "-c", SHELL, "sh", command]
        try:
            ended = await self._program.run(arguments, limit_s, stdin, variables.hidden)
        except UnfitCommandError as error:
            return not_started(str(error))
        except OSError as error:
            return failure(str(error))
        except BaseException:
            await asyncio.shield(self._kill_inside(handle, mark))
            raise
        itself = begun(ended, mark)
        if ended.is_late:
            left = await self._kill_inside(handle, mark)
            message = f"the command did not end within {limit_s:g} s and was killed{left}"
            return failure(message, TIMEOUT, itself or ended)
        if itself is not None and not _blames_daemon(itself):
            return result(itself)
        if await self.status(handle) is SandboxStatus.RUNNING:
            own = not_begun(ended, _DAEMON_ERRORS) if itself is None else result(itself)
            if own is not None:
                return own
        return failure(_masked(ended.text, handle.raw.spec))

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the container, its folders made by root.

        Raises:
            RuntimeError: it could not be copied.
        """
        target = _absolute(target_path, handle)
        arguments = _here(source_path), f"{handle.raw.name}:{target}"
        if (await self._cp(*arguments)).code == 0:
            return
        made = await self.exec(handle, f"mkdir -p -- {shlex.quote(dirname(target))}", cwd="/", user=0)
        if made.return_code:
            raise RuntimeError(f"{target_path} cannot be written in the sandbox: {(made.stderr or '').strip()}")
        _check_copied(await self._cp(*arguments), target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the container.

        Raises:
            RuntimeError: it could not be copied.
        """
        with tempfile.TemporaryDirectory(prefix="nemo-gym-download-") as folder:
            passing = Path(folder) / "file"
            source = f"{handle.raw.name}:{_absolute(source_path, handle)}"
            _check_copied(await self._cp(source, str(passing)), source_path)
            await asyncio.to_thread(copy_plain_file, passing, target_path, source_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """What the daemon says of the container."""
        try:
            asked = await self._docker("inspect", "--format", "{{.State.Status}}", handle.raw.name)
        except OSError:
            return SandboxStatus.UNKNOWN
        if asked.code:
            return SandboxStatus.STOPPED if "no such" in asked.text.lower() else SandboxStatus.UNKNOWN
        return _STATES.get(asked.stdout.decode(errors="replace").strip(), SandboxStatus.UNKNOWN)

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        """Where the daemon has published a port.

        Raises:
            RuntimeError: it has not.
        """
        asked = await self._docker("port", handle.raw.name, f"{port}/tcp")
        addresses = asked.stdout.decode(errors="replace").split()
        if asked.code or not addresses:
            raise RuntimeError(f"port {port} of the sandbox is not published: {asked.text}")
        return SandboxEndpoint(f"http://{addresses[0]}")

    async def close(self, handle: SandboxHandle) -> None:
        """Remove the container with all that runs in it; fine if it has gone.

        Raises:
            RuntimeError: it could not be removed.
        """
        removed = await self._remove(handle.raw.name)
        if removed.code and "no such container" not in removed.text.lower():
            raise RuntimeError(
                f"the container {handle.raw.name} could not be removed: {removed.text}; it is tried again when the run "
                f"ends (label {RUN_LABEL}={run_book().label})"
            )

    async def aclose(self) -> None:
        """Nothing is held."""

    def _run_arguments(self, container: Container, run: str) -> list[str]:
        spec, create = container.spec, self._create
        image = (spec.image or "").removeprefix("docker://")
        if not image:
            raise SandboxCreateError("a Docker sandbox needs an image: set `image` in the sandbox's spec")
        if unknown := sorted(set(spec.provider_options) - _OPTIONS):
            raise SandboxCreateError(
                f"provider_options of docker have no {', '.join(unknown)}; there are volumes, run_args"
            )
        arguments = ["run", "-d", "--name", container.name, "--label", f"{SANDBOX_LABEL}=1"]
        arguments += ["--label", f"{RUN_LABEL}={run}"]
        for name, value in spec.metadata.items():
            arguments += ["--label", f"nemo-gym.metadata.{name}={value}"]
        arguments += ["--init"] if create.init and spec.entrypoint else []
        arguments += ["-w", spec.workdir] if spec.workdir else []
        arguments += Variables.of(spec.env).arguments
        arguments += [*self._limits(spec), *self._isolation()]
        for port in spec.ports:
            arguments += ["--publish", f"{create.publish_host}::{port}/tcp"]
        for volume in spec.provider_options.get("volumes") or []:
            arguments += ["-v", str(volume)]
        arguments += [*create.extra_run_args, *map(str, spec.provider_options.get("run_args") or [])]
        return arguments + _what_it_runs(spec, image)

    def _limits(self, spec: SandboxSpec) -> list[str]:
        arguments: list[str] = []
        if spec.limits.cpu is not None:
            arguments += ["--cpus", f"{spec.limits.cpu:g}"]
        if spec.limits.memory_mib is not None:
            arguments += ["--memory", f"{spec.limits.memory_mib}m", "--memory-swap", f"{spec.limits.memory_mib}m"]
        gpus = self._create.gpus or (str(spec.limits.gpu) if spec.limits.gpu else None)
        return arguments + (["--gpus", gpus] if gpus else [])

    def _isolation(self) -> list[str]:
        create = self._create
        arguments = ["--network", create.network] if create.network else []
        arguments += ["--read-only"] if create.read_only else []
        for capability in create.cap_drop:
            arguments += ["--cap-drop", capability]
        for option in create.security_opt:
            arguments += ["--security-opt", option]
        return arguments + (["--pids-limit", str(create.pids_limit)] if create.pids_limit else [])

    async def _wait_until_usable(self, handle: SandboxHandle) -> None:
        probe = self._probe
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (probe.deadline_s or 0.0)
        passed = 0
        while passed < probe.stable_count:
            tried = await self.exec(handle, probe.command, timeout_s=probe.timeout_s)
            passed = 0 if tried.return_code else passed + 1
            if tried.return_code and loop.time() >= deadline:
                said = (tried.stderr or tried.stdout or "").strip() or f"exit code {tried.return_code}"
                if tried.error_type and (last := await self._last_words(handle)):
                    said += f"; the last it said was: {last}"
                raise SandboxCreateVerificationError(
                    f"a container of {handle.raw.spec.image!r} was started, but {probe.command!r} fails in it: "
                    f"{_masked(said, handle.raw.spec)}"
                )
            if passed < probe.stable_count:
                await asyncio.sleep(probe.interval_s)

    async def _last_words(self, handle: SandboxHandle) -> str:
        logged = await self._docker("logs", "--tail", "5", handle.raw.name)
        return "" if logged.code else reason((logged.stdout + logged.stderr).decode(errors="replace"))

    async def _kill_inside(self, handle: SandboxHandle, mark: str) -> str:
        """Kill a command inside the container; what is to be said if that fails."""
        arguments = ["exec", "--user", "0", handle.raw.name, "sh", "-c", KILLER, "sh", f"{MARK}={mark}"]
        try:
            killed = await self._program.run(arguments, _KILL_TIMEOUT_S)
        except OSError as error:
            return f"; what runs inside could not be ended: {error}"
        if killed.code or killed.is_late:
            logger.warning("a command in the container %s could not be ended: %s", handle.raw.name, killed.text)
            return f"; what runs inside could not be ended: {killed.text}"
        return ""

    async def _cp(self, source: str, target: str) -> Ended:
        return await self._docker("cp", "-q", "-L", source, target)  # a link would be followed on the other side

    async def _remove(self, name: str) -> Ended:
        return await self._docker("rm", "-f", "-v", name)

    async def _docker(self, *arguments: str) -> Ended:
        ended = await self._program.run(arguments, _COMMAND_TIMEOUT_S)
        if ended.is_late:
            return Ended(b"", b"docker does not answer", RUNTIME_RETURN_CODE, is_late=True)
        return ended


def _what_it_runs(spec: SandboxSpec, image: str) -> list[str]:
    """The last arguments of `docker run`: what the container does while it is not used."""
    if spec.entrypoint:
        if spec.ttl_s is not None:
            logger.warning("ttl_s has no effect on a sandbox with an entrypoint, which ends when it likes")
        return ["--entrypoint", spec.entrypoint[0], image, *spec.entrypoint[1:]]
    seconds = _FOR_EVER_S if spec.ttl_s is None else math.ceil(spec.ttl_s)
    ends_by_itself = [] if spec.ttl_s is None else ["--rm"]
    return [*ends_by_itself, "--entrypoint", "sh", image, "-c", _KEEP_ALIVE, "sh", str(seconds)]


def _where(cwd: str | None, user: str | int | None) -> list[str]:
    arguments = ["-w", cwd] if cwd else []
    if user is not None:
        arguments += ["--user", "0" if str(user) in ("root", "0") else str(user)]
    return arguments


def _absolute(path: str, handle: SandboxHandle) -> str:
    """`docker cp` knows no working directory."""
    return path if path.startswith("/") else f"{(handle.raw.spec.workdir or '').rstrip('/')}/{path}"


def _here(path: Path) -> str:
    """A path of this machine as `docker cp` knows it: what has a colon and no beginning is a container to it."""
    return str(path.absolute())


def _check_copied(copied: Ended, what: str) -> None:
    if copied.code:
        raise RuntimeError(f"{what} could not be copied between here and the sandbox: {copied.text}")


def _blames_daemon(ended: Ended) -> bool:
    """Whether Docker seems to have lost a command that had begun; what a command prints may look like it."""
    return ended.code != 0 and ended.text.lower().startswith(_DAEMON_ERRORS)


def _masked(text: str, spec: SandboxSpec) -> str:
    """Without the values of variables, which may be secrets."""
    for value in sorted(map(str, spec.env.values()), key=len, reverse=True):
        if len(value) >= 4:
            text = text.replace(value, "****")
    return text
