"""The Python of the docs, as type checkers see it: whoever copies it into a project of theirs has nothing to mend."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR

MISTAKES = """\
from nemo_gym.rollout_collection import RolloutCollectionConfig

RolloutCollectionConfig(input_jsonl_fpath="in.jsonl", output_jsonl_fpath="out.jsonl", num_repeat=2)
RolloutCollectionConfig(input_jsonl_fpath="in.jsonl", output_jsonl_fpath="out.jsonl", limit="all of them")
RolloutCollectionConfig(input_jsonl_fpath="in.jsonl")
"""
LINES_WITH_MISTAKES = {3, 4, 5}
MYPY = """\
[mypy]
strict = true
# a large library that the tests of trainers alone install
[mypy-torch.*]
ignore_missing_imports = true
"""
PYRIGHT = {"reportMissingImports": "none"}  # mypy finds those


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every block as a file, and one with mistakes: checkers that do not see those see nothing."""
    folder = tmp_path_factory.mktemp("blocks")
    pages = [PARENT_DIR / "README.md", *sorted((PARENT_DIR / "docs").rglob("*.md"))]
    for page in pages:
        blocks = re.findall(r"^```python(?: \S+)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks):
            (folder / f"{page.stem.replace('-', '_')}_{number}.py").write_text(block)
    assert len(list(folder.iterdir())) > 15
    (folder / "quickstart.py").write_text((PARENT_DIR / "docs/examples/quickstart.py").read_text())
    (folder / "mistakes.py").write_text(MISTAKES)
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return folder


def checked(folder: Path, *command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=300
    ).stdout


def test_mypy_is_content_with_the_docs(folder: Path) -> None:
    cache = PARENT_DIR / ".mypy_cache" / "docs"
    files = sorted(path.name for path in folder.glob("*.py"))

    said = checked(folder, "mypy", "--config-file=mypy.ini", f"--cache-dir={cache}", "--no-error-summary", *files)

    found = {(name, int(line)) for name, line in re.findall(r"^(\S+?):(\d+): error", said, re.MULTILINE)}
    assert found == {("mistakes.py", line) for line in LINES_WITH_MISTAKES}, said


def test_pyright_is_content_with_the_docs(folder: Path) -> None:
    said = checked(folder, "pyright", "--outputjson", "--level=error", f"--pythonpath={sys.executable}")

    errors = json.loads(said[said.index("{") :])["generalDiagnostics"]
    found = {(Path(error["file"]).name, error["range"]["start"]["line"] + 1) for error in errors}
    assert found == {("mistakes.py", line) for line in LINES_WITH_MISTAKES}, errors
