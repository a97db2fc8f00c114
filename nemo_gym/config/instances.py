"""The server instances of a configuration: which blocks are servers, and whom they refer to."""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_gym.config.defaults import truth_value
from nemo_gym.config.interpolations import plain_tree, resolve
from nemo_gym.config.secrets import is_secret_key, mask_url_passwords
from nemo_gym.config.trees import Tree, as_block, child_path, children, value_at
from nemo_gym.errors import AlmostServerError, ConfigError, ServerRefNotFoundError, listed, similar_names
from nemo_gym.keys import (
    COPY_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    ERROR_ON_ALMOST_SERVERS_KEY_NAME,
    INHERIT_FROM_KEY_NAME,
    MASK,
    MODELS_TYPE,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    POLICY_MODEL_KEY_NAME,
)
from nemo_gym.schemas.server_config import (
    ServerInstanceConfig,
    ServerRef,
    is_almost_server,
    is_server_ref,
    maybe_get_server_instance_config,
    server_types_in,
)

logger = logging.getLogger(__name__)

_DUMMY_MODEL = "dummy_model"


def merge_dummy_model(tree: Tree) -> None:
    """Let a real server take the place of the `dummy_model` that commands without a model start from."""
    for block in tree.values():
        models = block.get(MODELS_TYPE) if isinstance(block, dict) else None
        if not isinstance(models, dict) or _DUMMY_MODEL not in models:
            continue
        if len(models) > 1:
            dummy = models.pop(_DUMMY_MODEL)
            first = next(iter(models))
            if isinstance(models[first], Mapping) and isinstance(dummy, Mapping):
                models[first] = {**dummy, **models[first]}
        elif len(server_types_in(block)) > 1:
            del block[MODELS_TYPE]


def copy_aliases(tree: Tree) -> None:
    """Make servers that are a `${...}` of another one copies of it: two servers cannot share one host and port."""
    for name, block in tree.items():
        tree[name] = block = _copied(block, tree)
        for server_type in server_types_in(block):
            block[server_type] = described = _copied(block[server_type], tree)
            for implementation, inner in described.items() if isinstance(described, dict) else ():
                described[implementation] = _copied(inner, tree)


def _copied(value: Any, tree: Tree) -> Any:
    block = as_block(value) if isinstance(value, str) else None
    return block if block is not None and _leads_to_server(block, tree) else value


def _leads_to_server(value: Any, tree: Tree, hops: int = 20) -> bool:
    """Whether a value is a server or part of one, or refers to one through no more than `hops` others."""
    block = as_block(value) if isinstance(value, str) else value
    if not isinstance(block, Mapping) or not hops:
        return False
    inner = [block, *(inside for inside in block.values() if isinstance(inside, Mapping))]
    if server_types_in(block) or any(ENTRYPOINT_KEY_NAME in each for each in inner):
        return True
    source = block.get(COPY_KEY_NAME) or block.get(INHERIT_FROM_KEY_NAME)
    return isinstance(source, str) and _leads_to_server(value_at(tree, source), tree, hops - 1)


def find_instances(
    config: DictConfig, resolved: Mapping[str, Any] | None = None, *, skip: Collection[str] = (), warn: bool = False
) -> tuple[list[ServerInstanceConfig], dict[str, ValidationError]]:
    """The server instances in config order, and why blocks that look like servers are none.

    `resolved` is the config as plain resolved data, for callers that have it; names in `skip` are passed over.
    With `warn`, blocks that will not be started are named in the log.
    """
    plain = resolve(config, plain_tree(config)).tree if resolved is None else resolved
    instances: list[ServerInstanceConfig] = []
    almost: dict[str, ValidationError] = {}
    for name, block in plain.items():
        if name in NEMO_GYM_RESERVED_TOP_LEVEL_KEYS or name in skip or not server_types_in(block):
            continue
        instance, error = maybe_get_server_instance_config(str(name), config[name], plain=block)
        if instance is not None:
            instances.append(instance)
            if warn:
                _warn_of_second_server(instance, block)
        elif error is not None and is_almost_server(block):
            almost[str(name)] = error
        elif warn:
            logger.warning(
                "%r names a server type but has no `%s`, so it is not a server and is not started",
                name,
                ENTRYPOINT_KEY_NAME,
            )
    return instances, almost


