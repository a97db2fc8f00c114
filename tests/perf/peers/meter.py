"""What a command uses from its start until the last of its processes has ended.

Run as a program: it adopts the command's orphans, so that none of its processes goes uncounted, and prints one line
of JSON. CPU is counted by the kernel; memory is looked at a few times a second, what processes share counted once.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

LOOK_EVERY_S = 0.01
WEIGH_EVERY_S = 0.25
ORPHANS_MAY_LIVE_S = 10.0
SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Usage:
    """One command."""

    seconds: float
    """Until it ended itself."""
    cpu_s: float
    """Of all its processes."""
    peak_mb: float
    """Most memory of all its processes together."""
    first_result_s: float
    """Until the first result was in its file."""

    @classmethod
    def of(cls, command: list[str], folder: Path, results: str, timeout_s: float, **settings: Any) -> "Usage":
        """Run a command under a meter of its own; `results` says where in the folder its results are."""
        meter = [sys.executable, "-m", "tests.perf.peers.meter", str(folder), results, str(timeout_s), *command]
        root = Path(__file__).parents[3]
        with (folder / "meter.json").open("wb") as found, (folder / "output.log").open("wb") as output:
            done = subprocess.run(meter, cwd=root, stdout=found, stderr=output, timeout=2 * timeout_s, **settings)
        if done.returncode:
            said = (folder / "output.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; its last words:\n{said}")
        return cls(**orjson.loads((folder / "meter.json").read_bytes()))


def has_result(folder: Path, results: str) -> bool:
    """Whether a file of that name has a result in it; a log of inspect_ai is an archive with a file per sample."""
    for path in folder.glob(results):
        if path.suffix != ".eval":
            return path.stat().st_size > 0
        with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as log:
            return any(name.startswith("samples/") for name in log.namelist())
    return False


def memory_mb(process: psutil.Process) -> float:
    """A process and all its descendants, what they share counted once."""
    used_kb = 0
    for member in (process, *process.children(recursive=True)):
        with suppress(OSError), Path(f"/proc/{member.pid}/smaps_rollup").open() as rollup:
            used_kb += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return used_kb / 1e3


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended; only Linux knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Wait for processes that the command left behind; end them when they stay."""
    deadline = time.monotonic() + ORPHANS_MAY_LIVE_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        if time.monotonic() > deadline:
            for orphan in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
        time.sleep(LOOK_EVERY_S)


def measure(command: list[str], folder: Path, results: str, timeout_s: float) -> tuple[int, Usage]:
    """Run it; its output goes to standard error."""
    adopt_orphans()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    peak_mb, first_result_s, weighed_s = 0.0, 0.0, began
    while process.poll() is None:
        now = time.perf_counter()
        if not first_result_s and has_result(folder, results):
            first_result_s = time.perf_counter() - began
        if now - weighed_s > WEIGH_EVERY_S:
            weighed_s = now
            with suppress(psutil.NoSuchProcess):
                peak_mb = max(peak_mb, memory_mb(psutil.Process(process.pid)))
        if now - began > timeout_s:
            process.terminate()
        time.sleep(LOOK_EVERY_S)
    seconds = time.perf_counter() - began
    reap_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process.returncode, Usage(seconds, used.ru_utime + used.ru_stime, peak_mb, first_result_s or seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("results")
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    code, usage = measure(given.command, given.folder, given.results, given.timeout_s)
    sys.stdout.write(orjson.dumps(asdict(usage)).decode() + "\n")
    sys.exit(code)
