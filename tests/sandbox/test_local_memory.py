"""The memory that a local sandbox may use holds, whichever way its processes ask for it."""

import asyncio
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxExecResult,
    SandboxSpec,
    SandboxUnavailableError,
    create_provider,
)
from nemo_gym.sandbox import memory as memory_of_sandboxes
from nemo_gym.sandbox.memory import MemoryGroup, SharedMemory
from nemo_gym.sandbox.process import IsolatedProcess
from tests.sandbox.arena import isolated
from tests.sandbox.test_docker import until

LIMIT_MB = 128
FOLDER_MB = 64
PYTHON = str(Path(sys.base_prefix) / "bin/python3")
_PROGRAM = """
import ctypes, mmap, os, socket, sys, time
MB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def fill(mapping):
    for at in range(0, len(mapping), 4096):
        mapping[at] = 1
    kept.append(mapping)

def shared(megabytes):
    fill(mmap.mmap(-1, megabytes * MB))

def zeros(megabytes):
    fill(mmap.mmap(os.open("/dev/zero", os.O_RDWR), megabytes * MB))

def memfd(megabytes):
    file = os.memfd_create("x")
    os.write(file, bytes(megabytes * MB))
    kept.append(file)

def private(megabytes):
    kept.append(bytearray(b"x") * (megabytes * MB))

def dropped(megabytes):
    mapping = mmap.mmap(-1, megabytes * MB)
    fill(mapping)
    mapping.madvise(mmap.MADV_DONTNEED)

def trim(mapping):  # keeps one page, with which the kernel keeps all of them
    fill(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if libc.munmap(ctypes.c_void_p(address + 4096), ctypes.c_size_t(len(mapping) - 4096)):
        raise OSError("munmap")

def trimmed(megabytes):
    for _ in range(megabytes):
        trim(mmap.mmap(-1, MB))

def trimmed_zeros(megabytes):
    for _ in range(megabytes):
        file = os.open("/dev/zero", os.O_RDWR)
        trim(mmap.mmap(file, MB))
        os.close(file)

libc.mmap.restype = ctypes.c_void_p

def tables(megabytes):  # one table of pages for every 2 MB of address space, which is only read
    size = megabytes * 512 * MB
    address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANON | 0x4000, -1, 0)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, 2 * MB):
        ctypes.string_at(address + at, 1)

def named(megabytes):
    mapping = mmap.mmap(-1, megabytes * MB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc.prctl(0x53564D41, 0, ctypes.c_ulong(address), ctypes.c_ulong(len(mapping)), b"innocent")
    fill(mapping)

def sockets(megabytes):
    for _ in range(megabytes * 5):
        one, other = socket.socketpair()
        one.setblocking(False)
        try:
            while True: one.send(bytes(1 << 16))
        except BlockingIOError:
            kept.append((one, other))

def file(megabytes):
    with open(f"/tmp/{os.getpid()}-{len(kept)}", "wb") as out:
        out.write(bytes(megabytes * MB))
    kept.append(None)

def attempt(take, steps=20, megabytes=20):
    try:
        for step in range(steps):
            take(megabytes)
            time.sleep(0.03)
    except (OSError, MemoryError) as error:
        print("refused", error, flush=True)
        sys.exit(7)
    time.sleep(0.5)
    print("held", flush=True)
"""
ATTEMPTS = {
    "private memory of several processes": "for _ in range(4):\n  if not os.fork(): break\nattempt(private, 5)",
    "shared mappings": "attempt(shared)",
    "one shared mapping": "attempt(shared, 1, 400)",
    "shared mappings of several processes": "for _ in range(4):\n  if not os.fork(): break\nattempt(shared, 5)",
    "shared mappings whose pages the process drops": "attempt(dropped)",
    "shared mappings of which one page is left": "attempt(trimmed)",
    "shared mappings of which several processes leave one page": (
        "for _ in range(4):\n  if not os.fork(): break\nattempt(trimmed, 5)"
    ),
    "mappings of /dev/zero of which one page is left": "attempt(trimmed_zeros)",
    "tables of pages": "attempt(tables)",
    "shared mappings with names": "attempt(named)",
    "mappings of /dev/zero": "attempt(zeros)",
    "files of memfd_create": "attempt(memfd)",
    "files of memfd_create of several processes": "for _ in range(4):\n  if not os.fork(): break\nattempt(memfd, 5)",
    "shared mappings of a process that hides": "libc.prctl(4, 0, 0, 0, 0)\nattempt(shared)",
    "shared mappings of a process in the background": (
        "if os.fork():\n  time.sleep(3)\n  print('held')\n"
        "else:\n  os.setsid()\n  if os.fork(): os._exit(0)\n  attempt(shared)"
    ),
    "buffers of sockets": "for _ in range(4):\n  if not os.fork(): break\nattempt(sockets, 5)",
    "private and shared memory together": "attempt(lambda mb: (private(mb // 2), shared(mb // 2)))",
    "files in memory and shared mappings": "file(30)\nfile(30)\nattempt(shared)",
}


