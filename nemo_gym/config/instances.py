"""The server instances of a configuration: which blocks are servers, and whom they refer to.

Settings that have a value even when nobody gave one are filled in here, too.
"""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_gym.config.files import ConfigFile
from nemo_gym.config.references import plain_tree, resolve
from nemo_gym.config.secrets import is_secret_key, mask_url_passwords
from nemo_gym.config.trees import Place, Tree, as_block, has_path, value_at, walk
from nemo_gym.errors import (
    AlmostServerError,
    ConfigError,
    ServerRefNotFoundError,
    did_you_mean,
    listed,
    similar_names,
)
from nemo_gym.keys import (
    AGENTS_TYPE,
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    COPY_KEY_NAME,
    DRY_RUN_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    ERROR_ON_ALMOST_SERVERS_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    INHERIT_FROM_KEY_NAME,
    MASK,
    MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME,
    MODELS_TYPE,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    PATH_KEYS,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    RECORDING_BLOCK,
    RECORDING_FOLDER_KEY_NAME,
    RECORDING_MAX_BYTES_KEY_NAME,
    RECORDING_MODE_KEY_NAME,
    RESULTS_DIR_KEY_NAME,
    SERVER_TYPES,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    SKIP_VERIFICATION_KEY_NAME,
    SKIP_VERIFICATION_REWARD_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
)
from nemo_gym.paths import CACHE_DIR, RESULTS_DIR, WORKING_DIR
from nemo_gym.schemas.path_text import refuse_url
from nemo_gym.schemas.server_config import (
    RecordingConfig,
    RecordingMode,
    ServerInstanceConfig,
    ServerRef,
    is_almost_server,
    is_server_ref,
    maybe_get_server_instance_config,
    server_types_in,
)

logger = logging.getLogger(__name__)

_SWITCHES = (
    USE_ABSOLUTE_IP_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    DRY_RUN_KEY_NAME,
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
)
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_DUMMY_MODEL = "dummy_model"
_FOR_MODEL_SERVERS = {POLICY_BASE_URL_KEY_NAME, POLICY_API_KEY_KEY_NAME, POLICY_MODEL_NAME_KEY_NAME}


def fill_defaults(config: DictConfig) -> None:
    """Complete `config` in place; what the user set stays."""
    for key in PATH_KEYS:
        refuse_url(key, config.get(key))
    for key in _SWITCHES:
        config[key] = truth_value(config, key)
    for key, default in (
        (PYTHON_VERSION_KEY_NAME, sys.version.split()[0]),
        (MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME, 600),
        (UV_VENV_DIR_KEY_NAME, str(WORKING_DIR)),
    ):
        if config.get(key) is None:
            config[key] = default
    if config.get(HEAD_SERVER_DEPS_KEY_NAME) is None:
        config[HEAD_SERVER_DEPS_KEY_NAME] = _installed_pins()
    for key, folder in ((RESULTS_DIR_KEY_NAME, RESULTS_DIR), (CACHE_DIR_KEY_NAME, CACHE_DIR)):
        given = config.get(key)
        config[key] = _absolute(key, folder if given is None else given)
    if config.get(UV_CACHE_DIR_KEY_NAME) is None:
        config[UV_CACHE_DIR_KEY_NAME] = str(Path(config[CACHE_DIR_KEY_NAME]) / "uv")


def truth_value(config: Mapping[Any, Any], key: str, *, default: bool = False) -> bool:
    """A switch as a truth value: `no` and what an environment variable says would be text otherwise, hence true."""
    value = config.get(key)
    if value is None:
        return default
    known = _TRUTH.get(str(value).strip().lower())
    if known is None:
        raise ConfigError(f"{key} is {value!r}; it is either true or false")
    return known


def hand_down_skip_verification(config: DictConfig, instances: Sequence[ServerInstanceConfig]) -> None:
    """Let what the config says about verification hold for every agent that says nothing itself."""
    for key in (SKIP_VERIFICATION_KEY_NAME, SKIP_VERIFICATION_REWARD_KEY_NAME):
        if config.get(key) is None:
            continue
        for instance in instances:
            block = instance.get_inner_run_server_config_dict()
            if instance.SERVER_TYPE == AGENTS_TYPE and key not in block:
                block[key] = config[key]


