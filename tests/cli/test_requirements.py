from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError, ServerFolderError
from nemo_gym.launch.requirements import Requirements, read_requirements
from nemo_gym.paths import PARENT_DIR


def server_folder(root: Path, **files: str) -> Path:
    folder = root / "resources_servers" / "mine"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def read(root: Path, text: str) -> list[str]:
    folder = server_folder(root, requirements__txt=text)
    return [line.text for line in read_requirements(folder).lines]


@pytest.mark.parametrize(
    "line",
    [
        "-e nemo-gym[dev] @ ../../",
        "nemo-gym[dev]",
        "nemo_gym",
        "NeMo.Gym>=0.3,<1",
        "nemo-gym @ file:../..",
        "nemo_gym[dev] @ file:///somewhere/else",
        "nemo-gym @ git+https://git.example.org/any/fork.git@main",
        "git+https://git.example.org/NVIDIA-NeMo/Gym.git",
        "git+https://git.example.org/people/fork.git#egg=nemo_gym",
        "../..",
        "-e ../../",
        "--editable=../..",
        f"-e {PARENT_DIR}[dev]",
        f"{PARENT_DIR}",
        "./wheels/nemo_gym-0.3.0-py3-none-any.whl",
        "nemo-gym ; python_version > '3.8'  # ours",
    ],
)
def test_a_line_that_means_nemo_gym_is_dropped(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, f"{line}\nnumpy>=1\n") == ["numpy>=1"]


def test_a_folder_whose_project_is_nemo_gym_is_nemo_gym_wherever_it_lies(tmp_path: Path) -> None:
    checkout = tmp_path / "a_checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text('[project]\nname = "nemo_gym"\n')
    assert read(tmp_path, "-e ../../a_checkout[dev]\n") == []


@pytest.mark.parametrize(
    "line", ["nemo", "gym", "nemo-gym-extras==1", "gymnasium[all]", "nemo_toolkit @ https://x.org/y.whl"]
)
def test_packages_with_similar_names_stay(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line) == [line]


def test_a_parent_folder_that_is_another_project_is_a_requirement(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "my-environments"\n')
    assert read(tmp_path, "-e ../..\n") == [f"-e {tmp_path}"]


def test_local_paths_become_absolute_and_keep_extras_and_markers(tmp_path: Path) -> None:
    lines = read(tmp_path, "./pkg[fast]\n-e ./other\ntiny @ file:./tiny ; python_version > '3.8'\n")
    folder = tmp_path / "resources_servers" / "mine"
    assert lines == [
        f"{folder}/pkg[fast]",
        f"-e {folder}/other",
        f"tiny @ {(folder / 'tiny').as_uri()} ; python_version > '3.8'",
    ]


def test_included_files_are_read_in_place_and_once(tmp_path: Path) -> None:
    folder = server_folder(
        tmp_path,
        requirements__txt="-r common.txt\nhttpx\n",
        common__txt="-r requirements.txt\nnemo-gym\nnumpy  # comment\n\n# only a comment\norjson \\\n  >=3\n",
    )
    assert [line.text.split() for line in read_requirements(folder).lines] == [["numpy"], ["orjson", ">=3"], ["httpx"]]


def test_options_and_constraints_are_passed_on(tmp_path: Path) -> None:
    folder = tmp_path / "resources_servers" / "mine"
    lines = read(tmp_path, "--no-index\n-f ./wheels\n--extra-index-url https://x.org/s\n-c limits.txt\n")
    assert lines == [
        "--no-index",
        f"--find-links {folder}/wheels",
        "--extra-index-url https://x.org/s",
        f"-c {folder}/limits.txt",
    ]


def test_a_missing_included_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFolderError, match=r"gone\.txt.*included by .*requirements\.txt"):
        read(tmp_path, "-r gone.txt\n")


def test_one_of_the_two_files_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Missing pyproject\.toml or requirements\.txt"):
        read_requirements(tmp_path)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(RuntimeError, match=r"Found both pyproject\.toml and requirements\.txt"):
        read_requirements(tmp_path)


def project(root: Path, text: str) -> Requirements:
    return read_requirements(server_folder(root, pyproject__toml=text))


def test_the_dependencies_of_a_project_are_its_requirements(tmp_path: Path) -> None:
    found = project(
        tmp_path,
        '[project]\nname = "x"\nrequires-python = ">=3.11"\ndependencies = ["nemo-gym[dev]", "numpy>=1", "a[b]"]\n'
        "[tool.uv.sources]\nnemo-gym = { path = '../..', editable = true }\n"
        "a = { git = 'https://x.org/a.git', tag = 'v1' }\n",
    )
    assert [line.text for line in found.lines] == ["numpy>=1", "a[b] @ git+https://x.org/a.git@v1"]
    assert found.requires_python == ">=3.11"
    assert found.project is None


def test_a_project_that_can_be_built_is_installable_itself(tmp_path: Path) -> None:
    found = project(tmp_path, '[build-system]\nrequires = []\n[project]\nname = "x"\n[tool.uv.sources]\n')
    assert found.project == found.file.parent


def test_dependencies_that_only_the_build_knows_are_left_to_the_installer(tmp_path: Path) -> None:
    found = project(tmp_path, '[build-system]\nrequires = []\n[project]\nname = "x"\ndynamic = ["dependencies"]\n')
    assert [line.text for line in found.lines] == [f"-e {found.file.parent}"]


def test_a_source_can_be_a_path_or_a_url(tmp_path: Path) -> None:
    found = project(
        tmp_path,
        '[project]\nname = "x"\ndependencies = ["a", "b>1"]\n'
        "[tool.uv.sources]\na = { path = 'local' }\nb = { url = 'https://x.org/b.whl' }\n",
    )
    assert [line.text for line in found.lines] == [
        f"a @ {(found.file.parent / 'local').as_uri()}",
        "b @ https://x.org/b.whl",
    ]


def test_a_project_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*pyproject\.toml"):
        project(tmp_path, "[project\n")
