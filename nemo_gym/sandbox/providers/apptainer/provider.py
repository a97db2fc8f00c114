"""One Apptainer instance per sandbox, made, used and stopped by way of the `apptainer` command.

Instances have no labels: the run they belong to is part of their name. A folder of this machine is `/sandbox` inside;
files travel through it.
"""

import asyncio
import json
import logging
import os
import posixpath
import re
import secrets
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    RUNTIME_RETURN_CODE,
    TIMEOUT,
    SandboxCreateError,
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
    printed,
    result,
    run_book,
    settings_of,
)
from nemo_gym.sandbox.reaper import instance_prefix

logger = logging.getLogger(__name__)

SHARED_FOLDER = "/sandbox"
_COMMAND_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0
_COMPLAINTS = ("fatal:", "error:", "warning:", "info:")
_OPTIONS = frozenset({"binds", "start_args"})
_REFUSED = frozenset({"HOME", "PWD", "UID", "GID", "EUID", "IFS", "OPTIND"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class CreateSettings:
    """How instances are made."""

    start_timeout_s: float = 600.0
    """Fetching the image included; a spec's `ready_timeout_s` goes first."""
    fakeroot: bool = False
    writable_tmpfs: bool = True
    binds: list[str] = field(default_factory=list)
    extra_start_args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExecSettings:
    """How commands are run in them."""

    timeout_s: float = 180.0
    """For a command that is given no time of its own."""
    concurrency: int = 32
    """How many `apptainer` commands run at a time."""


@dataclass(frozen=True)
class Instance:
    """What a handle of this provider holds."""

    name: str
    folder: Path
    """What is `/sandbox` inside."""
    spec: SandboxSpec


class ApptainerProvider:
    """Sandboxes that are Apptainer instances."""

    name = "apptainer"

    def __init__(
        self,
        create: Mapping[str, Any] | None = None,
        exec: Mapping[str, Any] | None = None,
        program: str = "apptainer",
    ) -> None:
        """Run nothing yet; the arguments are the blocks of its config, and the program to use.

        Raises:
            ValueError: a block has a key that nothing reads.
        """
        self._create = settings_of(CreateSettings, create, "apptainer.create")
        self._exec = settings_of(ExecSettings, exec, "apptainer.exec")
        self._program = Program(program, self._exec.concurrency)

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start an instance; whatever fails, it is stopped and its folder removed.

        Raises:
            SandboxCreateError: there is no image, no Apptainer, or it refuses.
        """
        _check(spec)
        book = run_book()
        root = tempfile.gettempdir()
        name = f"{instance_prefix(book.label)}{secrets.token_hex(6)}"
        instance = Instance(name, Path(root) / name, spec)
        try:
            book.note("apptainer", self._program.path, root)
            instance.folder.mkdir(mode=0o700)
            limit_s = spec.ready_timeout_s or self._create.start_timeout_s
            started = await self._with_env_file(instance, spec.env, self._start_arguments(instance), limit_s)
            if started.code or started.is_late:
                why = "it takes too long; raise create.start_timeout_s" if started.is_late else started.text
                raise SandboxCreateError(f"no instance of {spec.image!r} could be started: {why}")
            handle = SandboxHandle(name, self.name, instance)
            await self._make_workdir(handle)
        except OSError as error:
            shutil.rmtree(instance.folder, ignore_errors=True)
            raise SandboxCreateError(f"no instance of {spec.image!r} could be started: {error}") from error
        except BaseException:
            await asyncio.shield(self._stop(instance))
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
        """Run a shell command; one that takes too long is killed inside the instance, with all that it started."""
        instance: Instance = handle.raw
        limit_s = self._exec.timeout_s if timeout_s is None else float(timeout_s)
        mark = uuid.uuid4().hex
        variables = {**instance.spec.env, **(env or {}), MARK: mark}
        if problem := _unfit(variables):
            return failure(problem)
        arguments = ["exec", *(["--pwd", cwd] if cwd else []), *_as_user(user)]
        inside = ["sh", "-c", SHELL, "sh", _for_user(command, user)]
        try:
            ended = await self._with_env_file(
                instance, variables, [*arguments, "{env}", f"instance://{instance.name}", *inside], limit_s, stdin
            )
        except (UnfitCommandError, ValueError) as error:
            return not_started(str(error))
        except OSError as error:
            return failure(str(error))
        except BaseException:
            await asyncio.shield(self._kill_inside(instance, mark))
            raise
        itself = begun(ended, mark)
        if ended.is_late:
            left = await self._kill_inside(instance, mark)
            message = f"the command did not end within {limit_s:g} s and was killed{left}"
            return failure(message, TIMEOUT, itself or ended)
        if itself is not None:
            return result(itself)
        own = not_begun(ended, _COMPLAINTS) if await self.status(handle) is SandboxStatus.RUNNING else None
        return own or failure(ended.text)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the instance, by way of the shared folder.

        Raises:
            RuntimeError: it could not be copied.
        """
        passing = f".upload-{secrets.token_hex(6)}"
        place = handle.raw.folder / passing
        await asyncio.to_thread(shutil.copyfile, source_path, place)
        try:
            target = shlex.quote(_in_workdir(target_path, handle))
            script = f'mkdir -p -- "$(dirname -- {target})" && cp -- {SHARED_FOLDER}/{passing} {target}'
            await self._copied(handle, script, target_path)
        finally:
            place.unlink(missing_ok=True)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the instance, by way of the shared folder.

        Raises:
            RuntimeError: it could not be copied.
        """
        passing = f".download-{secrets.token_hex(6)}"
        place = handle.raw.folder / passing
        try:
            script = f"{{ {printed(_in_workdir(source_path, handle))}; }} > {SHARED_FOLDER}/{passing}"
            await self._copied(handle, script, source_path)
            await asyncio.to_thread(copy_plain_file, place, target_path, source_path)
        finally:
            place.unlink(missing_ok=True)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Whether the instance is among those that run."""
        try:
            listed = await self._apptainer("instance", "list", "--json")
            instances = json.loads(listed.stdout or b"{}").get("instances") or []
        except (OSError, ValueError):
            return SandboxStatus.UNKNOWN
        if listed.code:
            return SandboxStatus.UNKNOWN
        is_there = any(each.get("instance") == handle.raw.name for each in instances)
        return SandboxStatus.RUNNING if is_there else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        """Stop the instance and remove its folder; fine if it has gone.

        Raises:
            RuntimeError: it could not be stopped.
        """
        stopped = await self._stop(handle.raw)
        if stopped.code and await self.status(handle) is not SandboxStatus.STOPPED:
            raise RuntimeError(
                f"the instance {handle.raw.name} could not be stopped: {stopped.text}; it is tried again when the run "
                "ends"
            )

    async def aclose(self) -> None:
        """Nothing is held."""

    def _start_arguments(self, instance: Instance) -> list[str]:
        spec, create = instance.spec, self._create
        arguments = ["instance", "start", "--bind", f"{instance.folder}:{SHARED_FOLDER}"]
        for bind in [*create.binds, *(spec.provider_options.get("binds") or [])]:
            arguments += ["--bind", str(bind)]
        if create.fakeroot:
            arguments.append("--fakeroot")
            if spec.limits.cpu is not None or spec.limits.memory_mib is not None:
                logger.warning("apptainer cannot limit cpu and memory together with fakeroot; they are not limited")
        else:
            arguments += ["--cpus", f"{spec.limits.cpu:g}"] if spec.limits.cpu is not None else []
            arguments += ["--memory", f"{spec.limits.memory_mib}m"] if spec.limits.memory_mib is not None else []
        arguments += ["--writable-tmpfs"] if create.writable_tmpfs else []
        arguments += ["--nv"] if spec.limits.gpu else []
        arguments += [*create.extra_start_args, *map(str, spec.provider_options.get("start_args") or []), "{env}"]
        return [*arguments, _image(str(spec.image)), instance.name]

    async def _make_workdir(self, handle: SandboxHandle) -> None:
        """So a command whose folder is not there was preceded by one that removed it."""
        if workdir := handle.raw.spec.workdir:
            made = await self.exec(handle, f"mkdir -p -- {shlex.quote(workdir)}")
            if made.return_code:
                raise SandboxCreateError(f"the folder {workdir} cannot be made in it: {(made.stderr or '').strip()}")

    async def _with_env_file(
        self,
        instance: Instance,
        env: Mapping[str, str],
        arguments: list[str],
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> Ended:
        """Run a command with variables in a private file, named where `{env}` stands."""
        descriptor, path = tempfile.mkstemp(prefix=f"{instance.name}.", suffix=".env")  # mkstemp creates it 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{name}={shlex.quote(str(value))}\n" for name, value in env.items())
            at = arguments.index("{env}")
            named = [*arguments[:at], "--no-eval", "--env-file", path, *arguments[at + 1 :]]
            return await self._program.run(named, timeout_s, stdin)
        finally:
            await asyncio.to_thread(os.unlink, path)

    async def _copied(self, handle: SandboxHandle, script: str, what: str) -> None:
        done = await self.exec(handle, script)
        if done.return_code:
            said = (done.stderr or "").strip() or f"exit code {done.return_code}"
            raise RuntimeError(f"{what} could not be copied between here and the sandbox: {said}")

    async def _kill_inside(self, instance: Instance, mark: str) -> str:
        """Kill a command inside the instance; what is to be said if that fails."""
        arguments = ["exec", f"instance://{instance.name}", "sh", "-c", KILLER, "sh", f"{MARK}={mark}"]
        try:
            killed = await self._program.run(arguments, _KILL_TIMEOUT_S)
        except OSError as error:
            return f"; what runs inside could not be ended: {error}"
        if killed.code or killed.is_late:
            logger.warning("a command in the instance %s could not be ended: %s", instance.name, killed.text)
            return f"; what runs inside could not be ended: {killed.text}"
        return ""

    async def _stop(self, instance: Instance) -> Ended:
        try:
            return await self._apptainer("instance", "stop", instance.name)
        finally:
            await asyncio.to_thread(shutil.rmtree, instance.folder, True)

    async def _apptainer(self, *arguments: str) -> Ended:
        ended = await self._program.run(arguments, _COMMAND_TIMEOUT_S)
        if ended.is_late:
            return Ended(b"", b"apptainer does not answer", RUNTIME_RETURN_CODE, is_late=True)
        return ended


def _check(spec: SandboxSpec) -> None:
    if not spec.image:
        raise SandboxCreateError("an Apptainer sandbox needs an image: set `image` in the sandbox's spec")
    if unknown := sorted(set(spec.provider_options) - _OPTIONS):
        raise SandboxCreateError(
            f"provider_options of apptainer have no {', '.join(unknown)}; there are binds, start_args"
        )
    if spec.ports:
        raise SandboxCreateError("ports of an Apptainer sandbox cannot be reached from outside; leave `ports` empty")
    if problem := _unfit(spec.env):
        raise SandboxCreateError(problem)
    if spec.ttl_s is not None:
        logger.warning("apptainer cannot bound the life of an instance: ttl_s has no effect")
    if spec.entrypoint:
        logger.warning("apptainer starts what the image says: entrypoint has no effect")


def _unfit(env: Mapping[str, str]) -> str | None:
    """What is wrong with the names of variables, if anything."""
    for name in env:
        if not _NAME.fullmatch(name):
            return f"{name!r} cannot be the name of a variable in an Apptainer sandbox"
        if name in _REFUSED:
            return f"the variable {name} is Apptainer's own and cannot be set in a sandbox"
    return None


def _image(image: str) -> str:
    """An image as Apptainer wants it; a plain name is one of a registry."""
    is_file = image.startswith(("/", "./", "../")) or image.endswith((".sif", ".img", ".sqsh"))
    return image if "://" in image or is_file else f"docker://{image}"


def _in_workdir(path: str, handle: SandboxHandle) -> str:
    """A path inside that needs no working directory, which may have been removed."""
    return posixpath.join(handle.raw.spec.workdir or "", path)


def _as_user(user: str | int | None) -> list[str]:
    return ["--fakeroot"] if str(user) in ("root", "0") else []


def _for_user(command: str, user: str | int | None) -> str:
    if user is None or str(user) in ("root", "0"):
        return command
    return f"su -s /bin/sh {shlex.quote(str(user))} -c {shlex.quote(command)}"
