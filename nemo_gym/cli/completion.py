"""Shell completion: what could stand at the cursor of a half-typed command.

The scripts that `ng_completion` prints hold no knowledge of their own. At each TAB they run
`python -m nemo_gym.cli.completion <shell> <command> <line up to the cursor> <word to replace>`,
which answers one candidate per line. It must answer at once, so nothing here loads OmegaConf.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nemo_gym.cli.pages import HELP
from nemo_gym.cli.registry import config_class_of, find_command, installed_scripts, shortcuts_of
from nemo_gym.cli.tree import LIST_TYPES, TREE, Flag, Leaf, leaves_below
from nemo_gym.config.components import (
    CONFIGS_OF,
    KINDS,
    agent_names,
    benchmark_configs,
    environment_configs,
    server_configs,
)
from nemo_gym.config.options import Option, options_of
from nemo_gym.keys import AGENTS_TYPE, CONFIG_PATHS_KEY_NAME, MODELS_TYPE, RESOURCES_TYPE, SERVER_TYPES
from nemo_gym.paths import component_search_roots
from nemo_gym.schemas.cli_config import CompletionConfig

_COMPONENT_CONFIGS = (*(f"{server_type}/*/configs/*.yaml" for server_type in SERVER_TYPES), "benchmarks/**/*.yaml")
_COMPONENT_FOLDERS = (*SERVER_TYPES, "benchmarks")
_UNTYPABLE = frozenset(" \t\n\"'\\,[]{}()$&|;<>*?`!")
"""A file whose name has one of these would need quoting that differs by shell and place."""

_MAX_LONE_FOLDERS = 10
_SCRIPTS = {
    "bash": """\
_nemo_gym_complete() {{
    local candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <({python} -P -m nemo_gym.cli.completion bash "$1" "${{COMP_LINE:0:COMP_POINT}}" "$2" 2>/dev/null)
}}
complete -o nospace -F _nemo_gym_complete {scripts}
""",
    "zsh": """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
_nemo_gym_complete() {{
    local -a candidates
    local before="$words[2,CURRENT-1]"
    candidates=("${{(@f)$({python} -P -m nemo_gym.cli.completion zsh "$words[1]" "${{(Q)PREFIX}}" "" "$before" \\
        2>/dev/null)}}")
    [[ -n "$candidates" ]] && compadd -U -Q -S '' -a candidates
}}
compdef _nemo_gym_complete {scripts}
""",
}
PROGRAMS = ("gym", "ng")
"""What the tree of commands is typed after."""
_VERBOSE = ("-v", "--verbose")
_NAMES_OF: Mapping[str, Callable[[], Iterable[str]]] = {
    "agent_name": agent_names,
    "benchmark": benchmark_configs,
    "environment": environment_configs,
    "model": lambda: [*(_begun(name) for name in KINDS), *server_configs(MODELS_TYPE)],
}
"""Options whose values are names of components."""
_NAMES_IN: Mapping[str, Callable[[], Iterable[str]]] = {
    "benchmarks": benchmark_configs,
    "environments": lambda: [*environment_configs(), *benchmark_configs()],
    "agents": lambda: (name.partition("/")[0] for name in server_configs(AGENTS_TYPE)),
    "models": lambda: server_configs(MODELS_TYPE),
    "resources-servers": lambda: (name.partition("/")[0] for name in server_configs(RESOURCES_TYPE)),
}
"""What `gym list` knows by name."""


def _begun(kind: str) -> str:
    """What stands in front of a model's name or URL; some kinds can do without."""
    return kind if KINDS[kind].shape.startswith(f"{kind} ") else f"{kind}:"


def current_word(line: str) -> str:
    """The last word of a half-typed line as the command would see it: quotes and backslashes removed."""
    word, quote, escaped = "", "", False
    for character in line:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\" and quote != "'":
            escaped = True
        elif character in "\"'" and quote in ("", character):
            quote = "" if quote else character
        elif character.isspace() and not quote:
            word = ""
        else:
            word += character
    return word