def _warn_of_second_server(instance: ServerInstanceConfig, block: Mapping[str, Any]) -> None:
    others = [server_type for server_type in server_types_in(block) if server_type != instance.SERVER_TYPE]
    if others:
        logger.warning(
            "%r is one of the %s; what it says under %s is not started: give that a name of its own",
            instance.name,
            instance.SERVER_TYPE,
            ", ".join(others),
        )


def almost_server_problems(almost: Mapping[str, ValidationError], config: Mapping[Any, Any]) -> list[ConfigError]:
    """One consolidated report on the blocks that were surely meant to be servers."""
    if not almost:
        return []
    details = "\n".join(
        "\n  - ".join([f"Almost-Server Detected: {name!r}", *readable_errors(error)]) for name, error in almost.items()
    )
    report = (
        "Configuration Warnings: Almost-Servers Detected\n"
        f"{len(almost)} almost-server(s) with validation errors: they look like servers, but will NOT be started.\n"
        f"{details}"
    )
    if not truth_value(config, ERROR_ON_ALMOST_SERVERS_KEY_NAME, default=True):
        logger.warning("%s", report)
        return []
    remedy = f"Correct them, or go on without them: +{ERROR_ON_ALMOST_SERVERS_KEY_NAME}=false"
    return [AlmostServerError(f"{report}\n{remedy}")]


def readable_errors(error: ValidationError) -> list[str]:
    """`where -> in -> the block: what is wrong`, the choices for one place on one line."""
    lines: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"] if not str(part).startswith("literal[")]  # a union's member
        where = " -> ".join(parts) or "the block"
        given = _given_value(item)
        if item["type"] in ("literal_error", "enum"):
            expected = str(item.get("ctx", {}).get("expected", ""))
            choices.setdefault(where, []).append(expected)
            lines[where] = f"{where}: Must be one of: {', '.join(dict.fromkeys(choices[where]))}{given}"
        else:
            lines[f"{where}{item['type']}"] = f"{where}: {item['msg'].removeprefix('Value error, ')}{given}"
    return list(lines.values())


def _given_value(item: ErrorDetails) -> str:
    """` (it is 5)` where that is short and no secret."""
    value = item["input"]
    if not isinstance(value, str | int | float) or item["type"] == "union_tag_invalid":
        return ""
    secret = any(is_secret_key(part) for part in item["loc"])
    return f" (it is {MASK if secret else mask_url_passwords(repr(value))})"


def dangling_refs(
    instances: list[ServerInstanceConfig],
    resolved: Mapping[str, Any],
    also_available: Collection[tuple[str, str]] = (),
) -> list[ConfigError]:
    """One error per reference, at any depth, to a server that is not configured.

    `resolved` is the config as plain resolved data; `also_available` holds (type, name) of further servers.
    """
    available = {(instance.SERVER_TYPE, instance.name) for instance in instances} | {*also_available}
    return [
        _not_found(instance, path, ref, available)
        for instance in instances
        for path, ref in _refs(resolved[instance.name][instance.SERVER_TYPE][instance.implementation])
        if (ref.type, ref.name) not in available
    ]


def _refs(node: Any, path: str = "") -> Iterator[tuple[str, ServerRef]]:
    if (ref := is_server_ref(node)) is not None:
        yield path, ref
    for key, value in children(node):
        yield from _refs(value, child_path(path, node, key))


def _not_found(
    instance: ServerInstanceConfig, path: str, ref: ServerRef, available: set[tuple[str, str]]
) -> ServerRefNotFoundError:
    same_type = sorted(name for server_type, name in available if server_type == ref.type)
    other_types = [server_type for server_type, name in available if name == ref.name]
    close = similar_names(ref.name, same_type, limit=3)
    if other_types:
        hint = f"{ref.name!r} is one of the {other_types[0]}: correct `type`, or name another server"
    elif close:
        hint = f"Did you mean {', '.join(map(repr, close))}?"
    elif ref.name == POLICY_MODEL_KEY_NAME:
        hint = (
            "Add a model's config file to config_paths, for example "
            "responses_api_models/openai_model/configs/openai_model.yaml for an OpenAI-compatible endpoint, or "
            "responses_api_models/scripted_model/configs/scripted_model.yaml to try things without a key"
        )
    else:
        hint = f"Available {ref.type}: {listed(same_type)}"
    return ServerRefNotFoundError(
        f"Could not find {ref.name!r} ({ref.type}), which {instance.name!r} refers to in `{path}`, "
        f"in the list of available servers. {hint}"
    )
