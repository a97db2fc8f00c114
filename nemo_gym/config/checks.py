"""What can be wrong with a merged configuration, each problem as an error that names its remedy.

Every check returns its findings instead of raising, so that a user sees all of them at once.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemo_gym.config.interpolations import names_used_by_interpolations
from nemo_gym.config.overrides import Change
from nemo_gym.config.trees import leaves, path_parts
from nemo_gym.errors import ConfigError, ConfigMissingValuesError, UnknownOptionError, did_you_mean
from nemo_gym.keys import (
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
    MISSING,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    WELL_KNOWN_KEYS,
)
from nemo_gym.schemas.server_config import server_types_in


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
        UnknownOptionError(
            f"unknown option {key!r}{did_you_mean(key, everything)}"
            f" (a key of your own is accepted with +{ALLOW_UNKNOWN_KEYS_KEY_NAME}=true)"
        )
        for key in unknown
        if key not in everything
    ]
    return problems + _unknown_response_params(changes)


def _unknown_response_params(changes: Sequence[Change]) -> list[ConfigError]:
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
    from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming  # slow, seldom needed

    fields = NeMoGymResponseCreateParamsNonStreaming.model_fields
    return [
        UnknownOptionError(
            f"unknown option '{option}.{key}'{did_you_mean(key, fields)}"
            f" (parameters of one vendor go into {option}.metadata.extra_body)"
        )
        for key in given
        if key not in fields
    ]
