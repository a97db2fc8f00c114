"""Instances that two files define in different ways: both files are named."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.config.files import ConfigFile
from nemo_gym.errors import ConfigError, DuplicateInstanceError
from nemo_gym.keys import DELETE_KEY_KEY_NAME
from nemo_gym.schemas.server_config import is_almost_server, server_types_in

logger = logging.getLogger(__name__)


def conflicting_definitions(files: Sequence[ConfigFile], tree: Mapping[str, Any]) -> dict[str, ConfigError]:
    """One error per instance that has become several servers because files disagree about which it is.

    `tree` is what the files came to, so a file may well replace a server after deleting the former one.
    """
    problems: dict[str, ConfigError] = {}
    for name, block in tree.items():
        servers = implementations(block)
        if len(servers) < 2:
            continue
        owners: dict[Path, str] = {}
        for file in files:
            for server in sorted(servers & implementations(file.tree.get(name)) - set(owners.values())):
                owners.setdefault(file.path, server)
        if len(owners) > 1:
            (first, first_server), (second, second_server), *_ = owners.items()
            problems[name] = DuplicateInstanceError(
                f"server instance {name!r} is {first_server} in {first} and {second_server} in {second}; "
                f"keep one of the two, rename one instance, or drop the former with `{DELETE_KEY_KEY_NAME}`"
            )
    return problems


def warn_of_differing_definitions(files: Sequence[ConfigFile]) -> None:
    """Warn of each instance that two files define in full and differently, unless the later includes the earlier."""
    first_seen: dict[Any, ConfigFile] = {}
    for file in files:
        for name, block in file.tree.items():
            if not is_almost_server(block):
                continue
            earlier = first_seen.setdefault(name, file)
            before = earlier.tree[name]
            is_same_server = bool(implementations(before) & implementations(block))
            if is_same_server and before != block and earlier.path not in file.included:
                logger.warning(
                    "server instance %r is defined by %s and, differently, by %s; the values of the latter win",
                    name,
                    earlier.path,
                    file.path,
                )


def implementations(block: object) -> set[str]:
    """The servers a block describes, as `<server type>/<implementation>`."""
    return {
        f"{server_type}/{name}"
        for server_type in server_types_in(block)
        if isinstance(described := block[server_type], Mapping)  # type: ignore[index]
        for name, inner in described.items()
        if isinstance(inner, Mapping)
    }
