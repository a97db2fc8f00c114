"""What isolated code can and cannot do, with every combination of layers that amounts to a sandbox."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_gym.sandbox.child import Limits
from nemo_gym.sandbox.confine import LAYERS
from nemo_gym.sandbox.process import IsolatedProcess, Outcome, SandboxError, Work
from nemo_gym.sandbox.zygote import MAX_THREADS
from tests.sandbox.arena import isolated

RUN_PYTHON = """
def run(code):
    names = {}
    exec(code, names)
    return names.get("out")
"""
STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException:
        pass
"""
LIMITS = Limits(wall_s=20, cpu_s=10, memory_mb=256, file_mb=4)

Run = Callable[..., Outcome]


@pytest.fixture(scope="module", params=["namespaces landlock seccomp", "landlock seccomp", "namespaces seccomp"])
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedProcess]:
    folder = tmp_path_factory.mktemp("work")
    (folder / "run_python.py").write_text(RUN_PYTHON)
    process = IsolatedProcess()
    try:
        process.isolate(Work("run_python", (folder,)), request.param.split())
        if process.problems:
            pytest.skip(f"this system lacks a layer: {process.problems}")
        assert process.layers == request.param.split()
        assert process.holds
        yield process
    finally:
        process.close()


@pytest.fixture
def run(process: IsolatedProcess) -> Run:
    def run_code(code: str, limits: Limits = LIMITS, stdin: str = "") -> Outcome:
        return process.call(code, limits, stdin)

    return run_code


def last_line(outcome: Outcome) -> str:
    return outcome.stderr.strip().rpartition("\n")[2]


def test_ordinary_code_runs_and_returns_a_value(run: Run) -> None:
    outcome = run("import json, math, sys\nprint(sys.stdin.read())\nout = [math.pi, 'ü']", stdin="hällo")

    assert (outcome.end, outcome.value, outcome.stdout) == ("done", [3.141592653589793, "ü"], "hällo\n")


def test_threads_and_event_loops_work(run: Run) -> None:
    code = """
import asyncio, atexit, threading
threading.Thread(target=lambda: print("thread")).start()
atexit.register(lambda: print("at exit"))
out = asyncio.run(asyncio.sleep(0, "loop"))
"""
    outcome = run(code)

    assert (outcome.end, outcome.value) == ("done", "loop")
    assert outcome.stdout == "thread\nat exit\n"


def test_what_it_raises_is_told(run: Run) -> None:
    outcome = run("print('before')\n1 / 0")

    assert (outcome.end, outcome.stdout, last_line(outcome)) == (
        "error",
        "before\n",
        "ZeroDivisionError: division by zero",
    )