def hand_down_recording(
    config: DictConfig, instances: Sequence[ServerInstanceConfig], *, looks_for_folders: bool
) -> list[ConfigError]:
    """Let what the config says about recording hold for every model server, over what its own block says.

    Folders become absolute: servers may be started elsewhere. With `looks_for_folders`, those to replay must exist.
    """
    keys = {
        "folder": RECORDING_FOLDER_KEY_NAME,
        "mode": RECORDING_MODE_KEY_NAME,
        "max_bytes": RECORDING_MAX_BYTES_KEY_NAME,
    }
    given = {name: config.get(key) for name, key in keys.items() if config.get(key) is not None}
    models = [instance for instance in instances if instance.SERVER_TYPE == MODELS_TYPE]
    problems: list[ConfigError] = []
    modes = set()
    for instance in models:
        block = instance.get_inner_run_server_config_dict()
        own = plain_tree(block.get(RECORDING_BLOCK)) if isinstance(block.get(RECORDING_BLOCK), Mapping) else None
        place = f"{instance.name}.{MODELS_TYPE}.{instance.implementation}.{RECORDING_BLOCK}"
        if own is None and block.get(RECORDING_BLOCK) is not None:
            problems.append(ConfigError(f"{place} is no mapping; write {{folder: <path>, mode: record}}"))
        if not own and not given:
            continue
        try:
            settings = RecordingConfig.model_validate({**(own or {}), **given})
        except ValidationError as error:
            problems += [_recording_fault(fault, place, given, keys) for fault in error.errors()]
            continue
        modes.add(settings.mode)
        if settings.folder is not None:
            settings.folder = str(Path(settings.folder).expanduser().absolute())
            is_there = not looks_for_folders or settings.mode is not RecordingMode.REPLAY
            if not is_there and not Path(settings.folder).is_dir():
                where = keys["folder"] if "folder" in given else f"{place}.folder"
                problems.append(ConfigError(f"{where}={settings.folder}: there is no such recording to replay"))
        block[RECORDING_BLOCK] = settings.model_dump(mode="json", exclude_none=True)
    if modes == {RecordingMode.OFF} and "folder" in given and "mode" not in given:
        problems.append(
            ConfigError(
                f"{keys['folder']} is given, but nothing says what to do with it: add +{keys['mode']}=record, replay "
                "or auto"
            )
        )
    return list({str(problem): problem for problem in problems}.values())


def _recording_fault(fault: ErrorDetails, place: str, given: Mapping[str, Any], keys: Mapping[str, str]) -> ConfigError:
    name = str(fault["loc"][0]) if fault["loc"] else ""
    if name in given:
        return ConfigError(f"{keys[name]}={given[name]}: {fault['msg']}")
    if name:
        known = "" if name in keys else f"; there are {listed(keys)}"
        return ConfigError(f"{place}.{name}: {fault['msg']}{known}{_given_value(fault)}")
    return ConfigError(f"{place}: {fault['msg'].removeprefix('Value error, ')}")


def _installed_pins() -> list[str]:
    """Exact versions of the packages that must agree between processes, where they are installed."""
    pins = []
    for distribution, requirement in {"ray": "ray[default]", "openai": "openai"}.items():
        try:
            pins.append(f"{requirement}=={version(distribution)}")
        except PackageNotFoundError:
            continue
    return pins


def _absolute(key: str, value: object) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"{key} is {value!r}; it takes the path of a folder")
    return str(Path(value).expanduser().absolute())


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


def blocks_not_started(tree: Mapping[str, Any], *, starts_servers: bool) -> set[str]:
    """Top-level names that matter only to servers, when these are not started, and blocks that are no servers.

    What a server that is started takes from such a place by `${...}` is looked at where it takes it.
    """
    if starts_servers:
        return {name for name, block in tree.items() if _is_block(name, block) and not is_almost_server(block)}
    return {name for name, block in tree.items() if _is_block(name, block) or name in _FOR_MODEL_SERVERS}


def _is_block(name: str, value: Any) -> bool:
    return isinstance(value, Mapping) and name not in NEMO_GYM_RESERVED_TOP_LEVEL_KEYS


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
    details = "\n".join(almost_server_warning(name, error) for name, error in almost.items())
    report = (
        "Configuration Warnings: Almost-Servers Detected\n"
        f"{len(almost)} almost-server(s) with validation errors: they look like servers, but will NOT be started.\n"
        f"{details}"
    )
    if not are_almost_servers_errors(config):
        logger.warning("%s", report)
        return []
    remedy = f"Correct them, or go on without them: +{ERROR_ON_ALMOST_SERVERS_KEY_NAME}=false"
    return [AlmostServerError(f"{report}\n{remedy}")]


