"""People find their way in the floor plan: sizes of chapters and functions, and paths that pages name."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

PACKAGE = PARENT_DIR / "nemo_gym"
MOST_LINES = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_MODULES_IN_A_FOLDER = 25
MOST_MODULES = 316
MOST_IMPORTS_IN_FUNCTIONS = 80
"""Each is there for a library that takes long to load, or that may not be installed."""
FOR_OTHER_PROGRAMS = 32
"""Modules in the top folder that exist because programs elsewhere import them by that name."""
APART_FROM_THEIR_READER = {
    "cli/entry.py": "what processes begin with",
    "sandbox/config.py": "a name that programs elsewhere import",
}
"""Modules with one importer, in the same folder, that would fit into it, and why they do not belong there."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def functions_in(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield f"{path.relative_to(PARENT_DIR)}:{first} {node.name}", (node.end_lineno or first) - first + 1


def test_a_file_is_a_chapter() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in modules()}
    too_long = {name: size for name, size in sizes.items() if size > MOST_LINES}
    assert not too_long, f"more than one subject? {too_long}"


def test_functions_stay_short() -> None:
    too_long = {
        name: size for path in modules() for name, size in functions_in(path) if size > MOST_LINES_OF_A_FUNCTION
    }
    assert not too_long


def test_folders_stay_small_and_few_modules_are_enough() -> None:
    in_folder = Counter(path.parent.relative_to(PACKAGE) for path in modules() if path.name != "__init__.py")
    in_folder[Path()] -= FOR_OTHER_PROGRAMS
    too_full = {str(folder): count for folder, count in in_folder.items() if count > MOST_MODULES_IN_A_FOLDER}
    assert not too_full
    assert len(modules()) <= MOST_MODULES


def test_few_imports_are_inside_functions() -> None:
    found = {
        (path, node.lineno)
        for path in modules()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(found) <= MOST_IMPORTS_IN_FUNCTIONS


def test_code_with_one_importer_lives_in_that_importer() -> None:
    """Unless both together are more than a chapter, or the importer is in another room."""
    names = {
        ".".join(path.relative_to(PARENT_DIR).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
    }
    importers: dict[str, set[str]] = {name: set() for name in names}
    for importer, path in names.items():
        for imported in _imported_in(path):
            found = imported if imported in names else imported.rpartition(".")[0]
            if found in names and found != importer:
                importers[found].add(importer)
    fragments = set()
    for name, path in names.items():
        if path.parent == PACKAGE or path.name == "__init__.py" or len(importers[name]) != 1:
            continue
        reader = names[next(iter(importers[name]))]
        lines = sum(len(each.read_text().splitlines()) for each in (path, reader))
        if reader.parent == path.parent and lines <= MOST_LINES:
            fragments.add(str(path.relative_to(PACKAGE)))
    assert fragments == set(APART_FROM_THEIR_READER)


def _imported_in(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, and the names that it imports from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_every_room_says_what_it_is_for() -> None:
    silent = [str(path) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_that_pages_name_are_there(page: str) -> None:
    text = (PARENT_DIR / page).read_text()
    named = set(re.findall(r"(?<![\w/.])((?:[\w.-]+/)+[\w.-]*)", text))
    roots = (PARENT_DIR, PACKAGE, PARENT_DIR / "docs")
    looked_for = {name for name in named if name.split("/")[0] in _FIRST_FOLDERS}
    missing = [name for name in sorted(looked_for) if not any((root / name).exists() for root in roots)]
    assert len(looked_for) > 5
    assert not missing


_FIRST_FOLDERS = {path.name for root in (PARENT_DIR, PACKAGE) for path in root.iterdir() if path.is_dir()}