def run(program: str, by: str, settings: dict[str, Any] | None = None) -> SandboxExecResult:
    """Run a program in a sandbox, which must be usable afterwards."""

    async def use() -> SandboxExecResult:
        wanted = {"folder_mb": FOLDER_MB, "readable": [sys.base_prefix], "memory_limit_by": by, **(settings or {})}
        spec = SandboxSpec(files={"program.py": _PROGRAM + program}, resources={"memory_mib": LIMIT_MB})
        async with AsyncSandbox({"local": wanted}, spec) as sandbox:
            await sandbox.start()
            done = await sandbox.exec(f"{PYTHON} program.py", timeout_s=120)
            alive = await sandbox.exec("echo alive")
            assert (alive.stdout, alive.return_code) == ("alive\n", 0)
            return done

    return asyncio.run(use())


@cache
def why_not(by: str) -> str | None:
    """Return why there are no such sandboxes here."""
    try:
        run("", by)
    except SandboxUnavailableError as error:
        return str(error)
    return None


@pytest.fixture(params=["cgroup", "watch"])
def by(request: pytest.FixtureRequest) -> str:
    if why := why_not(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_way_to_memory_leads_past_the_limit(name: str, by: str) -> None:
    done = run(ATTEMPTS[name], by)
    assert "held" not in (done.stdout or ""), (done.stdout, done.stderr)
    assert done.error_type is None
    if done.return_code == 7:
        assert (done.stdout or "").startswith("refused")
    else:
        assert (done.return_code, f"killed: more than {LIMIT_MB} MiB of memory" in (done.stderr or "")) == (137, True)


def test_a_process_that_cannot_be_looked_into_counts_with_all_its_address_space() -> None:
    if why := why_not("watch"):
        pytest.skip(why)
    hides = f"""
import shutil
shutil.copy({PYTHON!r}, "/tmp/unreadable")
os.chmod("/tmp/unreadable", 0o111)
again = open("program.py").read().partition("import shutil")[0] + "attempt(shared)"
os.execve("/tmp/unreadable", ["python", "-c", again], {{"PYTHONHOME": {sys.base_prefix!r}}})
"""
    done = run(hides, "watch", {"folder_mb": 128})
    assert "held" not in (done.stdout or "")
    assert (done.return_code, "MiB of memory" in (done.stderr or "")) == (137, True)


def test_what_fits_is_not_killed(by: str) -> None:
    done = run("attempt(shared, 1, 60)\nattempt(private, 1, 20)\nattempt(file, 1, 60)", by)
    assert (done.stdout, done.return_code) == ("held\nheld\nheld\n", 0), done.stderr


def test_shared_memory_that_was_given_back_does_not_count(by: str) -> None:
    again = """
for _ in range(20):
    with mmap.mmap(-1, 50 * MB) as mapping:
        mapping[:: 4096] = bytes(len(mapping) // 4096)
with open("/tmp/file", "wb") as out: out.truncate(1000 * MB)
with open("/tmp/file", "r+b") as file:
    seen = [mmap.mmap(file.fileno(), 1000 * MB), mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)]
time.sleep(0.5)
print("held")
"""
    done = run(again, by)
    assert (done.stdout, done.return_code) == ("held\n", 0), done.stderr


def test_shared_memory_counts_with_the_lengths_that_were_asked_for() -> None:
    memory = SharedMemory()
    for length in (10, 100, 1):
        memory.ask(length, is_memory=True)
    assert memory.may_hold == 111
    assert memory.look({"a": 1, "b": 1}) == 110
    assert memory.look({"a": 1, "b": 1, "late": 1}) == 111
    assert memory.look({"a": 1, "b": 1, "late": 1, "never asked for": 1}) == 211
    assert memory.look({"b": 1}) == 100
    assert memory.look({"b": 150}) == 150
    assert memory.look({}) == memory.may_hold == 0
    memory.ask(1000, is_memory=False)
    assert memory.look({}) == 0
    assert memory.look({"c": 1}) == 1000


def test_a_small_file_of_memfd_is_counted_by_a_control_group_and_refused_without_one(by: str) -> None:
    done = run("attempt(memfd, 1, 1)", by)
    expected = (0, "held\n") if by == "cgroup" else (7, "refused [Errno 38] Function not implemented\n")
    assert (done.return_code, done.stdout) == expected


def test_there_is_no_other_place_in_memory_for_files(by: str) -> None:
    done = run("os.system('head -c 100M /dev/zero > /dev/shm/x; head -c 100M /dev/zero > /tmp/x; ls -s /tmp/x')", by)
    assert "/dev/shm/x" in (done.stderr or "")
    assert "No space left" in (done.stderr or "")
    assert int((done.stdout or "").split()[0]) <= FOLDER_MB * 1024


def test_a_command_that_outlives_its_killed_child_is_killed_and_named_as_what_it_is(by: str) -> None:
    done = run("if os.fork(): os.wait(); print('on'); os._exit(0)\nattempt(shared)", by)
    assert "held" not in (done.stdout or "")
    assert (done.return_code, done.error_type) == (137, None)
    assert "killed: more than 128 MiB of memory" in (done.stderr or "")


def test_no_control_group_is_left() -> None:
    if why := why_not("cgroup"):
        pytest.skip(why)
    run("", "cgroup")
    groups = [group for _, parent in memory_of_sandboxes._parents(Path("/")) for group in parent.glob("nemo-gym-*")]
    assert [group for group in groups if f"-{os.getpid()}-" in group.name] == []


def test_the_control_group_of_a_killed_program_is_removed_by_the_next_one() -> None:
    if why := why_not("cgroup"):
        pytest.skip(why)
    code = """
import asyncio, os
from nemo_gym.sandbox import AsyncSandbox

async def main():
    sandbox = await AsyncSandbox({"local": {}}).start()
    print(sandbox.handle.raw.group.folder, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    forgotten = Path(done.stdout.strip())
    assert forgotten.name.startswith("nemo-gym-sandbox-")

    def is_removed() -> bool:
        run("", "cgroup")
        return not forgotten.exists()

    until(is_removed)


def test_without_a_limit_only_what_the_user_asked_for_is_missing() -> None:
    if why := why_not("none"):
        pytest.skip(why)
    done = run("attempt(shared, 1, 200)", "none")
    assert (done.stdout, done.return_code) == ("held\n", 0)


def test_a_control_group_that_is_wanted_and_not_there_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nowhere(memory_bytes: int, folder_bytes: int) -> MemoryGroup:
        return made(memory_bytes, folder_bytes, tmp_path)

    made = MemoryGroup.make
    monkeypatch.setattr(MemoryGroup, "make", nowhere)
    words = r"memory of a local sandbox cannot be limited here \(no control group .*set `memory_limit_by: auto`"
    with pytest.raises(SandboxUnavailableError, match=words):
        run("", "cgroup")
    if why_not("watch") is None:
        assert "held" not in (run(ATTEMPTS["shared mappings"], "auto").stdout or "")


def test_another_way_to_limit_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`memory_limit_by` .* must be one of auto, cgroup, watch, none, not 'magic'"):
        create_provider({"local": {"memory_limit_by": "magic"}})


def test_groups_of_version_2_are_made_beside_a_group_with_processes_and_limit_swap(tmp_path: Path) -> None:
    own = tmp_path / "sys/fs/cgroup/user.slice/app.slice/shell.scope"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own / "cgroup.subtree_control").write_text("\n")
    (own.parent / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/app.slice/shell.scope\n")
    assert [parent for _, parent in memory_of_sandboxes._parents(tmp_path)] == [own.parent]
    (own / "memory.max").write_text("1000000\n")
    with pytest.raises(OSError, match="no control group that we may write to"):
        MemoryGroup.make(1, 1, tmp_path)


@pytest.mark.parametrize("layers", [["namespaces", "seccomp"], ["landlock", "seccomp"]])
@pytest.mark.parametrize("name", ["shared mappings", "one shared mapping", "mappings of /dev/zero", "memfd"])
def test_isolated_programs_cannot_pass_their_limit_either(name: str, layers: list[str], tmp_path: Path) -> None:
    attempts = {**ATTEMPTS, "memfd": "attempt(memfd)"}
    program = f"try:\n{_indented(_PROGRAM + attempts[name])}\nexcept SystemExit: out = 'refused'\nelse: out = 'held'"
    with isolated(tmp_path, layers) as process:
        if not process.holds:
            pytest.skip(str(process.problems))
        outcome = _called(process, program)
    assert (outcome[0], outcome[1]) in {("done", "refused"), ("error", None)}, outcome


def _indented(program: str) -> str:
    return "\n".join(f"  {line}" for line in program.splitlines())


def _called(process: IsolatedProcess, program: str) -> tuple[str, Any, str]:
    from nemo_gym.sandbox.child import Limits

    outcome = process.call(program, Limits(wall_s=60, cpu_s=30, memory_mb=LIMIT_MB, file_mb=4))
    return outcome.end, outcome.value, outcome.stderr[-300:]
