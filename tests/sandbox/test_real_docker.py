"""Sandboxes of a real Docker engine, where one runs: what its containers bear, and what a stand-in cannot tell.

On Debian `docker.io` and `busybox-static` are all it takes: without an image named `busybox`, one is made of that
program. `NEMO_GYM_TEST_IMAGE` names another image to use.
"""

import asyncio
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxCreateVerificationError, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.reaper import RUN_LABEL
from tests.sandbox.test_docker import until

MADE = "nemo-gym-test/busybox"


def docker(*arguments: str, stdin: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=120, check=False)


def _is_running() -> bool:
    return shutil.which("docker") is not None and docker("info").returncode == 0


pytestmark = pytest.mark.skipif(not _is_running(), reason="no Docker engine here: its stand-in is all there is")


def _busybox_archive(program: Path) -> bytes:
    """The files of an image in which there is one program, by all its names."""
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        files.add(program.resolve(), "bin/busybox")
        for name in names:
            if name != "busybox":
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                files.addfile(link)
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        files.addfile(tmp)
    return archive.getvalue()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    wanted = os.environ.get("NEMO_GYM_TEST_IMAGE", "busybox")
    if docker("image", "inspect", wanted).returncode == 0:
        yield wanted
        return
    program = shutil.which("busybox")
    if program is None or wanted != "busybox":
        pytest.skip(f"the image {wanted} is not there; name another one in NEMO_GYM_TEST_IMAGE")
    made = docker("import", "-", MADE, stdin=_busybox_archive(Path(program)))
    assert made.returncode == 0, made.stderr
    yield MADE
    docker("rmi", "-f", MADE)


def in_sandbox(image: str, use: Callable[[AsyncSandbox], Awaitable[None]], **more: object) -> None:
    """Use a sandbox without a network; afterwards its container is gone."""

    async def run() -> str:
        wanted = SandboxSpec(**{"image": image, "workdir": "/work", **more})  # type: ignore[arg-type]
        async with AsyncSandbox({"docker": {"create": {"network": "none"}}}, wanted) as sandbox:
            await sandbox.start()
            await use(sandbox)
            return sandbox.handle.sandbox_id

    name = asyncio.run(run())
    assert docker("inspect", name).returncode != 0


def test_a_sandbox_lives_from_start_to_stop(image: str, tmp_path: Path) -> None:
    (tmp_path / "here.bin").write_bytes(os.urandom(3_000_000))

    async def use(sandbox: AsyncSandbox) -> None:
        assert await sandbox.status() is SandboxStatus.RUNNING
        done = await sandbox.exec("cat deep/a.txt; echo $COLOUR; pwd; echo oh >&2; exit 3", env={"COLOUR": "blue"})
        assert (done.stdout, done.stderr, done.return_code) == ("textblue\n/work\n", "oh\n", 3)
        assert (await sandbox.exec("id -u", user=1000)).stdout == "1000\n"
        await sandbox.upload(tmp_path / "here.bin", "new/there.bin")
        assert (await sandbox.exec("wc -c < new/there.bin")).stdout == "3000000\n"
        await sandbox.download("new/there.bin", tmp_path / "back/again.bin")
        assert (tmp_path / "back/again.bin").read_bytes() == (tmp_path / "here.bin").read_bytes()
        said = await asyncio.gather(*(sandbox.exec(f"echo {number}") for number in range(40)))
        assert [each.stdout for each in said] == [f"{number}\n" for number in range(40)]

    in_sandbox(image, use, files={"/work/deep/a.txt": "text"})


