"""The help page of a command: what it does, examples, and each option with its type, default and meaning.

It is made from the docstring of the command's `main` and the fields of its config class, so it
needs no configuration and cannot disagree with what the command accepts.
"""

import os
import re
import shutil
import textwrap
from inspect import cleandoc
from typing import TextIO

from pydantic import BaseModel

from nemo_gym.cli.options import Option, meanings_of, options_of

_EXAMPLES = re.compile(r"^Examples?:[ \t]*$", re.MULTILINE)
_FIXED_LINE = re.compile(r"^(\s|[-*] |\d+\. |```)", re.MULTILINE)
_MIN_WIDTH, _MAX_WIDTH = 40, 120


def page_width() -> int:
    """The terminal's width, within what can be read comfortably."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size().columns))


def is_styled(stream: TextIO) -> bool:
    """Whether headings may be set in bold: on a terminal that can, unless `NO_COLOR` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def heading(text: str, *, styled: bool) -> str:
    """A line that stands out where the terminal can show it."""
    return f"\033[1m{text}\033[0m" if styled else text


def help_page(
    program: str,
    doc: str | None,
    config_class: type[BaseModel],
    *,
    reads_config: bool = True,
    width: int = 80,
    styled: bool = False,
) -> str:
    """The whole page, required options first.

    Examples are what follows the line `Examples:` in `doc` or in the class's docstring.
    """
    description, examples = _split_doc(doc)
    if not examples:
        examples = _split_doc(config_class.__doc__)[1]
    options = sorted(options_of(config_class), key=lambda option: option.default is not None)
    usage = _usage(program, options, open_ended=reads_config)
    parts = [_filled(usage, width, " " * len("Usage: ")), _rewrapped(description, width)]
    if examples:
        parts.append(f"{heading('Examples:', styled=styled)}\n{textwrap.indent(examples, '  ')}")
    if options:
        meanings = meanings_of(config_class)
        listed = "\n".join(_option_lines(option, meanings.get(option.field, ""), width) for option in options)
        parts.append(f"{heading('Options:', styled=styled)}\n{listed}")
    else:
        parts.append("This command has no options of its own.")
    parts.append(_rewrapped(_closing(program, reads_config=reads_config), width))
    return "\n\n".join(part for part in parts if part) + "\n"


def _split_doc(doc: str | None) -> tuple[str, str]:
    description, *rest = _EXAMPLES.split(cleandoc(doc or ""), maxsplit=1)
    return description.strip(), textwrap.dedent(rest[0]).strip("\n").rstrip() if rest else ""


def _usage(program: str, options: list[Option], *, open_ended: bool) -> str:
    required = [f"+{option.name}=<{option.expects}>" for option in options if option.default is None]
    more = open_ended or len(options) > len(required)
    return " ".join(["Usage:", program, *required, *(["[+option=value ...]"] if more else [])])


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _rewrapped(text: str, width: int) -> str:
    """Paragraphs filled to `width`; lists and indented blocks keep their lines."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        paragraph if _FIXED_LINE.search(paragraph) else _filled(paragraph, width) for paragraph in paragraphs
    )


def _option_lines(option: Option, meaning: str, width: int) -> str:
    state = "[required]" if option.default is None else f"[default: {option.default}]"
    lines = [f"  +{option.name}=<{option.expects}>  {state}"]
    if meaning:
        indent = " " * 6
        lines.append(textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines)


def _closing(program: str, *, reads_config: bool) -> str:
    prefix = "nemo_gym_" if program.startswith("nemo_gym_") else "ng_"
    listing = f"{prefix}help lists every command."
    if not reads_config:
        return listing
    return (
        'Config files are given as "+config_paths=[first.yaml,second.yaml]"; any key in them can be set like an '
        f"option, +key.inner=value, or removed, ~key.\n\n{listing}"
    )
