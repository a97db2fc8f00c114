"""Small helpers for agents that use sandboxes, and for the terminals in them."""

import asyncio
import shlex
import uuid
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxExecResult, SandboxPtyError, SandboxPtySession

CPU_CAP_ENV_VARS = (
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "PYTHON_CPU_COUNT",
    "NUMBA_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
    "POLARS_MAX_THREADS",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "DJANGO_TEST_PROCESSES",
    "GOMAXPROCS",
    "CARGO_BUILD_JOBS",
    "RAYON_NUM_THREADS",
    "RUST_TEST_THREADS",
    "UV_THREADPOOL_SIZE",
    "CMAKE_BUILD_PARALLEL_LEVEL",
)
"""Variables by which programs decide how many processors they use."""


def cpu_cap_env(cpu: float | None) -> dict[str, str]:
    """Return variables that keep the programs of a sandbox to its processors; none for a sandbox without a limit."""
    return {} if cpu is None else dict.fromkeys(CPU_CAP_ENV_VARS, str(max(1, int(cpu))))


def rewrite_image(image: str | None, rewrites: list[dict[str, str]]) -> str | None:
    """The image under its other name: the first of `{from, to}` whose `from` it begins with decides.

    Raises:
        ValueError: a rule that lacks one of both.
    """
    if image is None:
        return None
    for rule in rewrites:
        if "from" not in rule or "to" not in rule:
            raise ValueError(f"a rule for images must have `from` and `to`: {dict(rule)}")
        if image.startswith(rule["from"]):
            return rule["to"] + image[len(rule["from"]) :]
    return image


async def exec_alone(session: SandboxPtySession, *, is_terminal: bool) -> SandboxExecResult:
    """What the command of a session says until it ends, and its exit code."""

    async def all_of(read: Any) -> str:
        parts = []
        while part := await read():
            parts.append(part)
        return b"".join(parts).decode(errors="replace")

    if is_terminal:
        stdout, stderr = await all_of(session.read), ""
    else:
        stdout, stderr = await asyncio.gather(all_of(session.read), all_of(session.read_stderr))
    return SandboxExecResult(stdout, stderr, await session.wait_exit())


async def exec_in_shell(session: SandboxPtySession, command: str) -> SandboxExecResult:
    """Type the command between two marks that are written in two halves, so that their echo is not taken for them."""
    mark = uuid.uuid4().hex
    halves = f"{mark[:16]} {mark[16:]}"
    line = f" printf '%s%s\\n' {halves}; eval {shlex.quote(command)}; printf '\\n%s%s:%d\\n' {halves} $?\n"
    await session.write(line.encode())
    seen = b""
    while True:
        part = await session.read()
        if not part:
            raise SandboxPtyError("the terminal session ended before the command did")
        seen += part
        text = seen.decode(errors="replace").replace("\r\n", "\n")
        _, begun, rest = text.partition(f"{mark}\n")
        output, ended, code = rest.partition(f"\n{mark}:")
        if begun and ended and "\n" in code:
            return SandboxExecResult(output, "", int(code.partition("\n")[0]))
