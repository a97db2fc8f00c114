"""From a configuration to a command's typed arguments, with errors written for the person who typed them."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_gym.cli.options import Option, meanings_of, options_of, show_value
from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.keys import MASK

ConfigT = TypeVar("ConfigT", bound=BaseModel)
_SAID_BY_THE_TYPE = {"literal_error", "enum", "bool_parsing", "bool_type"}


def validate_options(config_class: type[ConfigT], config: Mapping[str, Any], program: str) -> ConfigT:
    """The arguments of a command, read from the whole configuration.

    Raises:
        ConfigError: naming every option that is missing or cannot be used.
    """
    options = {name: option for option in options_of(config_class) for name in option.names}
    values = _plain_values(config, options)
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        lines = _complaints(error, options, values, meanings_of(config_class))
        listed = "\n  ".join([f"{program} cannot run like this:", *lines])
        raise ConfigError(f"{listed}\nSee {program} --help.") from error


def _plain_values(config: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """The configuration as plain data, resolved where this command looks."""
    if isinstance(config, dict):
        return config
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    for name in options:
        if name not in config:
            continue
        try:
            value = config[name]
            values[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the option {name!r} is {values[name]!r}, which cannot be resolved: {reason}") from error
    return values


def _complaints(
    error: ValidationError, options: Mapping[str, Option], values: Mapping[str, Any], meanings: Mapping[str, str]
) -> list[str]:
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(str(item["loc"][0]) if item["loc"] else "", []).append(item)
    lines = []
    for name, details in found.items():
        option = options.get(name)
        if option is None:
            lines.append(f"{name}: {_reasons(details)}" if name else _reasons(details))
        elif details[0]["type"] == "missing" and len(details[0]["loc"]) == 1:
            lines.append(f"+{name}=<{option.expects}> is required. {meanings.get(option.field, '')}".rstrip())
        else:
            lines.append(_wrong_value(name, option, values.get(name), _reasons(details)))
    return lines


def _wrong_value(name: str, option: Option, value: object, reasons: str) -> str:
    from nemo_gym.config.secrets import is_secret_key, mask_url_passwords

    shown = MASK if is_secret_key(name) else mask_url_passwords(show_value(value))
    explained = f" ({reasons})" if reasons else ""
    return f"+{name}={shown}: expected {option.expects}{explained}{did_you_mean(str(value), option.choices)}"


def _reasons(details: list[ErrorDetails]) -> str:
    return "; ".join(dict.fromkeys(_reason(item) for item in details if item["type"] not in _SAID_BY_THE_TYPE))


def _reason(details: ErrorDetails) -> str:
    """What pydantic found, with the place inside the option's value when it is not the value itself."""
    inner = [str(part) for part in details["loc"][1:]]
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{'.'.join(inner)}: {message}" if inner else message