def test_a_command_that_takes_too_long_or_is_given_up_is_killed_inside(image: str) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        late = await sandbox.exec("(setsid sleep 4711 &); env -i sleep 4712 & echo begun; sleep 4713", timeout_s=2)
        assert (late.stdout, late.return_code, late.error_type) == ("begun\n", 125, "timeout")
        given_up = asyncio.create_task(sandbox.exec("touch begun; sleep 4714"))
        assert (await sandbox.exec("until test -e begun; do sleep 0.1; done", timeout_s=60)).return_code == 0
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        everything = (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout or ""
        assert "sleep" in everything
        assert "sleep 471" not in everything

    in_sandbox(image, use)


@pytest.mark.parametrize(
    ("command", "then"),
    [
        ("kill -9 -1", 0),
        ("for each in 1 2 3 6 9 10 11 12 14 15; do kill -$each 1; done; kill -9 $(pidof sleep)", 0),
        ("rm -rf /work", 126),
        ("rm -rf /bin /usr /lib* 2>/dev/null", 126),
        ("rm -f /bin/sh /usr/bin/sh; ln -s /bin/true /bin/sh", 0),
        ("rm -f /bin/sh /usr/bin/sh; printf '#!/bin/cat\\nnothing' > /bin/sh; chmod 755 /bin/sh", 1),
        ("rm -f /bin/sh /usr/bin/sh; echo nothing > /bin/sh; chmod 755 /bin/sh", 1),
        ("tail /dev/zero", 0),
    ],
)
def test_no_command_makes_its_failures_those_of_the_sandbox(
    image: str, tmp_path: Path, command: str, then: int
) -> None:
    (tmp_path / "test.txt").write_text("a test")

    async def use(sandbox: AsyncSandbox) -> None:
        for _ in range(2):
            assert (await sandbox.exec(command, timeout_s=60)).error_type is None
        after = await sandbox.exec("true")
        assert (after.return_code, after.error_type) == (then, None), after.stderr
        assert await sandbox.status() is SandboxStatus.RUNNING
        await sandbox.upload(tmp_path / "test.txt", "/test.txt")
        await sandbox.download("/test.txt", tmp_path / "back.txt")
        assert (tmp_path / "back.txt").read_text() == "a test"

    in_sandbox(image, use, resources={"memory_mib": 64})


def test_the_first_process_buries_the_dead(image: str) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        await sandbox.exec("for each in 1 2 3 4 5 6 7 8; do (sleep 0.2 &); done; sleep 1")
        states = (await sandbox.exec("cat /proc/[0-9]*/stat")).stdout or ""
        assert states
        assert ") Z " not in states

    in_sandbox(image, use)
    in_sandbox(image, use, ttl_s=60)


def test_a_container_ends_when_its_time_is_over_and_not_before(image: str) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        await sandbox.exec("kill -9 -1")
        assert await sandbox.status() is SandboxStatus.RUNNING
        for _ in range(300):
            if await sandbox.status() is SandboxStatus.STOPPED:
                break
            await asyncio.sleep(0.1)
        gone = await sandbox.exec("true")
        assert (gone.return_code, gone.error_type) == (125, "sandbox")

    in_sandbox(image, use, ttl_s=4)


def test_a_container_that_was_killed_from_outside_has_failed(image: str) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        assert docker("kill", sandbox.handle.sandbox_id).returncode == 0
        gone = await sandbox.exec("true")
        assert (gone.return_code, gone.error_type) == (125, "sandbox")
        assert "is not running" in (gone.stderr or "")

    in_sandbox(image, use)


def test_nothing_but_plain_files_comes_out(image: str, tmp_path: Path) -> None:
    target = tmp_path / "back"
    target.write_text("what was there")

    async def use(sandbox: AsyncSandbox) -> None:
        await sandbox.exec("mkfifo pipe; mkdir folder; mknod device c 1 5; ln -s /dev/zero zeros; ln -s loop loop")
        await sandbox.exec("ln -s /etc/shadow shadow; echo inside > plain; chmod 4755 plain; ln -s $PWD/plain link")
        for odd in ("pipe", "folder", "device", "zeros", "loop", "shadow", "missing"):
            with pytest.raises(RuntimeError, match=odd):
                await sandbox.download(odd, target)
        assert target.read_text() == "what was there"
        await sandbox.download("link", target)

    in_sandbox(image, use)
    assert target.read_text() == "inside\n"
    assert target.lstat().st_mode & (stat.S_ISUID | stat.S_IXUSR) == 0


def test_a_container_that_does_not_live_says_why(image: str) -> None:
    wanted = SandboxSpec(image=image, entrypoint=["sh", "-c", "echo no licence; exit 1"])
    sandbox = AsyncSandbox({"docker": {"create": {"network": "none"}}}, wanted)
    with pytest.raises(SandboxCreateVerificationError, match=r"is not running.*; the last it said was: no licence"):
        asyncio.run(sandbox.start())


PROGRAM = """
import asyncio
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.providers.programs import run_book

async def main():
    for _ in range(3):
        sandbox = AsyncSandbox({{"docker": {{"create": {{"network": "none"}}}}}}, SandboxSpec(image={image!r}))
        await sandbox.start()
    print(run_book().label, flush=True)
    await sandbox.exec("sleep 600", timeout_s=600)

asyncio.run(main())
"""


def test_a_killed_program_leaves_no_container(image: str) -> None:
    other = docker("run", "-d", "--network", "none", "--label", f"{RUN_LABEL}=other", image, "sleep", "600")
    assert other.returncode == 0, other.stderr
    try:
        with subprocess.Popen([sys.executable, "-c", PROGRAM.format(image=image)], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            label = program.stdout.readline().decode().strip()
            mine = ("ps", "-aq", "--filter", f"label={RUN_LABEL}={label}")
            assert len(docker(*mine).stdout.split()) == 3
            program.kill()
        until(lambda: docker(*mine).stdout.split() == [], seconds=90)
        assert docker("inspect", other.stdout.decode().strip()).returncode == 0
    finally:
        docker("rm", "-f", other.stdout.decode().strip())
