"""Sandboxes that are confined processes of this machine: what works in them, and what does not get out."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
    SandboxUnavailableError,
    confine,
    create_provider,
)
from nemo_gym.sandbox.providers import local
from tests.sandbox.test_docker import alive, until


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skips where there are no local sandboxes, and says why."""
    try:
        in_sandbox(_nothing)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


async def _nothing(sandbox: AsyncSandbox) -> None: ...


needs_isolation = pytest.mark.usefixtures("isolation")
Use = Callable[[AsyncSandbox], Awaitable[None]]


def in_sandbox(use: Use, spec: SandboxSpec | None = None, **settings: object) -> None:
    async def run() -> None:
        async with AsyncSandbox({"local": settings}, spec) as sandbox:
            await sandbox.start()
            await use(sandbox)

    asyncio.run(run())


@needs_isolation
def test_a_sandbox_lives_from_start_to_stop(tmp_path: Path) -> None:
    (tmp_path / "here.bin").write_bytes(os.urandom(3_000_000))

    async def use(sandbox: AsyncSandbox) -> None:
        done = await sandbox.exec(
            "cat task.txt; echo $COLOUR $SIZE; pwd; id -un; echo oh >&2; exit 3", env={"SIZE": "5"}
        )
        said = "do itblue 5\n/tmp/deep\nsandbox\n"
        assert (done.stdout, done.stderr, done.return_code, done.error_type) == (said, "oh\n", 3, None)
        await sandbox.upload(tmp_path / "here.bin", "new/there.bin")
        await sandbox.download("new/there.bin", tmp_path / "back/again.bin")
        assert (tmp_path / "back/again.bin").read_bytes() == (tmp_path / "here.bin").read_bytes()
        with pytest.raises(RuntimeError, match=r"nothing could not be read in the sandbox: .*No such file"):
            await sandbox.download("nothing", tmp_path / "x")
        made = await sandbox.exec("printf '#!/bin/sh\\necho ran\\n' > p; chmod +x p; ./p; cat <(echo piped)")
        assert made.stdout == "ran\npiped\n"
        together = await asyncio.gather(*(sandbox.exec(f"sleep 0.2; echo {number}") for number in range(8)))
        assert [each.stdout for each in together] == [f"{number}\n" for number in range(8)]
        assert await sandbox.status() is SandboxStatus.RUNNING

    spec = SandboxSpec(workdir="/tmp/deep", env={"COLOUR": "blue"}, files={"task.txt": "do it"}, resources={"cpu": 1})
    in_sandbox(use, spec)


