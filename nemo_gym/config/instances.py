"""The server instances of a configuration: which blocks are servers, and whom they refer to."""

import logging
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, ListConfig
from pydantic import ValidationError

from nemo_gym.errors import AlmostServerError, ConfigError, ServerRefNotFoundError
from nemo_gym.keys import (
    ENTRYPOINT_KEY_NAME,
    ERROR_ON_ALMOST_SERVERS_KEY_NAME,
    MODELS_TYPE,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    POLICY_MODEL_KEY_NAME,
    SERVER_TYPES,
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


def merge_dummy_model(tree: dict[str, Any]) -> None:
    """Let a real model take the place of the `dummy_model` that commands without a model start from."""
    for block in tree.values():
        models = block.get(MODELS_TYPE) if isinstance(block, Mapping) else None
        if not isinstance(models, dict) or "dummy_model" not in models or len(models) < 2:
            continue
        dummy = models.pop("dummy_model")
        first = next(iter(models))
        models[first] = {**dummy, **models[first]}


def find_instances(config: DictConfig) -> tuple[list[ServerInstanceConfig], dict[str, ValidationError]]:
    """The server instances in config order, and why blocks that look like servers are none."""
    instances: list[ServerInstanceConfig] = []
    almost: dict[str, ValidationError] = {}
    for name, block in config.items_ex(resolve=False):
        if name in NEMO_GYM_RESERVED_TOP_LEVEL_KEYS or not isinstance(block, DictConfig):
            continue
        instance, error = maybe_get_server_instance_config(str(name), block)
        if instance is not None:
            instances.append(instance)
        elif error is not None and is_almost_server(block):
            almost[str(name)] = error
        elif server_types_in(block):
            logger.warning(
                "%r names a server type but has no `%s`, so it is not a server and is not started",
                name,
                ENTRYPOINT_KEY_NAME,
            )
    return instances, almost


def almost_server_problems(almost: dict[str, ValidationError], config: DictConfig) -> list[ConfigError]:
    """One consolidated report on the blocks that were surely meant to be servers."""
    if not almost:
        return []
    report = "\n".join(
        f"Almost-Server Detected: {name!r} failed validation and will NOT be started\n"
        + "\n".join(f"  - {line}" for line in readable_errors(error))
        for name, error in almost.items()
    )
    if not config.get(ERROR_ON_ALMOST_SERVERS_KEY_NAME, True):
        logger.warning("Configuration Warnings: Almost-Servers Detected\n%s", report)
        return []
    return [
        AlmostServerError(
            f"{len(almost)} almost-server(s) with validation errors. Configuration Warnings: Almost-Servers Detected\n"
            f"{report}\nCorrect them, or start without them: +{ERROR_ON_ALMOST_SERVERS_KEY_NAME}=false"
        )
    ]


def readable_errors(error: ValidationError) -> list[str]:
    """`where -> in -> the block: what is wrong`, without the noise of server types that were not meant."""
    found = error.errors(include_url=False)
    named = {str(item["loc"][0]) for item in found if item["loc"] and item["type"] != "missing"}
    lines: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    for item in found:
        location = [str(part) for part in item["loc"]]
        if item["type"] == "missing" and len(location) == 1 and location[0] in SERVER_TYPES and named - {location[0]}:
            continue
        where = " -> ".join(location) or "the block"
        if item["type"] in ("literal_error", "enum"):
            expected = str(item.get("ctx", {}).get("expected", ""))
            choices.setdefault(where, []).append(expected)
            lines[where] = f"{where}: Must be one of: {', '.join(dict.fromkeys(choices[where]))}"
        else:
            lines[f"{where}{item['type']}"] = f"{where}: {item['msg'].removeprefix('Value error, ')}"
    return list(lines.values())


def dangling_refs(instances: list[ServerInstanceConfig]) -> list[ConfigError]:
    """One error per reference, at any depth, to a server that is not configured."""
    available = {(instance.SERVER_TYPE, instance.name) for instance in instances}
    return [
        _not_found(instance, path, ref, available)
        for instance in instances
        for path, ref in _refs(instance.get_inner_run_server_config_dict())
        if (ref.type, ref.name) not in available
    ]


def _refs(node: Any, path: str = "") -> Iterator[tuple[str, ServerRef]]:
    if isinstance(node, DictConfig):
        if (ref := is_server_ref(node)) is not None:
            yield path, ref
            return
        for key, value in node.items():
            yield from _refs(value, f"{path}.{key!s}" if path else str(key))
    elif isinstance(node, ListConfig):
        for position, value in enumerate(node):
            yield from _refs(value, f"{path}[{position}]")


def _not_found(
    instance: ServerInstanceConfig, path: str, ref: ServerRef, available: set[tuple[str, str]]
) -> ServerRefNotFoundError:
    same_type = sorted(name for server_type, name in available if server_type == ref.type)
    close = get_close_matches(ref.name, same_type, n=3, cutoff=0.6)
    if close:
        hint = f"Did you mean {', '.join(map(repr, close))}?"
    elif ref.name == POLICY_MODEL_KEY_NAME:
        hint = (
            "Add a model's config file to config_paths, for example "
            "responses_api_models/openai_model/configs/openai_model.yaml for an OpenAI-compatible endpoint, or "
            "responses_api_models/scripted_model/configs/scripted_model.yaml to try things without a key"
        )
    else:
        hint = f"Available {ref.type}: {', '.join(same_type) or 'none'}"
    return ServerRefNotFoundError(
        f"Could not find {ref.name!r} ({ref.type}), which {instance.name!r} refers to in `{path}`, "
        f"in the list of available servers. {hint}"
    )
