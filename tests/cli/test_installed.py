import json
from importlib.metadata import version
from pathlib import Path

import pytest

from nemo_gym.launch.requirements import is_python_allowed, read_requirements, unmet, unmet_package


def unmet_in(folder: Path, text: str) -> list[str]:
    (folder / "requirements.txt").write_text(text)
    return unmet(read_requirements(folder))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages that are installed as far as their metadata goes."""
    packages = tmp_path / "packages"

    def add(name: str, metadata: str, origin: dict[str, object] | None = None) -> None:
        info = packages / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n{metadata}")
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))

    add(
        "tiny-tool",
        "Provides-Extra: fast\nProvides-Extra: self\nRequires-Dist: surely-not-installed; extra == 'fast'\n"
        "Requires-Dist: numpy; extra == 'self'\nRequires-Dist: tiny-tool[self]; extra == 'self'\n",
    )
    git = {"requested_revision": "v1", "commit_id": "abc", "vcs": "git"}
    add("from-git", "", {"url": "https://x.org/from-git.git", "vcs_info": git})
    add("from-path", "", {"url": (tmp_path / "from_path").as_uri(), "dir_info": {}})
    monkeypatch.syspath_prepend(packages)
    return packages


def test_what_is_installed_in_a_fitting_version_is_met(tmp_path: Path) -> None:
    lines = f"pydantic>=2\nNumPy\nrich=={version('rich')} --hash=sha256:00\nnope; python_version < '3'\n"
    assert unmet_in(tmp_path, lines) == []


def test_what_is_missing_or_has_another_version_is_said(tmp_path: Path) -> None:
    assert unmet_in(tmp_path, "surely-not-installed>1\npydantic<2\nnumpy\n") == [
        "surely-not-installed>1 is not installed",
        f"pydantic<2 is wanted, {version('pydantic')} is installed",
    ]


def test_an_extra_is_met_when_what_it_adds_is_installed(tmp_path: Path, install: Path) -> None:
    assert unmet_package("tiny-tool>1") == []
    assert unmet_package("tiny-tool[fast]") == ["surely-not-installed is not installed"]
    assert unmet_package("Tiny_Tool[self]") == []


def test_a_package_from_elsewhere_is_met_only_when_it_was_installed_from_there(tmp_path: Path, install: Path) -> None:
    met = "from-git @ git+https://x.org/from-git.git@v1\nfrom-git @ git+https://x.org/from-git.git@abc\n"
    assert unmet_in(tmp_path, f"{met}git+https://x.org/from-git.git\n./from_path\n") == []
    unmet_lines = (
        "from-git @ git+https://x.org/from-git.git@v2\nfrom-git @ https://x.org/other.whl\n./other_path\n"
        "https://x.org/gone.whl\nnot-there @ https://x.org/gone.whl\n"
    )
    assert len(unmet_in(tmp_path, unmet_lines)) == 5


def test_constraints_concern_only_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "limits.txt").write_text("pydantic<2\nsurely-not-installed==1\n# comment\n")
    assert unmet_in(tmp_path, "-c limits.txt\nnumpy\n") == [f"pydantic<2 is wanted, {version('pydantic')} is installed"]
    assert unmet_in(tmp_path, "-c gone.txt\n") != []


def test_a_line_nobody_understands_is_left_to_the_installer(tmp_path: Path) -> None:
    assert unmet_in(tmp_path, "what is this\n") == ["what is this (not understood)"]


def test_requires_python_is_compared_with_the_running_or_the_chosen_python() -> None:
    assert is_python_allowed(None)
    assert is_python_allowed(">=3.11")
    assert not is_python_allowed(">=3.11", "3.10")
    assert not is_python_allowed("<3")
    assert is_python_allowed(">=3.13.14", "3.13")
    assert not is_python_allowed(">=3.13.14", "3.13.2")
    assert is_python_allowed("<3.13.5", "3.13")
    assert not is_python_allowed(">=3.14", "3.13")
    assert is_python_allowed("nonsense")
