"""The order in which the layers are put on, and which of them this system allows.

Namespaces and Landlock each keep a process away from files; seccomp keeps it away from the network, from
other processes and from the rest of the kernel. A process is confined when seccomp and at least one of
the other two hold.
"""

import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.sandbox import landlock, namespaces, seccomp
from nemo_gym.sandbox.kernel import PR_SET_PDEATHSIG, drop_capabilities, prctl

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"
LAYERS = (NAMESPACES, LANDLOCK, SECCOMP)

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/usr/share/zoneinfo", "/etc/localtime")


@dataclass
class Confinement:
    """Which layers hold, and why the others do not."""

    folder: Path
    """The one place that can be written to."""
    layers: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the process can do no harm: not to files, other processes, the network."""
        return SECCOMP in self.layers and len(self.layers) > 1

    def attempt(self, layer: str, put_on: Callable[[], None]) -> None:
        """Put a layer on, or note why it cannot be."""
        try:
            put_on()
        except OSError as error:
            self.problems[layer] = str(error)
        else:
            self.layers.append(layer)


def what_python_needs() -> list[Path]:
    """Files and folders without which this interpreter cannot import its libraries."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [path for place in dict.fromkeys([*own, *_LIBRARIES, *_HARMLESS]) if (path := Path(place)).exists()]


def confine(folder: Path, allowed: list[str], folder_bytes: int) -> Confinement:
    """Put on every layer of `allowed` that this system offers; `folder` is empty and stays writable.

    With namespaces the caller goes on as the first process of its namespace.
    """
    result = Confinement(folder)
    if sys.platform != "linux":  # elsewhere the same numbers may be other system calls
        result.problems = dict.fromkeys(allowed, f"{sys.platform} has no such thing")
        allowed = []
    readable = what_python_needs()
    if NAMESPACES in allowed:
        result.attempt(NAMESPACES, lambda: _enter_namespaces(folder, readable, folder_bytes))
        if NAMESPACES in result.layers:
            result.folder = namespaces.FOLDER_INSIDE
    if LANDLOCK in allowed:
        devices = [path for path in readable if path == Path("/dev/null")]
        result.attempt(LANDLOCK, lambda: landlock.restrict(readable, [result.folder, *devices]))
    if SECCOMP in allowed:
        result.attempt(SECCOMP, _forbid_system)
    _settle_in(result.folder)
    sys.path[:] = [entry for entry in sys.path if any(Path(entry).is_relative_to(path) for path in readable)]
    return result


def _forbid_system() -> None:
    drop_capabilities()
    seccomp.forbid_system()


def _settle_in(folder: Path) -> None:
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)


def _enter_namespaces(folder: Path, readable: list[Path], folder_bytes: int) -> None:
    """Try in a child first, since a failure half way leaves a process that is good for nothing."""
    pid = os.fork()
    if pid == 0:
        _exit_with_errno_of(lambda: namespaces.enter(folder, readable, folder_bytes))
    error = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if error:
        raise OSError(error, f"cannot be entered: {os.strerror(error) if error > 0 else f'signal {-error}'}")
    namespaces.enter(folder, readable, folder_bytes)
    inner = os.fork()
    if inner:
        _leave_with(inner)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_errno_of(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        os._exit(error.errno or 1)
    os._exit(0)


def _leave_with(inner: int) -> None:
    """Wait for the process inside, holding nothing open, and end as it ended."""
    os.closerange(0, 64)
    status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    os._exit(status if status >= 0 else 1)
