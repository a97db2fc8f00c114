"""How an extra is installed: from the checkout and with `-e`, in every message and on every page.

On an index the name nemo-gym belongs to somebody else, and without `-e` an editable installation becomes a copy.
"""

import re
from pathlib import Path

import pytest

from nemo_gym import PARENT_DIR, paths
from nemo_gym.paths import install_command

OPTIONS = r"(?:-\S+\s+)*"
FROM_AN_INDEX = re.compile(rf"pip install\s+{OPTIONS}['\"`]?nemo[-_]gym(?![\w.-])")
AS_A_COPY = re.compile(r"pip install(?![^\n]*\s-e\s)[^\n`]*\s['\"]?\.(?:\[|['\"`\s]|$)", re.MULTILINE)


def wrong_commands(text: str) -> list[str]:
    """The commands in a text that fetch another package than ours, or make a copy of the checkout."""
    return [found[0] for pattern in (FROM_AN_INDEX, AS_A_COPY) for found in pattern.finditer(text)]


def texts() -> dict[Path, str]:
    """Every text that a person may read, or that may become a message, by its path in the checkout."""
    folders = ("nemo_gym", "docs", "benchmarks", "resources_servers", "responses_api_agents", "responses_api_models")
    found = [path for folder in folders for path in (PARENT_DIR / folder).rglob("*")]
    wanted = [path for path in [*found, *PARENT_DIR.glob("*")] if path.is_file() and ".venv" not in path.parts]
    endings = {".md", ".py", ".yaml", ".toml", ".txt", ".html", ".js", ".ipynb", ".sh", ""}
    return {path: path.read_text() for path in wanted if path.suffix in endings and path.name[0] != "."}


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install 'nemo-gym[hf]'", True),
        ("`uv pip install -q --pre nemo_gym`", True),
        ("pip install -c constraints.txt '.[hf]'", True),
        ("pip install . -c constraints.txt", True),
        ("`pip install .`", True),
        ("pip install -c constraints.txt -e '.[hf]'", False),
        ("pip install -e . -c constraints.txt", False),
        ("pip install nemo-gym-extras ./dist/nemo_gym.whl", False),
        ("pip install -r requirements.txt", False),
    ],
)
def test_commands_that_install_something_else_are_found(text: str, is_wrong: bool) -> None:
    assert bool(wrong_commands(text)) is is_wrong


def test_no_text_says_to_install_somebody_elses_package_or_a_copy() -> None:
    seen = texts()
    assert {PARENT_DIR / "README.md", PARENT_DIR / "Makefile", PARENT_DIR / "nemo_gym/paths.py"} <= seen.keys()
    assert {str(path): wrong for path, text in seen.items() if (wrong := wrong_commands(text))} == {}


def test_the_command_installs_the_checkout_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PARENT_DIR)
    assert install_command("hf") == "pip install -c constraints.txt -e '.[hf]'"
    monkeypatch.chdir(tmp_path)
    command = install_command("hf")
    assert command == f"pip install -c {PARENT_DIR}/constraints.txt -e '{PARENT_DIR}[hf]'"


def test_an_installation_without_checkout_says_where_the_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "own_roots", lambda: (tmp_path,))
    assert install_command("hf") == "pip install -c constraints.txt -e '.[hf]' (in a checkout of this project)"
