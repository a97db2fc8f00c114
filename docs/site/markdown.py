"""Markdown as the pages need it: text made fit to stand in it, tables, its links and the anchors of its headings."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_FENCED = re.compile(r"^(`{3,}|~{3,}).*?^\1`*\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?:.+?)\1", re.DOTALL)
_LINK = re.compile(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.MULTILINE)
_NO_PART_OF_A_SLUG = re.compile(r"[^\w\- ]")


class Link(NamedTuple):
    """One link of a page."""

    start: int
    """Where its target begins in the page's text."""
    target: str


def escaped(text: str) -> str:
    """Text in which nothing is taken for HTML or for a table's border; what stands in backticks is left alone."""
    ends = [0, *(end for match in _CODE.finditer(text) for end in match.span()), len(text)]
    return "".join(
        text[start:end].replace("|", "\\|") if number % 2 else _plain(text[start:end])
        for number, (start, end) in enumerate(pairwise(ends))
    )


def _plain(text: str) -> str:
    return re.sub(r"([<>*\[\]|\\]|_(?!\w)|(?<!\w)_)", r"\\\1", text)  # an underscore inside of a word is one


def code(text: str) -> str:
    """Text in backticks, fit for a cell of a table."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|") if text else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing when it would have no rows."""
    lines = ["| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines]) if lines else ""


def block(text: str, language: str = "") -> str:
    """A block of code."""
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def page(*parts: str) -> str:
    """Parts of a page, one below the other; empty ones are left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def contents(entries: Iterable[str], *, depth: int = 1, caption: str = "") -> str:
    """The list of a section's pages, relative to the page it stands on."""
    options = [f":maxdepth: {depth}", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *entries, "```"])


def prose(text: str) -> str:
    """The same text with spaces in place of code, so that positions stay and nothing in code is taken for a link."""
    for pattern in (_FENCED, _CODE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def links(text: str) -> Iterator[Link]:
    """The links of a page, in its order."""
    for match in _LINK.finditer(prose(text)):
        yield Link(match.start(1), match[1])


def anchors(text: str) -> set[str]:
    """What a link to a heading of this page can say after `#`, as code hosts and the site's builder make it."""
    without_blocks = _FENCED.sub("", text)
    found: dict[str, int] = {}
    names: set[str] = set()
    for match in _HEADING.finditer(without_blocks):
        slug = _slug(match[2])
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def _slug(heading: str) -> str:
    text = re.sub(r"\]\([^)]*\)", "", heading).replace("[", "").replace("`", "")
    return _NO_PART_OF_A_SLUG.sub("", text.lower()).strip().replace(" ", "-")


def title(text: str) -> str:
    """The first heading of a page."""
    found = _HEADING.search(_FENCED.sub("", text))
    return found[2].replace("`", "") if found else ""


def first_sentence(text: str) -> str:
    """The first sentence below the first headings, on one line, without links."""
    below = re.sub(r"^(?:#[^\n]*\n\s*)+", "", text.lstrip(), count=1)
    paragraph = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", below.strip().split("\n\n")[0]).split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].rstrip(":")