def candidates(script: str, word: str) -> list[str]:
    """What `word`, typed after `script`, could become: whole words, sorted."""
    mark = word[: len(word) - len(word.lstrip("+~"))]
    name, equals, value = word[len(mark) :].partition("=")
    if mark not in ("", "+", "++", "~"):
        return []
    if not equals:
        return sorted(_names(script, mark, name))
    if name == CONFIG_PATHS_KEY_NAME:
        return sorted(f"{mark}{name}={completed}" for completed in _config_lists(value))
    return sorted(f"{mark}{name}={completed}" for completed in _values(script, name, value))


def _names(script: str, mark: str, typed: str) -> Iterator[str]:
    if typed.startswith("-"):
        yield "--help"
        return
    shown_mark = mark or ("" if typed else "+")
    endings = {option.name: "=" for option in _options(script)}
    info = find_command(Path(script).name)
    if info is None or info.group != HELP:
        endings[CONFIG_PATHS_KEY_NAME] = "=["
    for name, ending in endings.items():
        if name.startswith(typed):
            yield f"{shown_mark}{name}{'' if mark == '~' else ending}"


def _options(script: str) -> list[Option]:
    info = find_command(Path(script).name)
    config_class = config_class_of(info) if info else None
    return [*options_of(config_class), *shortcuts_of(config_class)] if config_class else []


def _config_lists(typed: str) -> Iterator[str]:
    """`[a.yaml,b.yaml` for each file that the last entry of the list could become.

    A file that is the only one left comes twice, with what may follow it: a sole candidate would make bash close an
    open quote, and the list with it.
    """
    *before, last = typed.removeprefix("[").split(",")
    paths = _without_lone_folders(config_files(last) - set(before))
    endings = ("]", ",") if len(paths) == 1 else ("",)
    for path in paths:
        for ending in endings:
            yield f"[{','.join([*before, path])}{ending}"


def _without_lone_folders(paths: set[str]) -> set[str]:
    """`paths`, or what is inside when they are but one folder."""
    for _ in range(_MAX_LONE_FOLDERS):
        inside = config_files(next(iter(paths))) if len(paths) == 1 else set()
        inside -= paths
        if not inside:
            break
        paths = inside
    return {path for path in paths if len(paths) > 1 or not path.endswith("/")}


def config_files(typed: str) -> set[str]:
    """Config files whose path starts with `typed`: those of components in any search root, and the user's own."""
    found = {
        str(file.relative_to(root))
        for root in component_search_roots()
        for pattern in _COMPONENT_CONFIGS
        for file in root.glob(pattern)
    }
    own = {
        path
        for path in _files(typed)
        if path.endswith((".yaml", ".yml")) or (path.endswith("/") and path.split("/")[0] not in _COMPONENT_FOLDERS)
    }
    return {path for path in (found | own) - {"env.yaml"} if path.startswith(typed) and _UNTYPABLE.isdisjoint(path)}


def _values(script: str, name: str, typed: str) -> Iterator[str]:
    for option in _options(script):
        if name in option.names:
            yield from (choice for choice in option.choices if choice.startswith(typed))
            if option.is_path:
                yield from _files(typed)
            if option.name in _NAMES_OF:
                yield from (found for found in _NAMES_OF[option.name]() if found.startswith(typed))


def _files(typed: str) -> Iterator[str]:
    """Files, and folders with a slash, that `typed` is the beginning of; hidden ones only when asked for."""
    folder, _, beginning = typed.rpartition("/")
    start = Path(f"{folder}/").expanduser() if "/" in typed else Path()
    try:
        entries = list(os.scandir(start))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(beginning) and (beginning or not entry.name.startswith(".")):
            path = f"{typed[: len(typed) - len(beginning)]}{entry.name}{'/' if entry.is_dir() else ''}"
            if _UNTYPABLE.isdisjoint(path):
                yield path


