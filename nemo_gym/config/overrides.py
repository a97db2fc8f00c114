"""`+key=value` arguments, read with Hydra's grammar and applied to a config.

Only the grammar is Hydra's: no compose, no config search, no output folder and no
process-wide state, so this works in any thread and beside a program that uses Hydra itself.
`+k=v`, `++k=v` and `k=v` all set, `~k` deletes (`~k=v` only if the value is `v`), the last one wins.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from nemo_gym.config.references import apply_directives
from nemo_gym.config.secrets import is_secret_key, mask_url_passwords
from nemo_gym.config.trees import ABSENT, Tree, delete_at, path_parts, set_at, value_at
from nemo_gym.errors import ConfigError, OverrideSyntaxError, did_you_mean
from nemo_gym.keys import MASK, NESTED_TEXT_KEYS, TEXT_LIST_KEYS

_ARGUMENT = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^\s=+~\-][^\s=]*)(?P<rest>=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[\d+\])*")
_FUNCTION_CALL = re.compile(r"\s*\w+\(.*\)\s*", re.DOTALL)
_LIST_ENTRY = re.compile(r"""\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<bare>[^,]*))\s*(?:,|$)""")


@dataclass(frozen=True)
class Change:
    """One change the command line makes to the config."""

    key: str
    """Dotted path of what is changed."""
    value: Any
    delete: bool
    argument: str
    """The argument as it was typed, without its secrets."""
    only_if_equal: bool = False
    """Whether to delete nothing but exactly `value`."""

    @property
    def top_level_key(self) -> str:
        """First part of the path."""
        return path_parts(self.key)[0]


@dataclass(frozen=True)
class CommandLine:
    """What a command was given, and which options it and its siblings know."""

    changes: tuple[Change, ...] = ()
    known_options: frozenset[str] = frozenset()


def parse_overrides(arguments: Sequence[str], text_options: Collection[str] = ()) -> tuple[Change, ...]:
    """Read arguments in Hydra's override syntax.

    Options in `text_options` take their value literally whenever the grammar rejects it, would turn it into
    a sweep or a function call, or would read it as a number or a truth value.
    """
    texts = {*text_options, *NESTED_TEXT_KEYS}
    return tuple(_parse_one(argument, texts) for argument in arguments)


class _RejectedError(Exception):
    """The grammar has no single value for a text."""


def _read(text: str) -> Any:
    """The value that `text` is in Hydra's grammar, which is imported here because that takes a while."""
    from hydra.core.override_parser import overrides_parser, types
    from hydra.errors import HydraException

    try:
        override = overrides_parser.OverridesParser.create().parse_override(f"value={text}")
    except HydraException as error:
        raise _RejectedError(str(error).strip().splitlines()[0]) from error
    value = None if override.is_sweep_override() else override.value()
    if override.is_sweep_override() or _holds(types.Sweep, value):
        raise _RejectedError("it asks for a sweep over several values, which does not exist here")
    return value


def _holds(kind: type, value: Any) -> bool:
    """Whether a value is of a kind, or anything in it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(_holds(kind, item) for item in value) if isinstance(value, list) else isinstance(value, kind)


def _parse_one(argument: str, text_options: Collection[str]) -> Change:
    match = _ARGUMENT.fullmatch(argument)
    if match is None or not _KEY.fullmatch(match["key"]) or (match["rest"] is None and match["mark"] != "~"):
        raise OverrideSyntaxError(
            f"cannot read the argument {mask_url_passwords(argument)!r}; options are written +name=value"
        )
    key, text = match["key"], match["value"]
    shown = _without_secret(argument, key, text)
    if text is None:
        return Change(key, None, delete=True, argument=shown)
    try:
        value = _read(text)
    except _RejectedError as error:
        value = _literally(key, text, text_options)
        if value is ABSENT:
            raise OverrideSyntaxError(_cannot_read(shown, match["mark"], key, text, error)) from error
    if key in text_options and (isinstance(value, bool | int | float) or _FUNCTION_CALL.fullmatch(text)):
        value = text.strip()
    deletes = match["mark"] == "~"
    return Change(key, value, delete=deletes, argument=shown, only_if_equal=deletes)


def _literally(key: str, text: str, text_options: Collection[str]) -> Any:
    """The value of a text option as it stands; ABSENT for any other option."""
    stripped = text.strip()
    if key in TEXT_LIST_KEYS and stripped.startswith("[") and stripped.endswith("]"):
        entries = _LIST_ENTRY.finditer(stripped[1:-1])
        texts = [entry["single"] or entry["double"] or (entry["bare"] or "").strip() for entry in entries]
        return [entry for entry in texts if entry]
    return text if key in text_options else ABSENT


def _without_secret(argument: str, key: str, text: str | None) -> str:
    if text and is_secret_key(path_parts(key)[-1]):
        return argument.removesuffix(text) + MASK
    return mask_url_passwords(argument)


def _cannot_read(shown: str, mark: str | None, key: str, text: str, error: _RejectedError) -> str:
    if any(text.count(opening) != text.count(closing) for opening, closing in ("[]", "{}")) and text[:1] in ("[", "{"):
        return f"cannot read the value in {shown!r}: its brackets are not closed, or not opened"
    readable = "<value>" if shown.endswith(MASK) else text
    option, quoted = f"{mark or ''}{key}", readable.replace("\\", "\\\\").replace('"', '\\"')
    as_text, as_list = shlex.quote(f'{option}="{quoted}"'), shlex.quote(f"{option}=[{readable}]")
    or_list = f", and a list {as_list}" if "," in text and not text.startswith(("[", "{")) else ""
    return f"cannot read the value in {shown!r}: {error}; text with special characters is written {as_text}{or_list}"


def change_tree(tree: Tree, changes: Iterable[Change]) -> None:
    """Make `changes` to plain data in order; mappings are merged, everything else is replaced."""
    for change in changes:
        if change.delete:
            _delete(tree, change)
            continue
        try:
            set_at(tree, change.key, change.value)
        except LookupError as error:
            raise ConfigError(f"cannot set {change.key!r} as {change.argument!r} asks: {error.args[0]}") from error


def apply_changes(config: DictConfig, changes: Iterable[Change]) -> None:
    """Make `changes` to a finished config in place."""
    listed = list(changes)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    change_tree(tree, listed)
    tree = apply_directives(tree)
    with flag_override(config, ["struct", "readonly"], [False, False]):
        for name in dict.fromkeys(change.top_level_key for change in listed):
            if name in tree:
                config[name] = tree[name]
            else:
                config.pop(name, None)


def _delete(tree: Tree, change: Change) -> None:
    present = value_at(tree, change.key)
    if present is ABSENT:
        *above, last = path_parts(change.key)
        siblings = value_at(tree, ".".join(above)) if above else tree
        hint = did_you_mean(last, siblings) if isinstance(siblings, Mapping) else ""
        raise ConfigError(f"{change.argument!r} deletes {change.key!r}, which is not in the configuration{hint}")
    if change.only_if_equal and present != change.value:
        raise ConfigError(
            f"{change.argument!r} deletes {change.key!r} only if it has that value, but it has another; "
            f"~{change.key} deletes it whatever it is"
        )
    delete_at(tree, change.key)
