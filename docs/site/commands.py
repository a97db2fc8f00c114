"""The reference of the commands, from their registry: one page each, with the text and the options of its `--help`."""

import re
from inspect import cleandoc

from pydantic import BaseModel

from docs.site.fields import fields_table
from docs.site.markdown import block, code, contents, escaped, page, table
from nemo_gym.cli.commands.gym import summary_of
from nemo_gym.cli.pages import GROUPS, CommandInfo
from nemo_gym.cli.registry import COMMANDS, config_class_of
from nemo_gym.cli.tree import TREE, Flag, spelled_as_gym, spelled_with_prefix
from nemo_gym.schemas.cli_config import Shortcuts

FOLDER = "reference/commands"


def pages() -> dict[str, str]:
    """Path and text of every page."""
    made = {f"{FOLDER}/ng_{info.name}.md": _page(info) for info in COMMANDS}
    made[f"{FOLDER}/gym.md"] = _tree()
    made[f"{FOLDER}/index.md"] = _index()
    return made


def _index() -> str:
    parts = [
        "# Every command",
        "Options are written `+name=value`. [Commands](../../commands.md) explains how, and what exit codes mean. "
        "Every command has two spellings; [gym](gym.md) lists the flags of the second.",
    ]
    for group in GROUPS:
        infos = [info for info in COMMANDS if info.group == group]
        if infos:
            rows = [
                (f"[`ng_{info.name}`](ng_{info.name}.md)", code(spelled_as_gym(info.name)), escaped(info.summary))
                for info in infos
            ]
            parts += [f"## {group}", table(("Command", "Also typed as", "Does"), rows)]
    parts.append(contents(["gym", *(f"ng_{info.name}" for info in COMMANDS)]).replace("\n\n", "\n:hidden:\n\n", 1))
    return page(*parts)


def _tree() -> str:
    """The page of the tree: every command with its flags, and the options they stand for."""
    parts = [
        "# gym",
        "The commands as one tree: `gym <group> <command>`, with flags. `ng` is the same program. A flag stands for an "
        "option of the other spelling; whatever option that one takes can be given as `+name=value` as well, and "
        "output, files and exit codes are the same. `gym`, `gym eval` and `gym eval run --help` explain themselves.",
    ]
    for leaf in TREE:
        other = spelled_with_prefix(leaf)
        link = f" The other spelling is [`{other}`]({other}.md)." if other else ""
        rows = [
            (code(" ".join(filter(None, [", ".join(flag.spellings), flag.placeholder]))), _sets(flag))
            for flag in leaf.flags
        ]
        parts += [
            f"## {leaf.title}",
            f"{escaped(summary_of(leaf))}.{link}",
            table(("Flag", "Stands for"), rows) if rows else "",
        ]
    return page(*parts)


def _sets(flag: Flag) -> str:
    if flag.role in ("option", "entrypoint"):
        ending = "=true" if flag.is_switch else ""
        return ", ".join(code(f"+{key}" if "=" in key else f"+{key}{ending}") for key in flag.sets)
    return escaped(flag.meaning)


def _page(info: CommandInfo) -> str:
    description, _, examples = cleandoc(info.words).partition("\nExamples:")
    config_class = config_class_of(info)
    options = fields_table(config_class, prefix="+") if config_class is not None else ""
    return page(
        f"# ng_{info.name}",
        described(description),
        "## Examples" if examples else "",
        block(cleandoc(examples.strip("\n")), "bash") if examples else "",
        "## Options",
        options or "This command has no options of its own.",
        _short_ways(config_class),
        f"Also installed as `nemo_gym_{info.name}`, and typed as [`{spelled_as_gym(info.name)}`](gym.md). "
        "Config files and every key in them can be given as well: see [Configuration](../../configuration.md).",
    )


def _short_ways(config_class: type[BaseModel] | None) -> str:
    taken = getattr(config_class, "shortcuts", ())
    if not taken:
        return ""
    unknown = set(Shortcuts.model_fields) - set(taken)
    lead = "One word for config paths and keys: see [Short ways](../../commands.md#short-ways)."
    return f"## Short ways\n\n{lead}\n\n{fields_table(Shortcuts, prefix='+', without=unknown)}"


def described(text: str) -> str:
    """A docstring as Markdown: indented parts and lists stay as they are, the rest is text."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        if paragraph.startswith("    "):
            parts.append(block(cleandoc(paragraph)))
        elif re.match(r"([A-Z]\w+):\n ", paragraph):
            parts.append(_section(paragraph))
        else:
            parts.append(escaped(paragraph))
    return "\n\n".join(parts)


def _section(paragraph: str) -> str:
    """`Args:`, `Raises:` and the like: a name, and below it one entry per line."""
    head, _, rest = paragraph.partition("\n")
    entries: list[str] = []
    for line in cleandoc(rest).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    lines = []
    for entry in entries:
        name, colon, meaning = entry.partition(":")
        is_named = bool(colon) and " " not in name.strip()
        lines.append(f"- `{name}`: {escaped(meaning.strip())}" if is_named else f"- {escaped(entry)}")
    return f"**{head.rstrip(':')}**\n\n" + "\n".join(lines)
