"""`llms.txt`: the site for programs that read. A list of its pages, whose Markdown lies beside their HTML."""

import posixpath
import re

from docs.site.markdown import first_sentence, page, title
from docs.site.pages import Site

_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CAPTION = re.compile(r"^:caption:\s*(.+)$", re.MULTILINE)
_GENERATED = ("reference/", "gallery/")
_ABOUT = (
    "Collect rollouts: let LLM agents attempt tasks, score every attempt, keep every result. Commands `ng_*` with "
    "options `+key=value`, servers that speak JSON over HTTP, results in JSONL files."
)


def files(site: Site) -> dict[str, str]:
    """`llms.txt`, `llms-full.txt` (all written pages in one) and the Markdown of every page, by path."""
    sections = list(_sections(site))
    listed = [
        part
        for caption, paths in sections
        for part in (f"## {caption}", "\n".join(_entry(site, path) for path in paths))
    ]
    written = [path for _, paths in sections for path in paths if not path.startswith(_GENERATED)]
    made = {path: readable(text) for path, text in site.pages.items() if path.endswith(".md")}
    made["llms.txt"] = page("# nemo_gym", f"> {_ABOUT}", *listed)
    made["llms-full.txt"] = page(*(f"<!-- {path} -->\n\n{made[path]}" for path in written))
    return made


def _sections(site: Site) -> list[tuple[str, list[str]]]:
    """The captions of the front page, each with the pages below it, those below index pages included."""
    found = []
    for options in _TOCTREE.findall(site.pages["index.md"]):
        caption = _CAPTION.search(options)
        found.append((caption[1] if caption else "Pages", list(_below(site, "index.md", options))))
    return found


def _below(site: Site, path: str, options: str) -> list[str]:
    found = []
    for line in options.splitlines():
        entry = re.sub(r"^.*<(.+)>$", r"\1", line.strip())
        if not entry or entry.startswith(":"):
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.removesuffix(".md") + ".md"))
        found.append(target)
        for inner in _TOCTREE.findall(site.pages[target]):
            found += _below(site, target, inner)
    return found


def _entry(site: Site, path: str) -> str:
    text = site.pages[path]
    return f"- [{title(text)}]({path}): {first_sentence(readable(text))}"


def readable(text: str) -> str:
    """A page without what only the builder of the site understands."""
    return _TOCTREE.sub("", text).rstrip() + "\n"
