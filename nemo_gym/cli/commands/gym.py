"""`gym` (and `ng`): every command in one tree, its flags turned into the options of the `ng_` command that does it.

The command itself then runs in this process as if it had been typed in its other spelling, so options, messages, files
and exit codes are the same. The help pages, of the whole tree, of a group, of one command, have the other spelling
beside each.
"""

import json
import os
import re
import shlex
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym.cli.command import Command, command_named, page_width
from nemo_gym.cli.registry import config_class_of, find_command, loaded
from nemo_gym.cli.tree import GROUPS, LIST_TYPES, TREE, Flag, Leaf, leaves_below, spelled_as_gym, spelled_with_prefix
from nemo_gym.config.components import CONFIGS_OF, config_of
from nemo_gym.config.options import meanings_of, options_of
from nemo_gym.errors import ConfigError
from nemo_gym.keys import CONFIG_PATHS_KEY_NAME, NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
from nemo_gym.paths import resolve_for_reading
from nemo_gym.terminal import exit_code_of_lost_output

_EXIT_USER_MISTAKE = 2
_HELP = ("-h", "--help", "+h=true", "+help=true", "h=true", "help=true")
_OVERRIDE = re.compile(r"[+~]|[\w.\-]+=")
_WHOLE_LIST = re.compile(r"\+{0,2}config_paths=\[(?P<paths>.*)\]", re.DOTALL)
_PLAIN = re.compile(r"[\w./:\-]+")
_VERBOSE = Flag(("-v", "--verbose"), ("verbose",), is_switch=True, meaning="Say more on stderr.")
_WORKLOADS = "nemo_gym.cli.workloads"
_NO_GITLAB = f"{_WORKLOADS}:no_gitlab"
_MEANT = {
    ("version",): "gym --version",
    ("run",): "gym eval run",
    ("start",): "gym env start",
    ("status",): "gym env status",
    ("init",): "gym env init",
    ("validate",): "gym env validate",
    ("view",): "gym eval view",
    ("env", "run"): "gym env start",
    ("env", "list"): "gym list environments",
    ("eval", "list"): "gym list benchmarks",
    ("eval", "collect"): "gym eval run --no-serve",
}
"""Words that people know from similar programs, or from the other spelling, and what they are here."""
_OF_SERVERS = ("benchmark", "environment", "resources_server", "model_type", "model", "model_url", "model_api_key")
_REPEATED = ("config", "asset", "search_dir")


