"""People find their way: every module says what it is for, and the paths that pages name exist."""

import ast
import re
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

PACKAGE = PARENT_DIR / "nemo_gym"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


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
