"""PUBLIC: what the config of a server says about it, for pages that list servers."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from nemo_gym.keys import AGENTS_TYPE, RESOURCES_TYPE

__all__ = ["ServerMetadata", "visit_agent_server", "visit_resources_server"]

_BLOCK_LEVEL = 4
"""Where a server's block is: below the instance, the type and the implementation."""


@dataclass
class ServerMetadata:
    """The descriptive keys of a server's block."""

    domain: str | None = None
    description: str | None = None
    verified: bool = False
    verified_url: str | None = None
    value: str | None = None

    def to_dict(self) -> dict[str, str | bool | None]:
        """All of them by name."""
        return asdict(self)


def visit_resources_server(data: dict[str, Any], level: int = 1) -> ServerMetadata:
    """What the first resources server in `data` says: a whole config, or the part of one that lies at `level`.

    1 is the config, 2 an instance, 3 its implementations, 4 the block of one.
    """
    return _first(data, level, RESOURCES_TYPE)


def visit_agent_server(data: dict[str, Any], level: int = 1) -> ServerMetadata:
    """The same for the first agent."""
    return _first(data, level, AGENTS_TYPE)


def _first(data: Any, level: int, server_type: str) -> ServerMetadata:
    block = next(_blocks(data, level, server_type), {})
    known = {field.name: block[field.name] for field in fields(ServerMetadata) if block.get(field.name) is not None}
    return ServerMetadata(**known)


def _blocks(data: Any, level: int, server_type: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(data, Mapping):
        return
    if level >= _BLOCK_LEVEL:
        yield data
        return
    inside = [data.get(server_type)] if level == 2 else data.values()
    for part in inside:
        yield from _blocks(part, level + 1, server_type)
