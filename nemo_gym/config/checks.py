"""What can be wrong with a merged configuration, each problem as an error that names its remedy.

Every check returns its findings instead of raising, so that a user sees all of them at once.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from nemo_gym.config.overrides import Change
from nemo_gym.errors import ConfigError, ConfigInterpolationError, ConfigMissingValuesError, UnknownOptionError
from nemo_gym.keys import MISSING, NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, WELL_KNOWN_KEYS
from nemo_gym.schemas.server_config import server_types_in

_INTERPOLATION = re.compile(r"\$\{\s*([A-Za-z_][\w\-]*)[^:}]*\}")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a plain tree with its dotted path; list positions as `[i]`."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for position, value in enumerate(node):
            yield from leaves(value, f"{path}[{position}]")
    else:
        yield path, node


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


def broken_interpolations(config: DictConfig) -> list[ConfigError]:
    """One error per value whose `${...}` cannot be resolved."""
    tree = OmegaConf.to_container(config, resolve=False)
    problems: list[ConfigError] = []
    for path, value in leaves(tree):
        if not isinstance(value, str) or "${" not in value:
            continue
        try:
            OmegaConf.select(config, path, throw_on_resolution_failure=True)
        except InterpolationKeyError as error:
            problems.append(_missing_key(path, value, error))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            problems.append(ConfigInterpolationError(f"{path} is {value!r}, which cannot be resolved: {reason}"))
    return problems


def _missing_key(path: str, value: str, error: InterpolationKeyError) -> ConfigError:
    quoted = re.search(r"'([^']+)' not found", str(error))
    key = quoted[1] if quoted else "the key it names"
    return ConfigInterpolationError(
        f"{path} is {value!r}, but {key!r} is not set; set it in env.yaml or with ++{key}=<value>"
    )


def names_used_by_interpolations(tree: Any) -> set[str]:
    """Top-level names that some `${name...}` in the tree refers to."""
    return {
        match[1]
        for _, value in leaves(tree)
        if isinstance(value, str) and "${" in value
        for match in _INTERPOLATION.finditer(value)
    }


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something known is spelled similarly, else nothing."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_options(changes: Sequence[Change], tree: Mapping[str, Any], known: Collection[str]) -> list[ConfigError]:
    """One error per top-level key given on the command line that nothing reads.

    `known` holds the options of the commands and the keys that config files define; `tree` is the merged config.
    """
    everything = {*known, *NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, *WELL_KNOWN_KEYS, *names_used_by_interpolations(tree)}
    given = dict.fromkeys(change.top_level_key for change in changes if not change.delete)
    problems: list[ConfigError] = [
        UnknownOptionError(
            f"unknown option {key!r}{suggestion(key, everything)}"
            " (a key of your own is accepted with +allow_unknown_keys=true)"
        )
        for key in given
        if key not in everything and not server_types_in(tree.get(key))
    ]
    return problems + _unknown_response_params(changes)


def _unknown_response_params(changes: Sequence[Change]) -> list[ConfigError]:
    option = "responses_create_params"
    given: dict[str, None] = {}
    for change in changes:
        if change.key.startswith(f"{option}."):
            given[change.key.split(".")[1]] = None
        elif change.key == option and isinstance(change.value, Mapping):
            given.update(dict.fromkeys(map(str, change.value)))
    if not given:
        return []
    from nemo_gym.schemas.openai_responses import (
        NeMoGymResponseCreateParamsNonStreaming,
    )  # slow to build, seldom needed

    fields = NeMoGymResponseCreateParamsNonStreaming.model_fields
    return [
        UnknownOptionError(f"unknown option '{option}.{key}'{suggestion(key, fields)}")
        for key in given
        if key not in fields
    ]
