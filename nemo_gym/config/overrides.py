"""`+key=value` arguments, read with Hydra's grammar and applied to a config.

Only the grammar is Hydra's: no compose, no config search, no output folder and no
process-wide state, so this works in any thread and beside a program that uses Hydra itself.
`+k=v`, `++k=v` and `k=v` all set, `~k` deletes, the last one wins.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.errors import ConfigError, OverrideSyntaxError

_ARGUMENT = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^\s=+~.\-][^\s=]*)(?P<rest>=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Change:
    """One change the command line makes to the config."""

    key: str
    """Dotted path of what is changed."""
    value: Any
    delete: bool
    argument: str
    """The argument as it was typed."""

    @property
    def top_level_key(self) -> str:
        """First part of the path."""
        return self.key.split(".", 1)[0]


@dataclass(frozen=True)
class CommandLine:
    """What a command was given, and which options it and its siblings know."""

    changes: tuple[Change, ...] = ()
    known_options: frozenset[str] = frozenset()


def parse_overrides(arguments: Sequence[str], text_options: Collection[str] = ()) -> tuple[Change, ...]:
    """Read arguments in Hydra's override syntax.

    Options in `text_options` take their value literally whenever the grammar rejects it,
    would turn it into a sweep, or would read it as a number or a truth value.
    """
    return tuple(_parse_one(argument, text_options) for argument in arguments)


def _parse_one(argument: str, text_options: Collection[str]) -> Change:
    match = _ARGUMENT.fullmatch(argument)
    if match is None or (match["rest"] is None and match["mark"] != "~"):
        raise OverrideSyntaxError(f"cannot read the argument {argument!r}; options are written +name=value")
    key = match["key"]
    if match["mark"] == "~":
        return Change(key, None, delete=True, argument=argument)
    is_text = key in text_options
    value = _read_value(match["value"], argument, is_text=is_text)
    if is_text and isinstance(value, bool | int | float):
        value = match["value"].strip()
    return Change(key, value, delete=False, argument=argument)


def _read_value(text: str, argument: str, *, is_text: bool) -> Any:
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except HydraException as error:
        if is_text:
            return text
        reason = str(error).strip().splitlines()[0]
        raise OverrideSyntaxError(
            f"cannot read the value in {argument!r}: {reason}; put text with special characters in quotes, "
            f"""for example "+name='{text}'" """.rstrip()
        ) from error
    if override.is_sweep_override():
        if is_text:
            return text
        raise OverrideSyntaxError(
            f"{argument!r} asks for a sweep over several values, which does not exist here; "
            f"a list is written [{text}], text with commas \"'{text}'\""
        )
    return override.value()


def apply_changes(config: DictConfig, changes: Iterable[Change]) -> None:
    """Make `changes` to `config` in order; mappings are merged, everything else is replaced."""
    for change in changes:
        if change.delete:
            _delete(config, change)
            continue
        try:
            OmegaConf.update(config, change.key, change.value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot set {change.key!r} as {change.argument!r} asks: {reason}") from error


def _delete(config: DictConfig, change: Change) -> None:
    parent_path, _, last = change.key.rpartition(".")
    parent: Any = OmegaConf.select(config, parent_path, throw_on_missing=False) if parent_path else config
    if isinstance(parent, DictConfig) and last in parent:
        del parent[last]
    elif isinstance(parent, ListConfig) and last.isdecimal() and int(last) < len(parent):
        del parent[int(last)]
    else:
        raise ConfigError(f"{change.argument!r} deletes {change.key!r}, which is not in the configuration")