class UsageError(ConfigError):
    """Something that cannot be typed like this."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what is typed after `gym`; an exit code other than 0 is raised as SystemExit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        leaf, rest = find_leaf(given)
        if leaf is None:
            _without_command(rest)
        if any(argument in _HELP for argument in rest):
            _show(leaf)
        parsed = _parsed(leaf, rest)
        _warn_of_idle_flags(leaf, parsed)
        with _searching_in(getattr(parsed, "search_dir", None) or ()):
            run(*translate(leaf, parsed))
    except UsageError as error:
        print(f"Error: {error}\nSee {' '.join(('gym', *_begun(given), '--help'))}.", file=sys.stderr)
        raise SystemExit(_EXIT_USER_MISTAKE) from None
    except OSError as error:
        if (exit_code := exit_code_of_lost_output(error)) is None:
            raise
        raise SystemExit(exit_code) from None


def _begun(arguments: Sequence[str]) -> tuple[str, ...]:
    """The words of what was typed that there are, for whoever wants to read on."""
    words: tuple[str, ...] = ()
    for word in arguments:
        if word in _VERBOSE.spellings:
            continue
        if not any(leaves_below((*words, word))):
            break
        words = (*words, word)
    return words


def find_leaf(arguments: Sequence[str]) -> tuple[Leaf | None, list[str]]:
    """The command that the first words name, and what follows; without one, what was typed instead.

    Raises:
        UsageError: there is no such command.
    """
    words: tuple[str, ...] = ()
    leading, rest = [], list(arguments)
    while rest and rest[0] in _VERBOSE.spellings:
        leading.append(rest.pop(0))
    if rest[:1] == ["help"]:  # `gym help eval run`
        return find_leaf([*rest[1:], "--help"])
    while rest and not rest[0].startswith("-"):
        if rest == ["help"]:  # `gym eval help`
            return None, [*words, "--help"]
        below = list(dict.fromkeys(leaf.words[len(words)] for leaf in leaves_below(words)))
        if rest[0] not in below:
            raise UsageError(_no_command(words, rest[0], below))
        words = (*words, rest.pop(0))
        leaf = next((leaf for leaf in TREE if leaf.words == words), None)
        if leaf is not None:
            return leaf, [*leading, *rest]
    return None, [*words, *rest]


def _no_command(words: tuple[str, ...], word: str, below: Sequence[str]) -> str:
    meant = _MEANT.get((*words, word))
    close = f" Did you mean `{meant}`?" if meant else hint(word, below)
    there_are = "" if close else f" There are {', '.join(below)}."
    return f"{' '.join(('gym', *words))} has no command {word!r}.{close or there_are}"


def hint(word: str, known: Iterable[str]) -> str:
    """What was probably meant, as a sentence; nothing when nothing is close."""
    spelled = {each.lower(): each for each in sorted(set(known) - {word})}
    close = get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return f" Did you mean `{spelled[close[0]]}`?" if close else ""


def _without_command(rest: list[str]) -> NoReturn:
    """`gym`, `gym --version`, `gym eval --help` and the like."""
    words = tuple(word for word in rest if not word.startswith("-"))
    flags = [flag for flag in rest if flag.startswith("-")]
    if not words and "--version" in flags:
        _refuse_flags([flag for flag in flags if flag not in ("--version", "--json")], ("--version", "--json"))
        run("version", ["+json=true"] if "--json" in flags else [])
        raise SystemExit(0)
    _refuse_flags([flag for flag in flags if flag not in _HELP], ("--help", "--version", "--verbose"))
    print(group_page(words), end="", flush=True)
    raise SystemExit(0 if flags else _EXIT_USER_MISTAKE)


def _show(leaf: Leaf) -> NoReturn:
    print(leaf_page(leaf), end="", flush=True)
    raise SystemExit(0)


def _refuse_flags(unknown: Sequence[str], known: Sequence[str]) -> None:
    names = [flag.partition("=")[0] for flag in unknown]  # without values, which may be secrets
    if names:
        hints = "".join(dict.fromkeys(hint(name, known) for name in names))
        raise UsageError(f"unrecognized arguments: {' '.join(names)}.{hints}")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _parsed(leaf: Leaf, arguments: Sequence[str]) -> Namespace:
    """The values of flags; in `words` what a command takes without a flag, in `overrides` options as they are."""
    parser = _Parser(prog=leaf.title, add_help=False, allow_abbrev=False)
    for flag in (_VERBOSE, *leaf.flags):
        if flag.is_switch:
            parser.add_argument(*flag.spellings, action="store_true", default=None)
        else:
            action = "append" if flag.role in _REPEATED else "store"
            parser.add_argument(*flag.spellings, action=action, nargs=flag.values if flag.values > 1 else None)
    given, left = parser.parse_known_args(list(arguments))
    known = [spelling for flag in (_VERBOSE, *leaf.flags) for spelling in flag.spellings]
    _refuse_flags([argument for argument in left if argument.startswith("-")], [*known, "--help"])
    for flag in leaf.flags:
        value = getattr(given, _attribute(flag))
        if flag.choices and value is not None and value not in flag.choices:
            listed = ", ".join(flag.choices)
            raise UsageError(f"{flag.name} {value}: choose from {listed}.{hint(value, flag.choices)}")
    given.words = [word for word in left if leaf.positional and not _OVERRIDE.match(word)]
    given.overrides = [word for word in left if word not in given.words]
    return given


def _attribute(flag: Flag) -> str:
    return flag.name.lstrip("-").replace("-", "_")


def translate(leaf: Leaf, given: Namespace) -> tuple[str, list[str]]:
    """The command that does it, and the options that it gets.

    Raises:
        UsageError: what was typed does not go together, or names something that there is not.
    """
    command = _command_of(leaf, given)
    if leaf.words == ("eval", "submit"):
        return command, [f"+submission={given.config}", *(["+dry_run=true"] * bool(given.dry_run)), *given.overrides]
    if command == _NO_GITLAB:
        return command, []
    options, paths = [*leaf.always, *_words(leaf, given.words), *_scaffolded(leaf, given)], []
    for flag in (_VERBOSE, *leaf.flags):
        value = getattr(given, _attribute(flag))
        if value is None:
            continue
        if flag.role == "config":
            paths += value
        elif flag.role == "asset":
            named, found = _assets(flag.sets[0], value, command)
            options += named
            paths += found
        else:
            options += _options(flag, value)
    return command, _merged(paths, options, given.overrides)


def _command_of(leaf: Leaf, given: Namespace) -> str:
    if leaf.words == ("eval", "run") and given.no_serve:
        return "collect_rollouts"
    if leaf.words == ("env", "validate") and (given.words or given.manifest):
        _refuse_beside_a_workload(leaf, given, ("verbose", "kind", "manifest", "sync", "json", "search_dir"))
        return f"{_WORKLOADS}:validate_workload"
    if leaf.words == ("env", "test") and given.words:
        _refuse_beside_a_workload(leaf, given, ("verbose", "kind", "update_expected", "json", "search_dir"))
        return f"{_WORKLOADS}:check_verifier"
    if leaf.command in ("validate", "test"):
        _refuse_flags_without(leaf, given, "a NAME", ("kind", "sync", "update_expected", "json"))
        return "test_all" if leaf.command == "test" and given.resources_server is None else leaf.command
    if leaf.words == ("env", "init"):
        return _init_command(leaf, given)
    if leaf.words == ("eval", "submit") and not given.config:
        raise UsageError("gym eval submit wants a file: --config jobs.yaml")
    if getattr(given, "storage", None) == "gitlab":
        return _NO_GITLAB
    return leaf.command


def _given_flags(leaf: Leaf, given: Namespace) -> dict[str, str]:
    """The flags that were typed, by what they are called in `given`."""
    return {_attribute(flag): flag.name for flag in leaf.flags if getattr(given, _attribute(flag)) is not None}


def _warn_of_idle_flags(leaf: Leaf, given: Namespace) -> None:
    """Name the flags that change nothing: what to start where nothing is started, a split beside a file of rows."""
    if leaf.words != ("eval", "run"):
        return
    flags = _given_flags(leaf, given)
    if "split" in flags and ("no_serve" in flags or "input" in flags):
        print("Warning: --split: the rows are those of --input", file=sys.stderr)
    if "no_serve" not in flags:
        return
    idle = [name for key, name in flags.items() if key in _OF_SERVERS]
    if idle:
        print(f"Warning: {', '.join(idle)}: with --no-serve the servers are those that run already", file=sys.stderr)


def _refuse_beside_a_workload(leaf: Leaf, given: Namespace, allowed: Sequence[str]) -> None:
    others = [name for key, name in _given_flags(leaf, given).items() if key not in allowed] + given.overrides
    if others:
        raise UsageError(f"{leaf.title} NAME takes a workload as it is written, not {' '.join(others)}")


def _refuse_flags_without(leaf: Leaf, given: Namespace, what: str, flags: Sequence[str]) -> None:
    lone = [name for key, name in _given_flags(leaf, given).items() if key in flags]
    if lone:
        raise UsageError(f"{', '.join(lone)} of {leaf.title} goes with {what}")


def _init_command(leaf: Leaf, given: Namespace) -> str:
    targets = [name for name in ("resources_server", "environment", "benchmark") if getattr(given, name)]
    if len(targets) != 1 and not any(each.lstrip("+").startswith("entrypoint=") for each in given.overrides):
        raise UsageError("gym env init wants one of --resources-server, --environment and --benchmark, with a name")
    if targets and targets[0] != "resources_server":
        if given.higher_is_better and given.lower_is_better:
            raise UsageError("--higher-is-better and --lower-is-better exclude each other")
        return f"{_WORKLOADS}:init_workload"
    scaffold = ("profile", "reuse_verifier", "reward_range", "higher_is_better", "lower_is_better")
    _refuse_flags_without(leaf, given, "--environment or --benchmark", scaffold)
    return leaf.command


def _scaffolded(leaf: Leaf, given: Namespace) -> list[str]:
    kind = next((each for each in ("environment", "benchmark") if getattr(given, each, None)), None)
    if leaf.words != ("env", "init") or kind is None:
        return []
    return [f"+scaffold_kind={kind}", f"+scaffold_name={json.dumps(getattr(given, kind))}"]


def _words(leaf: Leaf, words: list[str]) -> list[str]:
    if leaf.words == ("search",):
        return _searched(words)
    if len(words) > 1:
        raise UsageError(f"{leaf.title} takes one {leaf.positional}, not {' '.join(words)}")
    return [f"+component_name={json.dumps(word)}" for word in words]


def _searched(words: list[str]) -> list[str]:
    if not words:
        raise UsageError("gym search wants a QUERY, and may be told a type: gym search agents tool")
    kind = words[0] if len(words) > 1 and words[0] in LIST_TYPES else None
    query = words[1:] if kind else words
    if len(query) > 1:
        meant = "" if kind else hint(words[0], LIST_TYPES) or f" Types are {', '.join(LIST_TYPES)}."
        no_type = "" if kind else f"{words[0]!r} is no type of component.{meant} "
        typed = shlex.join(["gym", "search", *filter(None, [kind]), " ".join(query)])
        raise UsageError(f"{no_type}A QUERY of several words wants quotes: {typed}")
    return [f"+catalog={kind or 'environments'}", f"+query={json.dumps(query[0])}"]


def _assets(kind: str, names: list[str], command: str) -> tuple[list[str], list[str]]:
    """The option for a thing that the command knows by name, or the config files of all that are named."""
    try:
        found = [config_of(kind, name) for name in names]
    except ConfigError as error:
        raise UsageError(str(error)) from error
    short = _short_way_to(kind, found[0], command) if len(found) == 1 else None
    return ([short], []) if short else ([], [str(path) for path in found])


def _short_way_to(kind: str, config: Path, command: str) -> str | None:
    """`+benchmark=<name>`, for a command that takes it: it then also knows the split, and where to write."""
    info = find_command(command)
    config_class = config_class_of(info) if info else None
    if kind not in getattr(config_class, "shortcuts", ()):
        return None
    for name, path in CONFIGS_OF[kind]().items():
        if resolve_for_reading(path, Path.is_file).absolute() == config:
            return f"+{kind}={name}"
    return None


def _options(flag: Flag, value: Any) -> list[str]:
    if flag.role == "entrypoint":
        return [f"+{flag.sets[0]}={value if '/' in value else f'resources_servers/{value}'}"]
    if flag.role != "option":
        return []
    if flag.is_switch:
        return [f"+{key}" if "=" in key else f"+{key}=true" for key in flag.sets]
    if flag.values > 1:
        return [f"+{key}=[{','.join(value)}]" for key in flag.sets]
    return [f"+{key}={json.dumps(value) if key == 'licensing' else value}" for key in flag.sets]


def _merged(paths: list[str], options: list[str], overrides: Sequence[str]) -> list[str]:
    """All options, with one list of the config files that are named in whatever way in front."""
    if not paths:
        return [*options, *overrides]
    typed = [path if _PLAIN.fullmatch(path) else f"'{path}'" for path in paths]
    lists = [match["paths"] for each in overrides if (match := _WHOLE_LIST.fullmatch(each))]
    merged = f"+{CONFIG_PATHS_KEY_NAME}=[{','.join([*typed, *filter(None, lists)])}]"
    return [merged, *options, *(each for each in overrides if not _WHOLE_LIST.fullmatch(each))]


@contextmanager
def _searching_in(folders: Sequence[str]) -> Iterator[None]:
    """Have these folders come before all others in which components are looked for."""
    absent = [folder for folder in folders if not Path(folder).expanduser().is_dir()]
    if absent:
        raise UsageError(f"--search-dir {absent[0]}: there is no such folder")
    before = os.environ.get(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME)
    roots = [str(Path(folder).expanduser().absolute()) for folder in folders]
    if roots:
        os.environ[NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME] = os.pathsep.join(filter(None, [*roots, before]))
    try:
        yield
    finally:
        if roots and before is None:
            del os.environ[NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME]
        elif roots and before is not None:
            os.environ[NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME] = before


def flags_of(name: str) -> dict[str, str]:
    """The flags by which `gym` sets the options of `ng_<name>`, by option."""
    words = spelled_as_gym(name).split()[1:]
    leaf = next((leaf for leaf in TREE if words and leaf.words == tuple(words[: len(leaf.words)])), None)
    flags = leaf.flags if leaf else ()
    return {key: flag.name for flag in flags if flag.role in ("option", "entrypoint") for key in flag.sets}


def run(name: str, options: Sequence[str]) -> None:
    """Do in this process what `ng_<name>` with these options does, or what a command without that spelling does."""
    is_installed = ":" not in name
    command = command_named(name) if is_installed else loaded(name)
    if is_installed:
        command.name = spelled_as_gym(name) or command.name
        command.flags = flags_of(name)
    script = f"ng_{name}" if is_installed else "gym"
    typed = sys.argv
    sys.argv = [str(Path(typed[0] or "gym").with_name(script)), *options]
    try:
        command()
    finally:
        sys.argv = typed


_INDENT = " " * 6


def group_page(words: tuple[str, ...]) -> str:
    """What can be typed after `gym`, or after the first word of a group."""
    leaves = list(leaves_below(words))
    column = max(len(leaf.title) for leaf in leaves) + 2
    other = max(len(spelled_with_prefix(leaf)) for leaf in leaves) + 2
    typed = " ".join(("gym", *words))
    parts = [f"Usage: {typed} <command> [flags] [+option=value ...]"]
    for group, about in GROUPS.items():
        lines = [
            f"  {leaf.title:<{column}}{spelled_with_prefix(leaf):<{other}}{summary_of(leaf)}"
            for leaf in leaves
            if leaf.words[0] == group
        ]
        if lines:
            parts.append("\n".join([f"{about}:", *lines]))
    parts.append(
        "The second column is another spelling of the same command; `ng` is another of `gym`.\n"
        f"`{typed} {'<command> ' * bool(words)}{'<group> <command> ' * (not words)}--help` shows what a command takes."
    )
    if not words:
        parts.append("`gym --version [--json]` prints versions (ng_version), `gym --help` this page (ng_help).")
    return "\n\n".join(parts) + "\n"


def summary_of(leaf: Leaf) -> str:
    """One line about a command."""
    info = find_command(leaf.command)
    return leaf.summary or (info.summary if info else "")


def leaf_page(leaf: Leaf) -> str:
    """What a command does, its flags with the options they stand for, and where to find the other options."""
    width = page_width()
    usage = " ".join(filter(None, ["Usage:", leaf.title, leaf.positional, "[flags] [+option=value ...]"]))
    meanings = _meanings(leaf)
    lines = [flag_lines(flag, meanings, width) for flag in leaf.flags]
    parts = [usage, *_about(leaf, width), "\n".join(["Flags:", *lines, "  -v, --verbose  (+verbose=true)"])]
    other = spelled_with_prefix(leaf)
    if other:
        more = f"Also typed as {other}. Its other options can be given here as well; {other} --help lists them all."
        parts.append(textwrap.fill(more, width))
    return "\n\n".join(parts) + "\n"


def _about(leaf: Leaf, width: int) -> list[str]:
    """What the command says about itself, without its examples."""
    command = loaded(leaf.command) if ":" in leaf.command else command_named(leaf.command)
    words = command.words if isinstance(command, Command) else command.__doc__
    text = re.split(r"^Examples:", cleandoc(words or summary_of(leaf)), maxsplit=1, flags=re.M)[0]
    return [
        textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)
        for paragraph in re.split(r"\n\s*\n", text.strip())
    ]


def _meanings(leaf: Leaf) -> dict[str, str]:
    """What the options of the command are for, by every name they have."""
    info = find_command(leaf.command)
    config_class = config_class_of(info) if info else None
    if config_class is None and ":" in leaf.command:
        config_class = getattr(loaded(leaf.command), "config_class", None)
    if config_class is None:
        return {}
    meanings = meanings_of(config_class)
    return {name: meanings.get(option.field, "") for option in options_of(config_class) for name in option.names}


def flag_lines(flag: Flag, meanings: Mapping[str, str], width: int) -> str:
    """One flag: its spellings, the options that it sets, and what that means."""
    sets = " ".join(f"+{key}" if "=" in key else f"+{key}={'true' if flag.is_switch else '...'}" for key in flag.sets)
    spelled = " ".join(filter(None, [", ".join(flag.spellings), flag.placeholder]))
    shown = f"  {spelled}" + (f"  ({sets})" if flag.role in ("option", "entrypoint") else "")
    meaning = flag.meaning or next((meanings[key] for key in flag.sets if meanings.get(key)), "")
    if not meaning:
        return shown
    return f"{shown}\n{textwrap.fill(meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)}"