def test_the_environment_of_the_server_is_not_visible(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_API_KEY", "very secret")
    environment = run("import os\nout = dict(os.environ)").value

    assert "POLICY_API_KEY" not in environment
    assert "very secret" not in str(environment)
    for place in (f"/proc/{os.getpid()}/environ", "/proc/self/environ", f"/proc/{os.getpid()}/mem"):
        assert run(f"out = open({place!r}, 'rb').read(10)").end == "error", place


def test_files_of_the_server_cannot_be_read(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "env.yaml"
    secret.write_text("policy_api_key: very secret")

    for place in (secret, Path(__file__), Path("/etc/passwd")):
        outcome = run(f"out = open({str(place)!r}).read()")
        assert (outcome.end, outcome.value) == ("error", None), place
        assert last_line(outcome).startswith(("PermissionError", "FileNotFoundError"))
    assert run(f"import os\nout = os.listdir({str(tmp_path)!r})").end == "error"


@pytest.mark.parametrize(
    "attempt",
    [
        "open(place + '/new', 'w')",
        "open(place + '/kept', 'a').write('more')",
        "os.truncate(place + '/kept', 0)",
        "os.remove(place + '/kept')",
        "os.rename(place + '/kept', 'mine')",
        "os.link(place + '/kept', 'mine')",
        "os.mkdir(place + '/folder')",
        "os.chmod(place + '/kept', 0o777)",
        "os.utime(place + '/kept', (1, 1))",
        "os.symlink(place, 'link'); open('link/new', 'w')",
    ],
)
def test_nothing_outside_its_folder_can_be_changed(run: Run, tmp_path: Path, attempt: str) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    before = kept.stat()

    outcome = run(f"import os\nplace = {str(tmp_path)!r}\n{attempt}")

    assert outcome.end == "error", outcome
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "as it was"
    assert (kept.stat().st_mode, kept.stat().st_mtime) == (before.st_mode, before.st_mtime)


def test_its_folder_is_its_own_and_empty_every_time(run: Run) -> None:
    code = """
import os, tempfile
os.mkdir("locked", 0)
os.makedirs("a/b")
open("a/b/file", "w").write("left behind")
os.symlink("/", "a/link")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
out = open(os.path.expanduser("~/a/b/file")).read()
"""
    assert run(code).value == "left behind"
    assert run("import os\nout = os.listdir('.')").value == []


def test_the_network_is_out_of_reach(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        listening.settimeout(0.05)
        tcp = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
        with pytest.raises(TimeoutError):
            listening.accept()
    udp = run(f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))")
    local = run("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0somebody')")

    assert [outcome.end for outcome in (tcp, udp, local)] == ["error"] * 3
    assert last_line(udp) == "PermissionError: [Errno 1] Operation not permitted"


def test_it_cannot_start_processes_so_no_fork_bomb_goes_off(run: Run) -> None:
    bomb = run("import os\nwhile True:\n    os.fork()")
    program = run("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])")
    other = run("import os\nos.execv('/bin/sh', ['sh'])")

    for outcome in (bomb, program, other):
        assert (outcome.end, last_line(outcome)[:15]) == ("error", "PermissionError")


def test_a_bomb_of_threads_is_bounded_by_memory(run: Run) -> None:
    code = """
import threading, time
count = 0
while True:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    count += 1
"""
    outcome = run(code, Limits(wall_s=20, cpu_s=10, memory_mb=256))

    assert outcome.end == "error"
    assert last_line(outcome) == "RuntimeError: can't start new thread"


def test_threads_with_small_stacks_are_counted(run: Run) -> None:
    code = """
import threading, time
threading.stack_size(65536)
for _ in range(1500):
    ending = threading.Thread(target=int)
    ending.start()
    ending.join()
out = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        out += 1
except RuntimeError:
    pass
"""
    outcome = run(code, Limits(wall_s=60, cpu_s=30, memory_mb=1024))

    assert (outcome.end, outcome.value) == ("done", MAX_THREADS)


@pytest.mark.parametrize(
    "target", ["os.getppid()", "1", str(os.getpid()), "-1", "0"], ids=["parent", "init", "server", "all", "group"]
)
def test_it_cannot_signal_others(run: Run, target: str) -> None:
    outcome = run(f"import os\nos.kill({target}, 9)")

    assert outcome.end == "error"
    assert run("out = 'still here'").value == "still here"


def test_it_asks_for_processors_in_vain_and_lives(run: Run) -> None:
    outcome = run("import os\nos.sched_setaffinity(0, {0})")

    assert (outcome.end, last_line(outcome)) == ("error", "PermissionError: [Errno 1] Operation not permitted")


def test_no_signal_but_sigkill_ends_the_process_that_starts_children(run: Run, process: IsolatedProcess) -> None:
    pids = [process._process.pid, *descendants(process._process.pid)]
    before = run("import os\nout = os.getppid()").value

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        for pid in pids:
            os.kill(pid, number)

    assert run("import os\nout = os.getppid()").value == before
    assert process._process.poll() is None


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def test_it_may_end_itself(run: Run) -> None:
    aborted = run("import os\nos.abort()")
    exited = run("import os\nprint('bye', flush=True)\nos._exit(3)")
    nameless = run("import os\nos.kill(os.getpid(), 40)")

    assert (nameless.end, nameless.detail) == ("killed", "signal 40")
    assert (aborted.end, aborted.detail) == ("killed", "SIGABRT")
    assert (exited.end, exited.detail, exited.stdout) == ("error", "exit code 3", "bye\n")


def test_memory_is_bounded(run: Run) -> None:
    outcome = run("everything = bytearray(10**9)")

    assert (outcome.end, last_line(outcome)) == ("error", "MemoryError")


def test_files_are_bounded(run: Run) -> None:
    outcome = run("open('big', 'wb').write(bytes(10**7))")

    assert (outcome.end, last_line(outcome)) == ("error", "OSError: [Errno 27] File too large")


@pytest.mark.parametrize(("layers", "end"), [("namespaces seccomp", "error"), ("landlock seccomp", "folder_limit")])
@pytest.mark.parametrize(
    "code",
    [
        "for n in range(1000): open(f'{n}', 'wb').write(bytes(10**6))",
        "import os\nfor n in range(10_000): os.mkdir(f'{n}')",
        "import os\nos.umask(0o444)\nos.mkdir('d')\nfor n in range(1000): open(f'd/{n}', 'wb').write(bytes(10**6))",
    ],
    ids=["bytes", "entries", "hidden"],
)
def test_its_folder_is_bounded(tmp_path: Path, layers: str, end: str, code: str) -> None:
    with isolated(tmp_path, layers.split()) as process:
        if process.problems:
            pytest.skip(f"this system lacks a layer: {process.problems}")
        outcome = process.call(code, LIMITS)

        assert (outcome.end, process.is_clean) == (end, end != "folder_limit")
        assert end == "folder_limit" or "No space left on device" in last_line(outcome)


def test_output_is_bounded(run: Run) -> None:
    assert run("while True: print('x' * 10**6)").end == "output_limit"
    assert run("out = 'x' * (9 * 1024 * 1024)").end == "output_limit"


def test_a_loop_without_end_is_stopped(run: Run) -> None:
    assert run("while True: pass", Limits(wall_s=0.3, cpu_s=10)).end == "timeout"
    assert run("import time\ntime.sleep(60)", Limits(wall_s=0.3, cpu_s=10)).end == "timeout"


def test_limits_cannot_be_raised_nor_refused(run: Run) -> None:
    raised = run("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert (raised.end, last_line(raised)) == ("error", "ValueError: not allowed to raise maximum limit")
    assert run(STUBBORN, Limits(wall_s=0.3, cpu_s=10)).end == "timeout"


def test_dangerous_parts_of_the_kernel_are_closed(run: Run) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
out = {}
for name, arguments in {
    "unshare": (0x10000000,), "ptrace": (16, 1, 0, 0), "mount": (b"a", b"/", b"tmpfs", 0, None), "chroot": (b"/",),
    "setsid": (), "memfd_create": (b"a", 0),
}.items():
    out[name] = (getattr(libc, name)(*arguments), ctypes.get_errno())
"""
    answers = run(code).value

    assert answers == {name: [-1, 1] for name in answers}


def test_work_that_cannot_be_begun_says_nothing_about_the_work(process: IsolatedProcess) -> None:
    with pytest.raises(SandboxError, match=r"work could not be begun: \w+Error"):
        process.call("out = 1", Limits(wall_s=10, cpu_s=10, file_mb=10**30))

    assert process.call("out = 1", LIMITS).value == 1


def test_an_earlier_program_leaves_later_ones_no_less_memory(run: Run) -> None:
    much = "import mmap\nout = len(mmap.mmap(-1, 230 << 20))"
    run("print('x' * (7 << 20))", stdin="y" * (30 << 20))

    assert run(much).value == 230 << 20


@pytest.fixture
def another_process(tmp_path: Path) -> Iterator[IsolatedProcess]:
    """With whatever layers there are."""
    (tmp_path / "run_python.py").write_text(RUN_PYTHON)
    process = IsolatedProcess()
    try:
        process.isolate(Work("run_python", (tmp_path,)), LAYERS)
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("code", ["while True: pass", STUBBORN])
def test_time_on_a_processor_is_bounded_apart_from_time_on_the_clock(
    another_process: IsolatedProcess, code: str
) -> None:
    assert another_process.call(code, Limits(wall_s=60, cpu_s=1)).end == "cpu_limit"


def test_a_folder_that_cannot_be_tidied_up_spends_the_process(another_process: IsolatedProcess) -> None:
    another_process.call("import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')", LIMITS)

    assert not another_process.is_clean


NO_QUESTIONS = "from nemo_gym.sandbox import seccomp\nseccomp._NEW_LISTENER = 1 << 20\n"


@pytest.mark.parametrize(
    ("work", "layers", "is_alone"),
    [(NO_QUESTIONS, ["seccomp"], True), ("", [], False)],
    ids=["older kernel", "no layer"],
)
def test_what_the_system_does_not_offer_is_done_without(
    tmp_path: Path, work: str, layers: list[str], is_alone: bool
) -> None:
    (tmp_path / "run_python.py").write_text(work + RUN_PYTHON)
    process = IsolatedProcess()
    try:
        process.isolate(Work("run_python", (tmp_path,)), layers)
        threads = process.call(
            "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()\nout = 1", LIMITS
        )
        forked = process.call("import os\npid = os.fork()\nos._exit(0) if not pid else os.wait()", LIMITS)

        assert (threads.end, threads.value, process.holds) == ("done", 1, False)
        assert forked.end == ("error" if is_alone else "done")
    finally:
        process.close()
