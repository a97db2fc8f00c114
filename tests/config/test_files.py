"""`config_paths`, the files they include, env.yaml."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config.files import config_paths_in, load_config_files, load_env_file
from nemo_gym.config.trees import merge_trees
from nemo_gym.errors import (
    ConfigError,
    ConfigInterpolationError,
    ConfigPathNotFoundError,
    MalformedConfigPathsError,
)

Write = Callable[[dict[str, str]], None]


def merged(*config_paths: str) -> dict[str, Any]:
    loaded = load_config_files(config_paths)
    assert loaded.problems == []
    return merge_trees([file.tree for file in loaded.files])


def problem(*config_paths: str) -> ConfigError:
    (found,) = load_config_files(config_paths).problems
    return found


def test_a_file_overrides_what_it_includes(write: Write) -> None:
    write({"parent.yaml": "config_paths: [child.yaml]\nk: parent\n", "child.yaml": "k: child\nonly: child\n"})

    assert merged("parent.yaml")["k"] == "parent"
    assert merged("parent.yaml")["only"] == "child"


def test_a_later_entry_overrides_an_earlier_one_with_all_it_includes(write: Write) -> None:
    write(
        {
            "parent.yaml": "config_paths: [child.yaml]\nk: parent\n",
            "child.yaml": "k: child\n",
            "other.yaml": "k: other\n",
        }
    )

    assert merged("parent.yaml", "other.yaml")["k"] == "other"
    assert merged("other.yaml", "parent.yaml")["k"] == "parent"


def test_includes_are_flattened_depth_first_siblings_in_order(write: Write) -> None:
    write(
        {
            "a.yaml": "config_paths: [b.yaml, c.yaml]",
            "b.yaml": "config_paths: [d.yaml]",
            "c.yaml": "config_paths: [d.yaml]",
            "d.yaml": "",
            "e.yaml": "",
        }
    )

    loaded = load_config_files(["a.yaml", "e.yaml"])

    assert [file.path.name for file in loaded.files] == ["d.yaml", "b.yaml", "c.yaml", "a.yaml", "e.yaml"]
    assert loaded.given == ["a.yaml", "e.yaml", "b.yaml", "d.yaml", "c.yaml"]
    assert {path.name for path in loaded.files[3].included} == {"b.yaml", "c.yaml", "d.yaml"}


def test_one_file_in_several_spellings_is_one_file(write: Write, tmp_path: Path) -> None:
    write({"a.yaml": f"config_paths: [./b.yaml, sub/../b.yaml, {tmp_path}/b.yaml]", "b.yaml": "", "sub/x.yaml": ""})
    (tmp_path / "link.yaml").symlink_to(tmp_path / "b.yaml")

    loaded = load_config_files(["a.yaml", "./a.yaml", "link.yaml"])

    assert [file.path.name for file in loaded.files] == ["b.yaml", "a.yaml"]
    assert loaded.given == ["a.yaml", "link.yaml"]


def test_files_that_include_one_another_are_each_read_once_with_a_warning(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write({"a.yaml": "config_paths: [b.yaml]\nk: a\n", "b.yaml": "config_paths: [./a.yaml]\nk: b\n"})

    assert merged("a.yaml")["k"] == "a"

    (record,) = caplog.records
    assert "a.yaml -> " in record.getMessage()
    assert "circle" in record.getMessage()


def test_includes_are_looked_up_like_any_path_not_beside_the_including_file(write: Write) -> None:
    write({"sub/a.yaml": "config_paths: [b.yaml]", "sub/b.yaml": "k: sub", "b.yaml": "k: top"})

    assert merged("sub/a.yaml")["k"] == "top"


def test_files_of_users_come_before_ours(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"a.yaml": "k: here", "extra/a.yaml": "k: extra", "extra/b.yaml": "k: only there"})
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "extra"))

    assert merged("a.yaml")["k"] == "extra"
    assert merged("b.yaml")["k"] == "only there"


def test_a_file_that_is_nowhere_is_reported_with_every_place_it_was_looked_for(tmp_path: Path) -> None:
    error = problem("nowhere.yaml")

    assert isinstance(error, ConfigPathNotFoundError)
    assert isinstance(error, FileNotFoundError)
    assert "config_paths entry 'nowhere.yaml' (from config_paths) was not found" in str(error)
    assert f"\n  {tmp_path / 'nowhere.yaml'}\n" in str(error)


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("resource_servers/math/configs/math.yaml", "resources_servers/math/configs/math.yaml"),
        ("resources_servers/math/configs/maths.yaml", "resources_servers/math/configs/math.yaml"),
        ("resources_servers/math/configs/math.yml", "resources_servers/math/configs/math.yaml"),
        ("./resources_servers/mahts/config/math.yaml", "resources_servers/math/configs/math.yaml"),
    ],
)
def test_a_misspelled_path_is_answered_with_the_one_that_exists(write: Write, entry: str, meant: str) -> None:
    write({"resources_servers/math/configs/math.yaml": ""})

    assert f"did you mean {meant!r}?" in str(problem(entry))


def test_a_misspelled_absolute_path_is_answered_too(write: Write, tmp_path: Path) -> None:
    write({"folder/model.yaml": ""})

    assert f"did you mean {str(tmp_path / 'folder/model.yaml')!r}?" in str(problem(f"{tmp_path}/folder/modle.yaml"))


def test_names_alike_only_in_their_suffix_are_no_suggestion(write: Write) -> None:
    write({"abc.yaml": ""})

    assert "did you mean" not in str(problem("xyz.yaml"))


def test_a_file_in_the_place_of_a_folder_is_just_not_found(write: Write) -> None:
    write({"a.yaml": ""})

    assert "'a.yaml/b.yaml' (from config_paths) was not found." in str(problem("a.yaml/b.yaml"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    assert "it is a folder" in str(problem("folder"))


def test_every_unreadable_file_is_reported_and_includes_name_their_file(write: Write, tmp_path: Path) -> None:
    write({"a.yaml": "config_paths: [gone.yaml, broken.yaml]", "broken.yaml": "a: [", "c.yaml": "config_paths: x"})

    problems = [str(each) for each in load_config_files(["a.yaml", "c.yaml"]).problems]

    assert f"(from {tmp_path / 'a.yaml'}) was not found" in problems[0]
    assert "Malformed YAML in" in problems[1]
    assert f"config_paths (from {tmp_path / 'c.yaml'}) must be a list of paths" in problems[2]
    assert len(problems) == 3


@pytest.mark.parametrize("value", ["a.yaml", {"a": 1}, 5, ["a.yaml", 5], ["a.yaml", ""], [None]])
def test_config_paths_must_be_a_list_of_paths(value: object) -> None:
    with pytest.raises(MalformedConfigPathsError, match="must be a list of paths") as failure:
        config_paths_in({"config_paths": value}, "there")

    assert "there" in str(failure.value)
    assert repr(value) in str(failure.value)
    assert isinstance(failure.value, ValueError)


def test_a_single_path_is_answered_with_the_list_to_write() -> None:
    with pytest.raises(MalformedConfigPathsError, match=r'"\+config_paths=\[a\.yaml\]"'):
        config_paths_in({"config_paths": "a.yaml"}, "the command line")


@pytest.mark.parametrize("config", [{}, {"config_paths": None}, {"config_paths": []}, {"config_paths": "???"}])
def test_no_config_paths_are_none(config: dict[str, Any]) -> None:
    assert config_paths_in(config, "here") == []


def test_paths_may_be_put_together_from_values_of_the_same_file_and_of_the_context(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER_OF_THE_TEST", "sub")
    write(
        {
            "a.yaml": "config_paths: ['${mine}/b.yaml', '${theirs}/c.yaml', '${oc.env:FOLDER_OF_THE_TEST}/d.yaml']\n"
            "mine: sub\ntheirs: overridden\n",
            "sub/b.yaml": "",
            "sub/c.yaml": "",
            "sub/d.yaml": "",
        }
    )

    loaded = load_config_files(["a.yaml"], context={"theirs": "sub"})

    assert loaded.problems == []
    assert loaded.given == ["a.yaml", "sub/b.yaml", "sub/c.yaml", "sub/d.yaml"]


def test_a_path_that_cannot_be_put_together_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigInterpolationError, match=r"from here.*\$\{nothing\}/a\.yaml.*'nothing' not found"):
        config_paths_in({"config_paths": ["${nothing}/a.yaml"]}, "here")


def test_the_env_file_is_the_named_one_or_else_the_one_in_the_current_folder(write: Write, tmp_path: Path) -> None:
    write({"env.yaml": "k: found\n", "other.yaml": "k: named\n", ".env.yaml": "k: wrong\n"})

    found, named = load_env_file(None), load_env_file(tmp_path / "other.yaml")

    assert found is not None
    assert found.tree == {"k": "found"}
    assert named is not None
    assert named.tree == {"k": "named"}


def test_a_missing_env_file_is_none(tmp_path: Path) -> None:
    assert load_env_file(tmp_path / "nothing.yaml") is None
