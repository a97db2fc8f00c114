"""What can be wrong with a merged configuration, each problem as an error that names its remedy.

Every check returns its findings instead of raising, so that a user sees all of them at once. An instance that two
files define in different ways is such a problem, too: both files are named.
"""

import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import BaseModel, ValidationError

from nemo_gym.config.files import ConfigFile
from nemo_gym.config.overrides import Change
from nemo_gym.config.references import names_used_by_interpolations, plain_tree
from nemo_gym.config.trees import leaves, path_parts, walk
from nemo_gym.errors import (
    ConfigError,
    ConfigMissingValuesError,
    DuplicateInstanceError,
    NoServerInstancesError,
    UnknownOptionError,
    did_you_mean,
    listed,
    similar_names,
)
from nemo_gym.keys import (
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
    COPY_KEY_NAME,
    DELETE_KEY_KEY_NAME,
    INHERIT_FROM_KEY_NAME,
    MISSING,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    WELL_KNOWN_KEYS,
)
from nemo_gym.schemas.cli_config import ALL_SHORTCUTS
from nemo_gym.schemas.server_config import is_almost_server, server_types_in

logger = logging.getLogger(__name__)

_MEANT_BY = {"model": "policy_model_name", "input": "input_jsonl_fpath"}
"""Parameters of a request that nobody wants to set for every row."""


class RaisingChecks:
    """Checks of a config for programs that make them one by one: what is wrong is raised."""

    def raise_on_no_server_instances(self, global_config_dict: DictConfig) -> None:
        """Raise `NoServerInstancesError` if nothing in the config is a server."""
        if not any(server_types_in(block) for block in plain_tree(global_config_dict).values()):
            raise NoServerInstancesError(
                "the configuration defines no server, so there is nothing to start; name an environment and a model, "
                "or their config files in config_paths"
            )

    def collect_missing_value_paths(self, config: DictConfig) -> list[str]:
        """The paths of all values still marked `???`."""
        return [path for path, value in leaves(plain_tree(config)) if value == MISSING]

    def raise_on_missing_values(self, global_config_dict: DictConfig) -> None:
        """Raise `ConfigMissingValuesError` if there are such values; all of them are named."""
        for problem in missing_values(plain_tree(global_config_dict)):
            raise problem


def missing_values(tree: Mapping[str, Any]) -> list[ConfigError]:
    """One error for all values still marked `???`."""
    paths = [path for path, value in leaves(tree) if value == MISSING]
    if not paths:
        return []
    listed = "".join(f"\n  {path}" for path in paths)
    examples = " ".join(f"++{path}=<value>" for path in paths[:3])
    return [
        ConfigMissingValuesError(
            f"{len(paths)} required config value(s) are unset:{listed}\n"
            f"Set them in env.yaml or on the command line, for example: {examples}"
        )
    ]


def unknown_options(changes: Sequence[Change], tree: Mapping[str, Any], known: Collection[str]) -> list[ConfigError]:
    """One error per top-level key given on the command line that nothing reads.

    `known` holds the options of the commands and the keys that config files define; `tree` is the merged config.
    """
    everything = {*known, *NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, *WELL_KNOWN_KEYS}
    given = dict.fromkeys(change.top_level_key for change in changes if not change.delete)
    unknown = [key for key in given if key not in everything and not server_types_in(tree.get(key))]
    if unknown:
        everything |= names_used_by_interpolations(tree)
    problems: list[ConfigError] = [
        UnknownOptionError(_unknown_option(key, changes, everything)) for key in unknown if key not in everything
    ]
    return [*problems, *_unknown_servers(set(given) - everything, tree), *_unknown_response_params(changes, tree)]


def _unknown_option(key: str, changes: Sequence[Change], known: Collection[str]) -> str:
    own_key = f" (a key of your own is accepted with +{ALLOW_UNKNOWN_KEYS_KEY_NAME}=true)"
    if key in ALL_SHORTCUTS:
        meant = f"; did you mean {_MEANT_BY[key]!r}? As" if key in _MEANT_BY else ": as"
        return (
            f"unknown option {key!r}{meant} one word (+{key}=<name>) it is for commands that start servers or read "
            f"their configs, such as ng_run and ng_e2e_collect_rollouts{own_key}"
        )
    if key in _MEANT_BY:
        return f"unknown option {key!r}; did you mean {_MEANT_BY[key]!r}?{own_key}"
    similar = did_you_mean(key, {*known, *ALL_SHORTCUTS})
    name = next(iter(similar_names(key, _response_params().model_fields)), "")
    if name == key or (name and not similar):
        argument = next(change.argument for change in changes if change.top_level_key == key)
        value = argument.partition("=")[2]
        option = shlex.quote(f"+{RESPONSES_CREATE_PARAMS_KEY_NAME}.{name}={value}")
        return f"unknown option {key!r}; what every request asks of the model is set by {option}"
    return f"unknown option {key!r}{similar}{own_key}"


def _unknown_servers(given: Collection[str], tree: Mapping[str, Any]) -> list[ConfigError]:
    """One error per setting of a server that there is not, where others are configured; whole servers are fine."""
    servers = [name for name, block in tree.items() if is_almost_server(block)]
    return [
        UnknownOptionError(
            f"no server is called {key!r}{did_you_mean(key, servers) or '.'} "
            f"What is set under that name would reach nobody; the servers are {listed(servers)}"
        )
        for key in sorted(given)
        if servers and server_types_in(tree.get(key)) and not _may_become_server(tree[key])
    ]


def _may_become_server(block: Mapping[str, Any]) -> bool:
    """Whether a block has what a server needs, or takes it from elsewhere."""
    return is_almost_server(block) or any(
        place.keys[-1] in (INHERIT_FROM_KEY_NAME, COPY_KEY_NAME) for place in walk(block)
    )


def _response_params() -> type[BaseModel]:
    from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming  # slow, seldom needed

    return NeMoGymResponseCreateParamsNonStreaming


def _unknown_response_params(changes: Sequence[Change], tree: Mapping[str, Any]) -> list[ConfigError]:
    option = RESPONSES_CREATE_PARAMS_KEY_NAME
    given: dict[str, None] = {}
    for change in changes:
        top_level_key, *below = path_parts(change.key)
        if top_level_key == option and below:
            given[below[0]] = None
        elif top_level_key == option and isinstance(change.value, Mapping):
            given.update(dict.fromkeys(map(str, change.value)))
    if not given:
        return []
    fields = _response_params().model_fields
    unknown: list[ConfigError] = [
        UnknownOptionError(
            f"unknown option '{option}.{key}'{did_you_mean(key, fields)}"
            f" (parameters of one vendor go into {option}.metadata.extra_body)"
        )
        for key in given
        if key not in fields
    ]
    merged = tree.get(option)
    params = merged if isinstance(merged, Mapping) else {}
    known = {key: params[key] for key in given if key in fields and key in params and "${" not in str(params[key])}
    return [*unknown, *_unfit_response_params(known)]


def _unfit_response_params(params: Mapping[str, Any]) -> list[ConfigError]:
    """One error per parameter that every request would be refused for."""
    try:
        _response_params().model_validate({"input": [], **params})
    except ValidationError as error:
        first = {str(fault["loc"][0]): fault["msg"] for fault in reversed(error.errors()) if fault["loc"]}
        option = RESPONSES_CREATE_PARAMS_KEY_NAME
        return [ConfigError(f"+{option}.{key}={params[key]}: {first[key]}") for key in params if key in first]
    return []


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
