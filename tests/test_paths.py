"""Where relative paths are looked for."""

import os
import runpy
from pathlib import Path

import pytest

import nemo_gym
from nemo_gym.paths import (
    CACHE_DIR,
    PARENT_DIR,
    RESULTS_DIR,
    ROOT_DIR,
    WORKING_DIR,
    PathTraversalError,
    candidates,
    component_search_roots,
    install_root_of,
    require_path_inside,
    resolve_for_reading,
)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)


def test_the_folders_hang_together() -> None:
    assert Path(nemo_gym.__file__).parent == ROOT_DIR
    assert ROOT_DIR.parent == PARENT_DIR
    assert CACHE_DIR == WORKING_DIR / "cache"
    assert RESULTS_DIR == WORKING_DIR / "results"


def test_parent_dir_is_the_extra_root_for_programs_that_lie_in_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "from nemo_gym import PARENT_DIR\nimport nemo_gym\nassert nemo_gym.PARENT_DIR == PARENT_DIR\n"
    for folder in ("theirs/resources_servers/quiz", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "app.py").write_text(program)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")

    def seen_by(file: str) -> Path:
        found: Path = runpy.run_path(str(tmp_path / file))["PARENT_DIR"]
        return found

    assert seen_by("theirs/resources_servers/quiz/app.py") == PARENT_DIR
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join([str(tmp_path / "link"), str(PARENT_DIR.parent)]))
    assert seen_by("theirs/resources_servers/quiz/app.py") == tmp_path / "link"
    assert seen_by("elsewhere/app.py") == PARENT_DIR
    assert install_root_of(str(PARENT_DIR / "resources_servers/code_gen/app.py")) == PARENT_DIR  # not the one around it
    assert install_root_of(None) == PARENT_DIR


def test_the_roots_are_extra_roots_then_the_current_folder_then_the_install_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join([str(tmp_path / "a"), "", "relative", "~/mine", " "]))

    assert component_search_roots() == [
        tmp_path / "a",
        tmp_path / "relative",
        tmp_path / "home" / "mine",
        tmp_path,
        PARENT_DIR,
    ]


def test_a_root_counts_once_in_whatever_spelling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join([str(tmp_path / "link"), str(PARENT_DIR)]))

    assert component_search_roots() == [tmp_path / "link", PARENT_DIR]


def test_the_first_root_that_has_it_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("extra/both", "both", "here", "extra/folder/inner", "folder"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "extra"))

    assert resolve_for_reading("both") == tmp_path / "extra/both"
    assert resolve_for_reading("here") == tmp_path / "here"
    assert resolve_for_reading("folder", Path.is_file) == tmp_path / "folder"
    assert resolve_for_reading("nemo_gym/__init__.py") == PARENT_DIR / "nemo_gym/__init__.py"


def test_what_is_nowhere_is_expected_in_the_first_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "extra"))

    assert resolve_for_reading("nowhere.yaml") == tmp_path / "extra" / "nowhere.yaml"


def test_absolute_paths_and_home_folders_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert candidates("/somewhere/x") == [Path("/somewhere/x")]
    assert candidates("~/x") == [Path("/home/me/x")]


def test_the_home_folder_of_nobody_is_a_name_like_any_other(tmp_path: Path) -> None:
    assert candidates("~no-such-user/x")[0] == tmp_path / "~no-such-user/x"


@pytest.mark.parametrize("path", ["a.jsonl", "data/train-0.parquet", "a/..b/c..", ".hidden/x"])
def test_a_path_may_lead_down(path: str) -> None:
    try:
        require_path_inside(path, "the file")
    except PathTraversalError as error:
        pytest.fail(f"it was refused: {error}")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\\b", "a\0"])
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    with pytest.raises(PathTraversalError, match=r"the file .* must be a path below its folder"):
        require_path_inside(path, "the file")
