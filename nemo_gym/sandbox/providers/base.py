"""What a sandbox is described by, and what a provider of sandboxes must offer.

Everything here is data or a Protocol: a provider of somebody else imports this module and nothing more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

RUNTIME_RETURN_CODE = 125
"""What a command "returns" that the sandbox could not run to its end; `error_type` then says why."""
TIMEOUT, SANDBOX = "timeout", "sandbox"
"""The values of `SandboxExecResult.error_type`."""
_MAX_PORT = 65535


class SandboxStatus(str, Enum):  # noqa: UP042 - as text it is not its value, on which programs rely
    """What is known of a sandbox."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class SandboxEndpoint:
    """How a port inside a sandbox is reached from here."""

    endpoint: str
    headers: dict[str, str] = field(default_factory=dict)
    """To be sent with every request."""

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint)
        if not url.scheme or not url.netloc:
            raise ValueError(f"the endpoint of a sandbox must be an absolute URL, not {self.endpoint!r}")


@dataclass(frozen=True)
class SandboxResources:
    """What a sandbox may use; None leaves it to the provider."""

    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    gpu: int | None = None
    gpu_type: str | None = None

    @classmethod
    def from_mapping(cls, resources: Mapping[str, Any] | None) -> "SandboxResources":
        """Read them from a config.

        Raises:
            ValueError: a key that is none of these.
        """
        given = dict(resources or {})
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"sandbox resources have no {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True)
class SandboxSpec:
    """The sandbox that is wanted, in words that every provider understands."""

    image: str | None = None
    ttl_s: int | float | None = None
    """How long it may live, whoever forgets it."""
    ready_timeout_s: int | float | None = None
    """How long to wait until it can be used; None leaves it to the provider."""
    workdir: str | None = None
    """Where commands run that name no folder."""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts to be put inside when it is started, by path."""
    metadata: dict[str, str] = field(default_factory=dict)
    resources: SandboxResources | Mapping[str, Any] = field(default_factory=SandboxResources)
    entrypoint: list[str] | None = None
    provider_options: dict[str, Any] = field(default_factory=dict)
    """For one provider only."""
    ports: tuple[int, ...] | list[int] = field(default_factory=tuple)
    """Those that are to be reached from outside."""

    def __post_init__(self) -> None:
        if not isinstance(self.resources, SandboxResources):
            object.__setattr__(self, "resources", SandboxResources.from_mapping(self.resources))
        object.__setattr__(self, "ports", _checked_ports(self.ports))

    @property
    def limits(self) -> SandboxResources:
        """`resources`, which is no mapping any more."""
        assert isinstance(self.resources, SandboxResources)
        return self.resources


def _checked_ports(ports: Any) -> tuple[int, ...]:
    if not isinstance(ports, list | tuple):
        raise ValueError(f"ports of a sandbox must be a list, not {ports!r}")
    checked = tuple(_checked_port(port) for port in ports)
    if len(set(checked)) != len(checked):
        raise ValueError(f"ports of a sandbox must be distinct: {list(ports)}")
    return checked


def _checked_port(port: Any) -> int:
    is_number = isinstance(port, int) and not isinstance(port, bool)
    if not is_number and not (isinstance(port, str) and port.isascii() and port.isdigit()):
        raise ValueError(f"a port of a sandbox must be a number from 1 to {_MAX_PORT}, not {port!r}")
    number = int(port)
    if not 1 <= number <= _MAX_PORT:
        raise ValueError(f"a port of a sandbox must be a number from 1 to {_MAX_PORT}, not {port!r}")
    return number


@dataclass(frozen=True)
class SandboxHandle:
    """A sandbox that runs; only its provider knows what `raw` is."""

    sandbox_id: str
    provider_name: str
    raw: Any


@dataclass(frozen=True)
class SandboxExecResult:
    """How a command in a sandbox ended."""

    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None
    """None when the command ended by itself, whatever it returned; `timeout` or `sandbox` when it could not."""


ExecResult = SandboxExecResult


@dataclass(frozen=True)
class SandboxPtySpec:
    """The terminal session that is wanted; without a command, the default shell."""

    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    rows: int = 24
    cols: int = 80
    user: str | int | None = None
    pty: bool = True


class SandboxPtyError(RuntimeError):
    """A terminal session failed, which says nothing about the command in it."""


class SandboxCreateError(RuntimeError):
    """A sandbox could not be made."""


class SandboxCreateVerificationError(SandboxCreateError):
    """A sandbox was made, and does not work."""


class SandboxProvider(Protocol):
    """Makes sandboxes and works on them. It belongs to one event loop."""

    name: str

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Make a sandbox and return when it can be used; what was begun is removed when that fails."""
        ...

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a shell command to its end; failures are results, too."""
        ...

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy one file into the sandbox."""
        ...

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy one file out of the sandbox."""
        ...

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """What is known of it."""
        ...

    async def close(self, handle: SandboxHandle) -> None:
        """Remove it with all that is in it; fine if it has gone already."""
        ...

    async def aclose(self) -> None:
        """Release what the provider itself holds."""
        ...


@runtime_checkable
class SupportsSandboxEndpoint(Protocol):
    """A provider whose sandboxes can be called."""

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        """How a port of the spec is reached from here."""
        ...


class SandboxPtySession(Protocol):
    """A program in a terminal of a sandbox."""

    session_id: str
    mode: str | None

    @property
    def closed(self) -> bool:
        """Whether it has been closed here."""
        ...

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """What it has written since; empty at its end."""
        ...

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """The same for stderr, which a terminal does not keep apart."""
        ...

    async def write(self, data: bytes) -> None:
        """Type something."""
        ...

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal."""
        ...

    async def send_signal(self, signal: str) -> None:
        """Signal the program, by the signal's name."""
        ...

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Its exit code, once it has ended."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...


@runtime_checkable
class SupportsSandboxPty(Protocol):
    """A provider whose sandboxes have terminals."""

    async def create_pty(self, handle: SandboxHandle, spec: SandboxPtySpec) -> SandboxPtySession:
        """Open a session."""
        ...


@runtime_checkable
class SupportsSandboxPtyAttach(Protocol):
    """A provider whose terminal sessions can be found again."""

    async def attach_pty(
        self, handle: SandboxHandle, session_id: str, *, takeover: bool = True, since: int | None = None
    ) -> SandboxPtySession:
        """Go on with a session."""
        ...


@runtime_checkable
class ConnectableProvider(Protocol):
    """A provider whose sandboxes can be found again from another process."""

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        """What another process needs in order to find it."""
        ...

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Find it again."""
        ...
