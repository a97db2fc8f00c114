"""Everything the site is made of, before it is HTML: written pages, generated pages and the files they link to.

Written pages keep their paths below `docs/`. A link that leaves `docs/` is led to the page that shows its target (a
module's README in the gallery, say), or to a copy of the file.
"""

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from docs.site import commands, config_keys, file_formats, gallery, http_api, python_api
from docs.site.markdown import anchors, links
from nemo_gym.paths import PARENT_DIR

DOCS = PARENT_DIR / "docs"
_SHOWN_AS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//")
_NAMED_BLOCK = re.compile(r"^```(\w+) ([\w./-]+\.\w+)\n", re.MULTILINE)
_COPIES = "files"
_NO_PAGES = {"site"}


@dataclass
class Site:
    """The tree that is handed to Sphinx."""

    pages: dict[str, str] = field(default_factory=dict)
    """Text by path."""
    copies: dict[str, Path] = field(default_factory=dict)
    """Files that are taken over as they are, by path."""

    def problems(self) -> list[str]:
        """Every link that leads nowhere, and every heading that a link misses."""
        found = []
        known = {path: anchors(text) for path, text in self.pages.items() if path.endswith(".md")}
        for path, text in self.pages.items():
            if not path.endswith(".md"):
                continue
            for link in links(text):
                if _ELSEWHERE.match(link.target):
                    continue
                file, _, anchor = link.target.partition("#")
                target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file)) if file else path
                if target not in self.pages and target not in self.copies:
                    found.append(f"{path}: {link.target} leads nowhere")
                elif anchor and anchor not in known.get(target, ()):
                    found.append(f"{path}: {link.target}: {target} has no heading {anchor!r}")
        return found

    def write(self, folder: Path) -> None:
        """Put the tree into a folder; what did not change keeps its time, so that it is not built again."""
        wanted = {folder / path: with_captions(text).encode() for path, text in self.pages.items()}
        wanted |= {folder / path: source.read_bytes() for path, source in self.copies.items()}
        for path in folder.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()
        for path, content in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)


def with_captions(text: str) -> str:
    """A page on which blocks that begin with the name of a file (```yaml model.yaml) show it."""
    return _NAMED_BLOCK.sub(r"```{code-block} \1\n:caption: \2\n", text)


def site() -> Site:
    """The whole tree, with every link led to where its target is shown."""
    made = Site()
    generated = (commands.pages, config_keys.pages, http_api.pages, file_formats.pages, python_api.pages)
    for pages in generated:
        made.pages |= pages()
    for path, (text, origin) in gallery.pages().items():
        made.pages[path] = _led(made, path, text, origin) if origin.name else text
    for name, shown_as in _SHOWN_AS.items():
        if shown_as != "index.md":
            file = PARENT_DIR / name
            made.pages[shown_as] = _led(made, shown_as, file.read_text(encoding="utf-8"), file)
    for file in sorted(DOCS.rglob("*")):
        relative = file.relative_to(DOCS)
        if not file.is_file() or relative.parts[0] in _NO_PAGES or "__pycache__" in relative.parts:
            continue
        if file.suffix == ".md":
            made.pages[relative.as_posix()] = _led(made, relative.as_posix(), file.read_text(encoding="utf-8"), file)
        else:
            made.copies[relative.as_posix()] = file
    return made


def _led(made: Site, path: str, text: str, origin: Path) -> str:
    """The text of a page with links as they must be at `path`; `origin` is the file they were written for."""
    folder = origin.parent.relative_to(PARENT_DIR).as_posix()
    for link in reversed(list(links(text))):
        file, hash_mark, anchor = link.target.partition("#")
        if not file or _ELSEWHERE.match(link.target):
            continue
        shown_at = _shown_at(made, posixpath.normpath(posixpath.join(folder, file)))
        target = posixpath.relpath(shown_at, posixpath.dirname(path) or ".") + hash_mark + anchor
        text = text[: link.start] + target + text[link.start + len(link.target) :]
    return text


def _shown_at(made: Site, target: str) -> str:
    """Where the site shows a file of the repository; a page that does not exist is found out by `problems`."""
    if target in _SHOWN_AS:
        return _SHOWN_AS[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    in_gallery = gallery.page_of(target)
    if in_gallery is not None:
        return in_gallery
    if (PARENT_DIR / target).is_file():
        made.copies[f"{_COPIES}/{target}"] = PARENT_DIR / target
    return f"{_COPIES}/{target}"