@needs_isolation
def test_nothing_of_the_machine_is_within_reach(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    attempts = {
        f"cat {secret}": "No such file",
        "touch /usr/here": "Read-only",
        "echo x > /etc/passwd": "Read-only",
        "echo 1 > /proc/self/oom_score_adj": "Read-only",
        "cat /proc/sys/kernel/core_pattern": "No such file",
        "unshare -U true": "not permitted",
        "mount -t tmpfs x /tmp": "superuser",
        f"kill -9 {os.getpid()}": "No such process",
        "cat /etc/shadow": "No such file",
        "cat /proc/1/environ": "ermission denied",
        "cat /proc/1/fd/0": "ermission denied",
        "mknod /tmp/disk b 8 0": "ermi",
    }

    async def use(sandbox: AsyncSandbox) -> None:
        for command, words in attempts.items():
            done = await sandbox.exec(command)
            assert done.return_code != 0, command
            assert words in (done.stderr or ""), (command, done.stderr)
        await sandbox.exec(f"echo x > {secret}")
        environment = (await sandbox.exec("env")).stdout
        assert "NEMO_GYM_TEST_SECRET" not in str(environment)
        network = "import socket; socket.socket()"
        assert "not permitted" in ((await sandbox.exec(f"{_python()} -c '{network}'")).stderr or "")
        seen = await sandbox.exec(f"cat {tmp_path / 'shown'}/file; echo y > {tmp_path / 'shown'}/file")
        assert seen.stdout == "shown"
        assert "Read-only" in (seen.stderr or "")

    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/file").write_text("shown")
    os.environ["NEMO_GYM_TEST_SECRET"] = "s"
    try:
        in_sandbox(use, readable=[str(tmp_path / "shown"), sys.base_prefix])
    finally:
        del os.environ["NEMO_GYM_TEST_SECRET"]
    assert secret.read_text() == "key"


def _python() -> str:
    return str(Path(sys.base_prefix) / "bin/python3")


@needs_isolation
def test_a_command_that_takes_too_long_is_killed_with_what_it_started() -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        await sandbox.exec("sleep 4001 & echo kept")
        hiding = "(setsid sleep 4002 &); (setsid env -i sh -c 'sleep 4003 & sleep 4004' &); echo begun; sleep 4005"
        done = await sandbox.exec(hiding, timeout_s=2)
        assert (done.stdout, done.return_code, done.error_type) == ("begun\n", 125, "timeout")
        running = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout or ""
        assert [number for number in range(4001, 4006) if str(number) in running] == [4001]

    in_sandbox(use)


@needs_isolation
@pytest.mark.parametrize(
    ("command", "why", "memory_mib"),
    [
        (":(){ :|:& };:; sleep 60", "killed: more than 64 processes", 8192),
        (
            "for i in 1 2 3 4 5 6; do (x=$(head -c 60000000 /dev/zero | tr '\\0' x); sleep 60) & done; wait",
            "256 MiB",
            256,
        ),
    ],
)
def test_who_takes_too_much_is_killed_and_the_sandbox_lives_on(command: str, why: str, memory_mib: int) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        done = await sandbox.exec(command, timeout_s=120)
        assert (done.return_code, done.error_type) == (137, None)
        assert why in (done.stderr or "")
        assert (await sandbox.exec("kill -9 -1; kill -9 1; echo alive")).stdout == "alive\n"
        full = await sandbox.exec("head -c 100M /dev/zero > big")
        assert "No space left" in (full.stderr or "")

    in_sandbox(use, SandboxSpec(resources={"memory_mib": memory_mib}), processes=64, folder_mb=32)


@needs_isolation
def test_what_is_done_to_its_folder_keeps_nothing_from_going_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a test")

    async def use() -> None:
        async with AsyncSandbox({"local": {}}, SandboxSpec(workdir="/tmp/work")) as sandbox:
            await sandbox.start()
            await sandbox.exec("echo kept > ../kept; rm -r $PWD")
            lost = await sandbox.exec("true")
            assert (lost.return_code, lost.error_type) == (126, None)
            await sandbox.download("/tmp/kept", tmp_path / "kept")
            await sandbox.upload(tmp_path / "here", "again")
            await sandbox.exec("mkfifo pipe; ln -s /dev/zero zeros")
            for odd in ("pipe", "zeros", "missing"):
                with pytest.raises(
                    RuntimeError, match=rf"{odd} could not be read .*: (it is no plain|cat: .*No such) file"
                ):
                    await sandbox.download(odd, tmp_path / "here")
            await sandbox.download("again", tmp_path / "back")

    asyncio.run(use())
    said = [(tmp_path / name).read_text() for name in ("kept", "here", "back")]
    assert said == ["kept\n", "a test", "a test"]


@needs_isolation
def test_problems_of_the_sandbox_are_told_from_those_of_commands() -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        assert (await sandbox.exec("exit 125")).error_type is None
        nowhere = await sandbox.exec("true", cwd="/no/such/folder")
        assert (nowhere.return_code, nowhere.error_type) == (126, None)
        assert "/no/such/folder: No such file" in (nowhere.stderr or "")
        for unfit in ("echo a\0b", "echo \ud800", f"echo {'x' * 200_000}"):
            not_begun = await sandbox.exec(unfit)
            assert (not_begun.return_code, not_begun.error_type) == (126, None)
            assert "the command cannot be started: " in (not_begun.stderr or "")
        number: dict[str, str] = {"N": 5}  # type: ignore[dict-item]
        assert (await sandbox.exec("echo $N", env=number)).stdout == "5\n"
        somebody = await sandbox.exec("true", user="root")
        assert (somebody.return_code, somebody.error_type) == (125, "sandbox")
        work = asyncio.create_task(sandbox.exec("sleep 4567"))
        await asyncio.sleep(0.3)
        os.killpg(sandbox.handle.raw.process.pid, signal.SIGKILL)
        ended = await work
        assert (ended.return_code, ended.error_type, ended.stderr) == (125, "sandbox", "the sandbox has ended")
        assert (await sandbox.exec("true")).error_type == "sandbox"
        assert await sandbox.status() is SandboxStatus.STOPPED

    in_sandbox(use)


@needs_isolation
def test_a_start_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = local.LocalProvider._open
    rooms: list[local.Room] = []

    def slow(provider: local.LocalProvider, *how: Any) -> local.Room:
        rooms.append(opened(provider, *how))
        time.sleep(0.3)
        return rooms[-1]

    async def use() -> None:
        start = asyncio.create_task(AsyncSandbox({"local": {}}).start())
        await asyncio.sleep(0.1)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await asyncio.to_thread(until, lambda: bool(rooms) and rooms[0].process.returncode is not None)

    monkeypatch.setattr(local.LocalProvider, "_open", slow)
    asyncio.run(use())
    assert list(tmp_path.glob("nemo-gym-sandbox-*")) == []


@needs_isolation
def test_a_start_that_is_given_up_with_its_loop_or_in_its_last_step_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rooms: list[local.Room] = []
    executed = local.LocalProvider.exec

    async def at_once() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncSandbox({"local": {}}).start(), 0.02)

    async def slow(provider: local.LocalProvider, handle: SandboxHandle, command: str, **how: Any) -> SandboxExecResult:
        rooms.append(handle.raw)
        return await executed(provider, handle, f"sleep 30; {command}", **how)

    async def in_the_last_step() -> None:
        sandbox = AsyncSandbox({"local": {}}, SandboxSpec(workdir="work"))
        start = asyncio.create_task(sandbox.start())
        await asyncio.to_thread(until, lambda: bool(rooms))
        await sandbox.stop()
        with pytest.raises(RuntimeError, match="stopped while it was started"):
            await start

    asyncio.run(at_once())
    assert list(tmp_path.glob("nemo-gym-sandbox-*")) == []
    monkeypatch.setattr(local.LocalProvider, "exec", slow)
    asyncio.run(in_the_last_step())
    assert rooms[0].process.returncode is not None
    assert list(tmp_path.glob("nemo-gym-sandbox-*")) == []