def tree_candidates(before: Sequence[str], word: str) -> list[str]:
    """What `word`, typed after the words `before`, could become: whole words, sorted; a space ends what is complete."""
    words: tuple[str, ...] = ()
    for index, typed in enumerate(before):
        if typed in _VERBOSE and not words:
            continue
        words = (*words, typed)
        leaf = next((leaf for leaf in TREE if leaf.words == words), None)
        if leaf is not None:
            return sorted(_after(leaf, before[index + 1 :], word))
    below = {leaf.words[len(words)] for leaf in leaves_below(words) if len(leaf.words) > len(words)}
    flags = () if words else ("--version", "--verbose")
    return sorted(f"{each} " for each in (*below, *flags, "--help") if each.startswith(word) and _shows(each, word))


def _shows(candidate: str, word: str) -> bool:
    """Flags are offered once a dash is typed."""
    return word.startswith("-") or not candidate.startswith("-")


def _after(leaf: Leaf, before: Sequence[str], word: str) -> Iterable[str]:
    flags = {spelling: flag for flag in leaf.flags for spelling in flag.spellings}
    flag = flags.get(before[-1]) if before else None
    if flag is not None and not flag.is_switch:
        return [f"{value} " if not value.endswith("/") else value for value in _flag_values(leaf, flag, word)]
    name, equals, value = word.partition("=")
    if equals and name in flags:
        return [f"{name}={found}" for found in _flag_values(leaf, flags[name], value)]
    if word.startswith("-"):
        return [
            f"{each} " for each in (*(flag.name for flag in leaf.flags), "--help", "--verbose") if each.startswith(word)
        ]
    if leaf.words == ("search",) and not before:
        return [f"{each} " for each in LIST_TYPES if each.startswith(word)]
    if leaf.words[0] == "list" and word:
        return [f"{each} " for each in sorted(set(_NAMES_IN[leaf.words[1]]())) if each.startswith(word)]
    options = candidates(f"ng_{leaf.command}", word) if ":" not in leaf.command else []
    return options if word else [*(f"{flag.name} " for flag in leaf.flags), *options]


def _flag_values(leaf: Leaf, flag: Flag, typed: str) -> Iterable[str]:
    if flag.choices:
        found: Iterable[str] = flag.choices
    elif flag.role == "asset":
        found = list(CONFIGS_OF[flag.sets[0]]())
    elif flag.role == "entrypoint":
        found = [name for name in CONFIGS_OF["resources_server"]() if "/" not in name]
    elif flag.role == "config":
        found = config_files(typed)
    else:
        takes_file = flag.role == "search_dir" or any(key.endswith(("path", "_glob", "input")) for key in flag.sets)
        of_options = (value for key in flag.sets for value in _values(f"ng_{leaf.command}", key, typed))
        found = dict.fromkeys([*(_files(typed) if takes_file else ()), *of_options])
    return [value for value in found if value.startswith(typed)]


def answer(shell: str, script: str, line: str, replaced: str, before: str = "") -> list[str]:
    """The candidates in the form a shell wants them; `before` are the words of a line that has only the last one.

    bash replaces only what follows the last `=` or `:`, so only that part is handed to it; zsh replaces the whole word.
    """
    word = current_word(line)
    if Path(script).name in PROGRAMS:
        words = line[: len(line) - len(word)].split()[1:] if shell == "bash" else before.split()
        whole = tree_candidates(words, word)
    else:
        whole = candidates(script, word)
    if shell != "bash":
        return whole
    kept = len(word) - len(current_word(replaced))
    return [candidate[kept:] for candidate in whole]


def completion(config: CompletionConfig) -> None:
    """`ng_completion`."""
    print(shell_script(config.shell, [*PROGRAMS, *installed_scripts()]), end="")


def shell_script(shell: str, scripts: Sequence[str]) -> str:
    """A script that teaches `shell` to complete the options of `scripts`."""
    return _SCRIPTS[shell].format(python=shlex.quote(sys.executable), scripts=" ".join(scripts))


if __name__ == "__main__":
    for candidate in answer(*sys.argv[1:6]):
        print(candidate)