def are_almost_servers_errors(config: Mapping[Any, Any]) -> bool:
    """Whether a block that was surely meant to be a server ends everything; else it is only warned of."""
    return truth_value(config, ERROR_ON_ALMOST_SERVERS_KEY_NAME, default=True)


def misnamed_types(tree: Mapping[str, Any], files: Sequence[ConfigFile] = ()) -> dict[str, ConfigError]:
    """One error per block that says under an unknown key, almost a server type, what a server is; by its name.

    Nobody would start it. Keys that resemble no server type are their author's own.
    """
    problems: dict[str, ConfigError] = {}
    for name, block in tree.items():
        if not _is_block(name, block) or server_types_in(block):
            continue
        for key, described in block.items():
            inner = described.values() if isinstance(described, Mapping) else ()
            meant = did_you_mean(str(key), SERVER_TYPES)
            if meant and any(isinstance(each, Mapping) and ENTRYPOINT_KEY_NAME in each for each in inner):
                file = next((f"{file.path}: " for file in files if has_path(file.tree, (name, key))), "")
                problems[name] = AlmostServerError(
                    f"{file}{name}.{key}: {key!r} is no type of server{meant} The server would not be started"
                )
    return problems


def almost_server_warning(name: str, error: ValidationError) -> str:
    """What is wrong with one such block."""
    return "\n  - ".join([f"Almost-Server Detected: {name!r}: it will NOT be started", *readable_errors(error)])


class Fault(NamedTuple):
    """One thing that is wrong inside a block."""

    keys: tuple[str, ...]
    """Where in the block; nothing: the block as a whole."""
    text: str

    def __str__(self) -> str:
        return f"{' -> '.join(self.keys) or 'the block'}: {self.text}"


def readable_faults(error: ValidationError) -> list[Fault]:
    """What is wrong, and where; the choices for one place are one fault."""
    faults: dict[object, Fault] = {}
    choices: dict[tuple[str, ...], list[str]] = {}
    for item in error.errors(include_url=False):
        keys = tuple(str(part) for part in item["loc"] if not str(part).startswith("literal["))  # a union's member
        given = _given_value(item)
        if item["type"] in ("literal_error", "enum"):
            expected = str(item.get("ctx", {}).get("expected", ""))
            choices.setdefault(keys, []).append(expected)
            faults[keys] = Fault(keys, f"Must be one of: {', '.join(dict.fromkeys(choices[keys]))}{given}")
        else:
            faults[keys, item["type"]] = Fault(keys, f"{item['msg'].removeprefix('Value error, ')}{given}")
    return list(faults.values())


def readable_errors(error: ValidationError) -> list[str]:
    """`where -> in -> the block: what is wrong`, the choices for one place on one line."""
    return [str(fault) for fault in readable_faults(error)]


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
    """One error per reference to a server that is not configured.

    References inside a mapping of the author's own, which the server may never look at, are only warned of.
    `resolved` is the config as plain resolved data; `also_available` holds (type, name) of further servers.
    """
    available = {(instance.SERVER_TYPE, instance.name) for instance in instances} | {*also_available}
    problems: list[ConfigError] = []
    for instance in instances:
        block = resolved[instance.name][instance.SERVER_TYPE][instance.implementation]
        for place, ref in server_refs(block):
            if (ref.type, ref.name) in available:
                continue
            problem = _not_found(instance, place.path, ref, available)
            if _is_nested(block, place):
                logger.warning("%s", problem)
            else:
                problems.append(problem)
    return problems


def server_refs(block: Any) -> Iterator[tuple[Place, ServerRef]]:
    """Every reference to a server in `block`, which may be one itself, and where it stands."""
    for place in (Place("", (), block), *walk(block)):
        if (ref := is_server_ref(place.value)) is not None:
            yield place, ref


def _is_nested(block: Any, place: Place) -> bool:
    """Whether a place is inside a mapping of the author's own; lists do not count."""
    node, mappings = block, 0
    for key in place.keys:
        mappings += isinstance(node, Mapping)
        node = node[key]
    return mappings > 1


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
            "Add a model: +model=openai:<name>, +model=vllm:<url>#<name>, or +model=scripted to try things without a "
            "key; or its config file to config_paths (ng_list_models lists them)"
        )
    else:
        hint = f"Available {ref.type}: {listed(same_type)}"
    return ServerRefNotFoundError(
        f"Could not find {ref.name!r} ({ref.type}), which {instance.name!r} refers to in `{path}`, "
        f"in the list of available servers. {hint}"
    )
