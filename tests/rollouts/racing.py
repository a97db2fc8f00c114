"""Processes that want the same lock at the same time, with and without locks of the kernel."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

WITHOUT_LOCKS = """
import errno, fcntl, os

def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = refuse
"""
"""What makes a process believe that its file system has no locks."""
_RACE = """
import sys
from pathlib import Path
from nemo_gym.runs.lock import OutputInUseError, RunLock

print("ready", flush=True)
for line in sys.stdin:
    try:
        with RunLock(Path(line.strip())):
            print("won", flush=True)
            sys.stdin.readline()
    except OutputInUseError as error:
        print("lost", flush=True)
        sys.stdin.readline()
    print("over", flush=True)
"""


@contextmanager
def racers(folder: Path, number: int, *, has_locks: bool) -> Iterator[Callable[[Path], int]]:
    """A function that has so many processes take a lock at once, and tells how many of them got it."""
    command = [sys.executable, "-c", _RACE if has_locks else WITHOUT_LOCKS + _RACE]
    with ExitStack() as stack:
        processes = []
        for _ in range(number):
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=nothing, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)

        def said() -> list[str]:
            return [process.stdout.readline().strip() for process in processes if process.stdout is not None]

        def tell(line: str) -> None:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{line}\n")
                process.stdin.flush()

        def race(path: Path) -> int:
            tell(str(path))
            outcomes = said()
            tell("over")
            assert set(outcomes) <= {"won", "lost"}, outcomes
            assert said() == ["over"] * number
            return outcomes.count("won")

        assert said() == ["ready"] * number
        yield race
