"""Files that appear whole, and are never somebody else's."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.paths import append_own, make_folder, open_own, refuse_long_names, remove_debris, sync_folder, write_aside


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_written_aside_replaces_the_old_one_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with write_aside(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_a_file_written_aside_vanishes_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(TypeError), write_aside(path) as file:
        file.writelines([b"new", "no bytes"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_a_file_written_aside_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with write_aside(tmp_path / "rows.jsonl") as file:
        file.write(b"new")
    assert (tmp_path / "rows.jsonl").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_is_written_aside_has_another_name_every_time(tmp_path: Path) -> None:
    seen = set()
    for _ in range(20):
        with write_aside(tmp_path / "rows.jsonl"):
            seen |= {name for name in names_in(tmp_path) if name != "rows.jsonl"}
    assert len(seen) == 20


def test_a_name_that_was_guessed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    guesses = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(secrets, "token_urlsafe", lambda length: next(guesses))
    (tmp_path / "rows.jsonl.~aaaaaaaa.tmp").symlink_to(precious)
    with write_aside(tmp_path / "rows.jsonl") as file:
        file.write(b"new")
    assert precious.read_text() == "mine"
    assert (tmp_path / "rows.jsonl").read_text() == "new"


@pytest.mark.parametrize("predictable", ["rows.jsonl.tmp", "rows.jsonl.partial", "rows.jsonl"])
def test_a_planted_link_is_not_followed(tmp_path: Path, predictable: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / predictable).symlink_to(precious)
    with write_aside(tmp_path / "rows.jsonl") as file:
        file.write(b"new")
    assert precious.read_text() == "mine"
    assert (tmp_path / "rows.jsonl").read_text() == "new"


@pytest.mark.parametrize(
    "opening",
    [lambda path: open_own(path, os.O_WRONLY | os.O_CREAT), lambda path: append_own(path)],
    ids=["open_own", "append_own"],
)
@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_file_of_ours_is_never_a_link(tmp_path: Path, opening: Callable[[Path], object], is_dangling: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if not is_dangling:
        target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(ConfigError, match=f"{link} is a symbolic link"):
        opening(link)
    assert target.exists() is not is_dangling


def test_what_killed_processes_wrote_aside_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine = ["out.jsonl.~abcdefgh.tmp", "out_manifest.json.~-_345678.tmp"]
    others = ["other.jsonl.~abcdefgh.tmp", "out.jsonl.tmp", "out.jsonl.abcdefgh.tmp", "out.jsonl", ".~abcdefgh.tmp"]
    for name in (*mine, *others):
        (tmp_path / name).touch()
    remove_debris([tmp_path / "out.jsonl", tmp_path / "out_manifest.json"])
    assert names_in(tmp_path) == sorted(others)


def test_a_name_of_any_length_that_a_file_can_have_can_be_written_aside(tmp_path: Path) -> None:
    for length in (200, 240, 241, 242, 255):
        path = tmp_path / ("n" * length)
        with write_aside(path) as file:
            file.write(b"new")
        assert path.read_text() == "new"


def test_names_that_no_file_can_have_are_refused_in_words(tmp_path: Path) -> None:
    refuse_long_names("output_fpath", tmp_path / ("n" * 255), Path("/"), Path("out"))
    with pytest.raises(ConfigError, match=r"\+output_fpath is too long by 45: .* 300 bytes .* takes 255"):
        refuse_long_names("output_fpath", tmp_path / "good", tmp_path / ("n" * 300))
    with pytest.raises(ConfigError, match="too long by 5:"):  # in bytes, and in a folder that is still to be made
        refuse_long_names("output_fpath", tmp_path / ("ö" * 130) / "out.jsonl")


def test_folders_are_made_with_those_above_them_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_folder_that_cannot_be_listed_is_written_to_all_the_same(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nowhere")
