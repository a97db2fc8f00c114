import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym import __version__, global_config
from nemo_gym.cli_setup_command import run_command, setup_env_command
from nemo_gym.paths import PARENT_DIR

SED = " > >(sed 's/^/(mine) /') 2> >(sed 's/^/(mine) /' >&2)"


@pytest.fixture(autouse=True)
def _no_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX_STRATEGY", "NEMO_GYM_ALLOW_PRERELEASE"):
        monkeypatch.delenv(name, raising=False)


def command(folder: Path, **settings: Any) -> str:
    config = {"head_server_deps": ["ray==2", "openai==1"], "python_version": "3.12", "uv_venv_dir": str(PARENT_DIR)}
    return setup_env_command(folder, OmegaConf.create(config | settings), "mine")


def folder_with(tmp_path: Path, *files: str, is_checkout: bool = True) -> Path:
    folder = tmp_path / "resources_servers" / "mine"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    if is_checkout:
        (tmp_path / "pyproject.toml").touch()
    return folder


def whole(folder: Path, install: str, venv: Path | None = None) -> str:
    venv = venv or folder / ".venv"
    make = f"uv venv --seed --allow-existing --python 3.12 {venv}{SED}"
    return f"cd {folder} && {make} && source {venv}/bin/activate && {install}{SED}"


def test_requirements_of_a_checkout(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "requirements.txt")

    assert command(folder) == whole(folder, "uv pip install -r requirements.txt ray==2 openai==1")
    python = f"--python {folder}/.venv/bin/python "
    assert command(folder, pip_install_verbose=True, uv_pip_set_python=True) == whole(
        folder, f"uv pip install -v {python}-r requirements.txt ray==2 openai==1"
    )
    elsewhere = tmp_path / "venvs/resources_servers/mine/.venv"
    assert command(folder, uv_venv_dir=str(tmp_path / "venvs")) == whole(
        folder, "uv pip install -r requirements.txt ray==2 openai==1", elsewhere
    )
    (folder / "overrides.txt").touch()
    assert "uv pip install --override overrides.txt -r requirements.txt" in command(folder)


def test_a_project_of_a_checkout(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "pyproject.toml")

    assert command(folder) == whole(folder, "uv pip install '-e .' ray==2 openai==1")


def test_an_installation_takes_nemo_gym_from_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, "requirements.txt", is_checkout=False)
    listed = f"(echo 'nemo-gym=={__version__}' && grep -v -F '../..' requirements.txt)"

    assert command(folder) == whole(folder, f"{listed} | uv pip install -r /dev/stdin ray==2 openai==1")
    monkeypatch.setenv("NEMO_GYM_ALLOW_PRERELEASE", "true")
    monkeypatch.setenv("UV_INDEX_URL", "https://index")
    flags = "--pre --index-strategy unsafe-best-match 'fastapi<1.0' --index-url https://index "
    assert command(folder) == whole(folder, f"{listed} | uv pip install {flags}-r /dev/stdin ray==2 openai==1")
    (folder / "requirements.txt").rename(folder / "pyproject.toml")
    assert f"uv pip install {flags}nemo-gym=={__version__} && uv pip install --no-sources '-e .'" in command(folder)


def test_an_environment_that_is_there_may_be_used_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "requirements.txt")
    for name in ("python", "activate"):
        (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (folder / ".venv/bin" / name).touch()

    assert command(folder, skip_venv_if_present=True) == f"cd {folder} && source {folder}/.venv/bin/activate"


def test_a_folder_must_say_once_what_it_requires(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "requirements.txt", "pyproject.toml")
    with pytest.raises(RuntimeError, match=r"Found both pyproject\.toml and requirements\.txt"):
        command(folder)
    (folder / "requirements.txt").unlink()
    (folder / "pyproject.toml").unlink()
    with pytest.raises(RuntimeError, match=r"Missing pyproject\.toml or requirements\.txt"):
        command(folder)


def test_a_command_runs_in_bash_with_the_folder_on_its_path_and_its_output_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"nemo_gym_log_dir": str(tmp_path / "logs"), "uv_cache_dir": "/cache"}
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create(config))
    monkeypatch.setenv("PYTHONPATH", "/before")

    process = run_command('echo "$PYTHONPATH $UV_CACHE_DIR"; [[ 1 == 1 ]] && exit 3', tmp_path, "a/b")

    assert process.wait(30) == 3
    said = f"{tmp_path}{os.pathsep}/before /cache\n"
    assert capfd.readouterr().out == said
    assert (tmp_path / "logs/a_b.log").read_text() == said
