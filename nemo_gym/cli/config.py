"""The configuration that a command's arguments ask for, and how people see it (`ng_dump_config`, `ng_validate`).

Arguments that are no options are refused first, all at once, each with what was probably meant. Everything here needs
OmegaConf, so `cli.command` loads it only when there is something to parse: a help page never does.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from nemo_gym.cli.registry import PREFIXES, all_options, find_command, known_options, loaded, shortcuts_of, text_options
from nemo_gym.cli.shortcuts import MODEL, expand, option_for, shown_expansion, with_server
from nemo_gym.config.checks import unknown_options
from nemo_gym.config.handover import config_from_environment
from nemo_gym.config.instances import find_instances
from nemo_gym.config.options import options_of
from nemo_gym.config.overrides import CommandLine, apply_changes, parse_overrides
from nemo_gym.config.references import plain_tree, resolve
from nemo_gym.config.secrets import is_secret_key, mask_tree, mask_url_passwords
from nemo_gym.errors import ConfigError, OverrideSyntaxError
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict, set_global_config_dict
from nemo_gym.keys import (
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
    CONFIG_PATHS_KEY_NAME,
    MASK,
    NEMO_GYM_RESERVED_TOP_LEVEL_KEYS,
    STAND_IN,
    VERBOSE_KEY_NAME,
    WELL_KNOWN_KEYS,
)
from nemo_gym.log import setup_logging
from nemo_gym.schemas.cli_config import DumpConfigConfig, ValidateConfig
from nemo_gym.terminal import print_line

if TYPE_CHECKING:
    from nemo_gym.cli.pages import Loading

logger = logging.getLogger(__name__)

_ASSIGNMENT = re.compile(r"[^\s\-][^\s=]*=", re.DOTALL)
_TYPOGRAPHIC = tuple("“”„‘’‚«»–—−")  # noqa: RUF001  # what is copied from documents
_NAME = re.compile(r"[\w.]+")
_FLAG_MEANS = {
    "a": "agent_name",
    "agent": "agent_name",
    "concurrency": "num_samples_in_parallel",
    "config": "config_paths",
    "i": "input_jsonl_fpath",
    "input": "input_jsonl_fpath",
    "m": "policy_model_name",
    "model": "policy_model_name",
    "model_api_key": "policy_api_key",
    "model_url": "policy_base_url",
    "o": "output_jsonl_fpath",
    "output": "output_jsonl_fpath",
    "resume": "resume_from_cache",
    "v": "verbose",
}
"""Flags that people know from similar programs, and the option that does it here."""


def check_arguments(
    arguments: Sequence[str],
    known: Collection[str],
    required: Sequence[str] = (),
    switches: Collection[str] = (),
    option_of: Callable[[str], str | None] = lambda word: None,
) -> None:
    """Refuse arguments that are no options, all at once, each with the spelling that was probably meant.

    Words are taken for the values of the options that `option_of` says, or else of the `required` options that are not
    given, in their order. `switches` are options that are true or false.
    """
    complaints = []
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    open_places = [option for option in required if option not in given]
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument.startswith(_TYPOGRAPHIC):
            complaints.append(f"{mask_url_passwords(argument)}: quotes or dashes of a word processor; type plain ones")
        elif argument.startswith("-"):
            value = remaining.pop(0) if _takes_next(argument, remaining) else None
            complaints.append(_flag_complaint(argument, value, known, switches))
        elif spaces := _spaces_around_equals(argument, remaining):
            complaints.append(_spaced_complaint([argument, *remaining[:spaces]]))
            del remaining[:spaces]
        elif pieces := _pieces_split_off(argument, remaining):
            complaints.append(_split_complaint([argument, *remaining[:pieces]]))
            del remaining[:pieces]
        elif not argument.startswith("~") and not _ASSIGNMENT.match(argument):
            option = option_of(argument)
            meant = _word_complaint(argument, known, open_places, switches)
            complaints.append(meant if option is None else f"{argument}: write {_spelled(option, argument)}")
    if complaints:
        lead = "cannot read this argument:" if len(complaints) == 1 else f"cannot read {len(complaints)} arguments:"
        close = "\nOptions are written +name=value; --help lists the options of this command."
        raise OverrideSyntaxError("\n  ".join([lead, *complaints]) + close)


def _takes_next(flag: str, following: Sequence[str]) -> bool:
    if "=" in flag or not following:
        return False
    return not re.match(r"[+~]|-\D", following[0]) and not _ASSIGNMENT.match(following[0])


def _flag_complaint(flag: str, following: str | None, known: Collection[str], switches: Collection[str]) -> str:
    dashed, equals, inline = flag.partition("=")
    name = dashed.lstrip("-").replace("-", "_")
    option = _nearest(name, known)
    value = inline if equals else following
    if value is not None:
        value = MASK if is_secret_key(name) or is_secret_key(option) else mask_url_passwords(value)
    given = dashed if value is None else f"{dashed}{equals or ' '}{value}"
    meant = with_server(value) if option == MODEL and value else value
    if meant is None and option in switches:
        meant = "true"
    return f"{given}: no such option" if option is None else f"{given}: write {_spelled(option, meant)}"


def _spaces_around_equals(argument: str, following: Sequence[str]) -> int:
    """How many of the arguments that follow belong to `+name = value`, or `+name value`, in place of `+name=value`."""
    name, equals, value = argument.lstrip("+").partition("=")
    if value or not _NAME.fullmatch(name) or not following:
        return 0
    taken = 0
    if not equals and following[0].startswith("="):
        value, taken = following[0][1:], 1
    elif not equals and not argument.startswith("+"):
        return 0
    if value:
        return taken
    rest = following[taken:]
    return taken + 1 if rest and _takes_next(argument.rstrip("="), rest) else 0


def _spaced_complaint(pieces: Sequence[str]) -> str:
    has_equals = pieces[0].endswith("=") or pieces[1].startswith("=")
    name, _, value = ("" if has_equals else "=").join(pieces).lstrip("+").partition("=")
    if is_secret_key(name.rpartition(".")[2]):
        return f"{pieces[0]} {MASK}: no space belongs around the =, write {_spelled(name, None)}"
    shown = mask_url_passwords(value)
    return f"{mask_url_passwords(' '.join(pieces))}: no space belongs around the =, write {_spelled(name, shown)}"


def _pieces_split_off(argument: str, following: Sequence[str]) -> int:
    """How many of the arguments that follow belong to a value in brackets, which a shell splits at its spaces."""
    is_open = _brackets_left_open(argument) if _ASSIGNMENT.match(argument) else 0
    for count, piece in enumerate(following, 1):
        if is_open <= 0 or piece.startswith(("+", "~", "--")):
            return 0
        is_open += _brackets_left_open(piece)
        if is_open == 0:
            return count
    return 0


def _brackets_left_open(text: str) -> int:
    return sum(text.count(opening) for opening in "{[(") - sum(text.count(closing) for closing in "}])")


def _split_complaint(pieces: Sequence[str]) -> str:
    whole = " ".join(pieces)
    option, _, value = whole.partition("=")
    keys = (re.split(r"[^\w.\-]", before_colon.rstrip().rstrip("'\""))[-1] for before_colon in value.split(":")[:-1])
    has_secret = any(map(is_secret_key, (option.rpartition(".")[2], *keys)))
    shown = f"{option}={MASK}" if has_secret else mask_url_passwords(whole)
    quoted = f"'{option}=...'" if has_secret else shlex.quote(shown)
    return f"{shown}: the shell has split this at its spaces; put it into quotes: {quoted}"


def _word_complaint(word: str, known: Collection[str], open_places: list[str], switches: Collection[str]) -> str:
    name = word.lstrip("+")
    if name.endswith((".yaml", ".yml")):
        return f"{word}: a config file is given as {_spelled('config_paths', name)}"
    if name in ("h", "help"):
        return f"{word}: write --help"
    if name.startswith(PREFIXES) and find_command(name):
        return f"{word}: write {name} --help"
    option = None if "/" in name or "." in name else _nearest(name, known)
    if option is None and name and name == word and open_places:
        return f"{word}: write {_spelled(open_places.pop(0), word)}"
    if option is None:
        return f"{word or repr(word)}: no such option"
    return f"{word}: write {_spelled(option, 'true' if option in switches else None)}"


def _nearest(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    if name in _FLAG_MEANS:
        return _FLAG_MEANS[name]
    close = get_close_matches(name, sorted({*known, "config_paths"}), n=1, cutoff=0.6)
    return close[0] if close else None


def _spelled(option: str, value: str | None) -> str:
    if value is None or value == MASK:
        return f"+{option}=<value>"
    return f'"+{option}=[{value}]"' if option == "config_paths" else shlex.quote(f"+{option}={value}")


def whole_config() -> DictConfig:
    """The configuration of this process, all of it: what a command needs to know beside its own options."""
    return get_global_config_dict()


def load_config(arguments: Sequence[str], config_class: type[BaseModel], loading: "Loading") -> Mapping[str, Any]:
    """The configuration for these arguments."""
    command_line = read_command_line(arguments, config_class, needs_key=loading.starts_servers)
    setup_logging(verbose=any(change.key == VERBOSE_KEY_NAME and change.value for change in command_line.changes))
    if loading.reads_config and loading.takes_over:
        handed_over = _config_from_launcher(command_line)
        if handed_over is not None:
            return handed_over
    return set_global_config_dict(_parser_config(command_line, loading))


def read_command_line(
    arguments: Sequence[str], config_class: type[BaseModel], *, needs_key: bool = False
) -> CommandLine:
    """The changes that `arguments` ask for, and the options that are known.

    With `needs_key`, short ways to a model that needs a key want one.
    """
    known = known_options(config_class)
    short = {option.name for option in shortcuts_of(config_class)}
    required = [option.name for option in options_of(config_class) if option.default is None]
    required.sort(key=lambda name: name.startswith("output"))  # as programs take them: what is read, what is written
    readable = known | short | WELL_KNOWN_KEYS | set(NEMO_GYM_RESERVED_TOP_LEVEL_KEYS)
    options = (*all_options(), *options_of(config_class))
    switches = {VERBOSE_KEY_NAME, *(name for option in options if option.is_switch for name in option.names)}
    check_arguments(arguments, readable, required, switches, partial(option_for, config_class))
    expanded = expand(arguments, config_class, needs_key=needs_key)
    return CommandLine(parse_overrides(expanded, text_options(config_class)), known)


def _parser_config(command_line: CommandLine, loading: "Loading") -> GlobalConfigDictParserConfig:
    bases = [] if loading.needs_model else [GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT]
    initial = OmegaConf.merge(*bases, dict(loading.initial or {}))
    assert isinstance(initial, DictConfig)
    return GlobalConfigDictParserConfig(
        command_line=command_line,
        initial_global_config_dict=initial,
        offline=loading.offline or not loading.reads_config,
        starts_servers=loading.starts_servers,
        skip_load_from_dotenv=not loading.reads_config,
        further_checks=loaded(loading.further_checks) if loading.further_checks else None,
    )


def _config_from_launcher(command_line: CommandLine) -> DictConfig | None:
    """What a launcher handed over, taken as it is, with the command line on top.

    Naming config files on the command line asks for another configuration: the launcher's is then left aside.
    """
    config = config_from_environment(os.environ)
    if config is None:
        return None
    if any(change.top_level_key == CONFIG_PATHS_KEY_NAME for change in command_line.changes):
        logger.warning("config_paths is given, so the configuration in this process's environment is not used")
        return None
    config = whole_config()
    _apply(command_line, config)
    return config


def _apply(command_line: CommandLine, config: DictConfig) -> None:
    known = command_line.known_options | {str(key) for key in config}
    apply_changes(config, command_line.changes)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    problems = [] if tree.get(ALLOW_UNKNOWN_KEYS_KEY_NAME) else unknown_options(command_line.changes, tree, known)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


def safe_yaml(config: Any) -> str:
    """`config` resolved, as far as the environment variables it needs are set, without its secrets.

    Masked twice: first so that no `${...}` copies a secret elsewhere, then for URLs that were put together by one.
    """
    tree = mask_tree(plain_tree(config))
    resolved = resolve(OmegaConf.create(tree), tree, unused=tree)
    if resolved.problems:
        raise resolved.problems[0]
    return OmegaConf.to_yaml(OmegaConf.create(mask_tree(resolved.tree)))


def dump_config(config: DumpConfigConfig) -> None:
    """`ng_dump_config`."""
    expansion = shown_expansion(sys.argv[1:], DumpConfigConfig)
    if expansion is not None:
        print_line(f"# {expansion}")
    print(safe_yaml(whole_config()), end="")


def validate(config: ValidateConfig) -> None:
    """`ng_validate`."""
    instances = find_instances(whole_config())[0]
    print("Config is valid.")
    if all(instance.implementation == STAND_IN for instance in instances):
        print("It configures no server, so there is nothing to start.")
        return
    column = max(len(instance.name) for instance in instances) + 2
    for instance in instances:
        note = " (stand-in: no model is configured)" if instance.implementation == STAND_IN else ""
        print(f"  {instance.name:<{column}}{instance.SERVER_TYPE}/{instance.implementation}{note}")
