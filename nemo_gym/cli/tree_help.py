"""The help pages of `gym`: of the whole tree, of a group, of one command, each with the other spelling beside it."""

import re
import textwrap
from collections.abc import Mapping
from importlib import import_module
from inspect import cleandoc, unwrap

from nemo_gym.cli.command import page_width
from nemo_gym.cli.registry import config_class_of, find_command
from nemo_gym.cli.tree import GROUPS, Flag, Leaf, leaves_below, spelled_with_prefix
from nemo_gym.config.options import meanings_of, options_of

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
    module, _, attribute = leaf.command.partition(":")
    command = getattr(import_module(module if attribute else f"nemo_gym.cli.commands.{module}"), attribute or "main")
    text = re.split(r"^Examples:", cleandoc(unwrap(command).__doc__ or summary_of(leaf)), maxsplit=1, flags=re.M)[0]
    return [
        textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)
        for paragraph in re.split(r"\n\s*\n", text.strip())
    ]


def _meanings(leaf: Leaf) -> dict[str, str]:
    """What the options of the command are for, by every name they have."""
    info = find_command(leaf.command)
    config_class = config_class_of(info) if info else None
    if config_class is None and ":" in leaf.command:
        module, _, attribute = leaf.command.partition(":")
        config_class = getattr(getattr(import_module(module), attribute), "config_class", None)
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
