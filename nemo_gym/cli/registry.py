"""Every command, in one table, and what follows from it.

To add a command `ng_<name>`: describe it in `nemo_gym/cli/pages`, write its function of that name in a chapter of
`nemo_gym/cli/commands`, say in `nemo_gym/cli/tree.py` how `gym` types it, and give it two lines in `[project.scripts]`,
then install again. The description may come first: as long as the module of its config class does not exist, it counts
for nothing. That module is imported by every command (for the options all commands know) and by completion, so it
imports pydantic and light modules of this package only.

`ng_help`, the check for unknown options, the set of text options and completion follow from here.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from nemo_gym.cli.pages import GROUPS, CommandInfo, others, rollouts
from nemo_gym.config.options import Option, options_of
from nemo_gym.keys import WELL_KNOWN_TEXT_KEYS
from nemo_gym.schemas.cli_config import Shortcuts

PREFIXES = ("ng_", "nemo_gym_")
HELP_OPTIONS = ("h", "help")

COMMANDS = tuple(sorted((*others.COMMANDS, *rollouts.COMMANDS), key=lambda info: GROUPS.index(info.group)))
"""Every command, group by group."""


def loaded(address: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)


def bare_name(script: str) -> str:
    """`version` for `ng_version` and `nemo_gym_version`."""
    for prefix in PREFIXES:
        if script.startswith(prefix):
            return script.removeprefix(prefix)
    return script


def find_command(script: str) -> CommandInfo | None:
    """The command behind a script's name, or None when it is not in the table."""
    name = bare_name(script)
    return next((info for info in COMMANDS if info.name == name), None)


def config_class_of(info: CommandInfo) -> type[BaseModel] | None:
    """The class of a command's arguments, or None as long as its module does not exist."""
    module_name, _, class_name = info.config.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None
        raise
    config_class: type[BaseModel] = getattr(module, class_name)
    return config_class


def all_options() -> Iterator[Option]:
    """The options of every command there is."""
    for info in COMMANDS:
        config_class = config_class_of(info)
        if config_class is not None:
            yield from options_of(config_class)


def shortcuts_of(config_class: type[BaseModel]) -> list[Option]:
    """The short ways that a command takes beside its options."""
    taken = getattr(config_class, "shortcuts", ())
    return [option for option in options_of(Shortcuts) if option.name in taken]


def known_options(own: type[BaseModel]) -> frozenset[str]:
    """Every option that any command reads, those of `own` among them."""
    names = {name for option in (*all_options(), *options_of(own)) for name in option.names}
    return frozenset({*names, *HELP_OPTIONS})


def text_options(own: type[BaseModel]) -> frozenset[str]:
    """Options whose value is text; where commands disagree about one, `own` decides."""
    text = {name for option in all_options() if option.is_text for name in option.names}
    for option in options_of(own):
        text = text | set(option.names) if option.is_text else text - set(option.names)
    return frozenset(text | WELL_KNOWN_TEXT_KEYS)


def installed_scripts() -> list[str]:
    """Names of the installed scripts that start with `ng_` or `nemo_gym_`, sorted."""
    from importlib.metadata import entry_points

    return sorted({entry.name for entry in entry_points(group="console_scripts") if entry.name.startswith(PREFIXES)})