@needs_isolation
def test_a_sandbox_ends_when_its_time_is_over() -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        done: SandboxExecResult = await sandbox.exec("sleep 4568", timeout_s=100)
        assert (done.return_code, done.error_type) == (125, "sandbox")

    in_sandbox(use, SandboxSpec(ttl_s=1.5))


@needs_isolation
def test_a_killed_program_leaves_nothing_running() -> None:
    seconds = 95_000_000 + os.getpid()
    code = f"""
import asyncio
from nemo_gym.sandbox import AsyncSandbox

async def main():
    sandbox = await AsyncSandbox({{"local": {{}}}}).start()
    await sandbox.exec("setsid sleep {seconds} & echo")
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        assert alive(f"sleep {seconds}")
        program.kill()
    until(lambda: not alive(f"sleep {seconds}"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(image="python:3.12"), "has no image: .* or use another provider, such as docker"),
        (SandboxSpec(ports=[80], entrypoint=["sh"]), "has no ports, entrypoint"),
    ],
)
def test_what_confined_processes_do_not_have_is_refused(spec: SandboxSpec, words: str) -> None:
    with pytest.raises(SandboxCreateError, match=words):
        asyncio.run(AsyncSandbox({"local": {}}, spec).start())
    with pytest.raises(ValueError, match=r"`memory_mb` .* must be a positive number, not 0"):
        create_provider({"local": {"memory_mb": 0}})


def test_it_refuses_where_isolation_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = local._BOOT.replace("; main()", "; from nemo_gym.sandbox import confine; {}; main()")
    for broken in ("confine._NEW_USER = 1", "confine.seccomp.ARCHITECTURES.clear()", "confine._OLD_PROC = 'x/y/z'"):
        assert hasattr(confine, broken.split(" ")[0].split(".")[1])
        monkeypatch.setattr(local, "_BOOT", boot.format(broken))
        with pytest.raises(
            SandboxUnavailableError, match=r"cannot be confined here .* use another sandbox provider"
        ) as told:
            asyncio.run(AsyncSandbox({"local": {}}).start())
        assert isinstance(told.value, ConfigError)
