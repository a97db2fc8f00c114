import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from nemo_gym.errors import EnvironmentBuildError
from nemo_gym.launch import venvs as environment
from nemo_gym.launch.requirements import Requirements, is_running_python, read_requirements
from nemo_gym.launch.venvs import (
    COMPLETE_MARK,
    Installer,
    Workshop,
    environment_key,
    own_dependencies,
    prepare_environment,
)
from nemo_gym.paths import PARENT_DIR

BACKEND = """
import zipfile
from pathlib import Path

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = Path("name.txt").read_text()
    wheel = f"{name}-99.0-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w") as archive:
        archive.writestr(f"{name}.py", "__version__ = '99.0'")
        info = f"{name}-99.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 99.0\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel
"""
FAKE_UV = """#!{python}
import os, subprocess, sys
with open(os.environ["FAKE_UV_LOG"], "a") as log:
    print(*sys.argv[1:], os.environ.get("UV_CACHE_DIR"), file=log)
if sys.argv[1] == "venv":
    subprocess.run([{python!r}, "-m", "venv", "--without-pip", sys.argv[-1]], check=True)
"""


def write_package(folder: Path, name: str) -> None:
    """A package that pip can build without any network."""
    folder.mkdir()
    (folder / "name.txt").write_text(name)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )


def requirements_of(folder: Path, text: str) -> Requirements:
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text(text)
    return read_requirements(folder)


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(folder=tmp_path / "venvs", installer=Installer(uv=None), timeout_s=120.0)


def ask(python: Path, question: str) -> str:
    return subprocess.run(
        [str(python), "-c", f"print({question})"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A stand-in for uv that makes environments, installs nothing and notes how it was called."""
    log = tmp_path / "uv.log"
    monkeypatch.setenv("FAKE_UV_LOG", str(log))
    return program(tmp_path / "uv", FAKE_UV.format(python=sys.executable)), log


def test_an_environment_has_what_the_server_asked_for_first_and_everything_of_ours_after_it(
    tmp_path: Path, workshop: Workshop
) -> None:
    write_package(tmp_path / "tiny", "tiny_library")
    write_package(tmp_path / "newer_tqdm", "tqdm")
    requirements = requirements_of(tmp_path / "server", "../tiny\ntqdm @ ../newer_tqdm\nnemo-gym[dev]\npydantic>=2\n")

    python = prepare_environment(requirements, ["mine"], workshop)

    assert ask(python, "__import__('tiny_library').__version__") == "99.0"
    assert ask(python, "__import__('tqdm').__version__") == "99.0"
    assert ask(python, "__import__('pydantic').VERSION") == version("pydantic")
    assert Path(ask(python, "__import__('sys').prefix")) == python.parent.parent
    assert version("tqdm") != "99.0"


def test_a_complete_environment_is_used_again_and_an_incomplete_one_is_not(
    tmp_path: Path, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    requirements = requirements_of(tmp_path / "server", "numpy\n")
    python = prepare_environment(requirements, ["mine"], workshop)
    assert prepare_environment(requirements, ["other"], workshop) == python
    assert caplog.text.count("installing the requirements of") == 1

    built_in = python.parent.parent
    (built_in / COMPLETE_MARK).unlink()
    (built_in / "leftover").touch()
    assert prepare_environment(requirements, ["mine"], workshop) == python
    assert not (built_in / "leftover").exists()
    assert (built_in / COMPLETE_MARK).exists()


def test_servers_with_equal_requirements_build_once(
    tmp_path: Path, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = requirements_of(tmp_path / "one", "numpy\n# a comment\n")
    two = requirements_of(tmp_path / "two", "nemo-gym\nnumpy\n")
    with ThreadPoolExecutor() as pool:
        pythons = set(pool.map(lambda it: prepare_environment(it, [it.file.parent.name], workshop), [one, two]))
    assert len(pythons) == 1
    assert caplog.text.count("installing the requirements of") == 1


def test_requirements_that_cannot_be_installed_name_the_server_the_file_and_what_pip_said(
    tmp_path: Path, workshop: Workshop
) -> None:
    requirements = requirements_of(tmp_path / "server", "--no-index\nsurely-not-there==9\n")
    with pytest.raises(EnvironmentBuildError) as caught:
        prepare_environment(requirements, ["mine", "yours"], workshop)
    message = str(caught.value)
    assert "'mine', 'yours'" in message
    assert str(requirements.file) in message
    assert "No matching distribution found for surely-not-there==9" in message
    assert not (workshop.folder / environment_key(requirements, workshop)).exists()


def test_a_version_that_nemo_gym_does_not_work_with_is_refused(tmp_path: Path, workshop: Workshop) -> None:
    requirements = requirements_of(tmp_path / "server", "--no-index\npydantic==1.10.0\n")
    with pytest.raises(EnvironmentBuildError, match="pydantic"):
        prepare_environment(requirements, ["mine"], workshop)


@pytest.mark.parametrize("ending", ["stopped", "too slow"])
def test_an_installer_that_does_not_end_is_ended(tmp_path: Path, workshop: Workshop, ending: str) -> None:
    slow = program(tmp_path / "uv", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    stop = threading.Event()
    settings = replace(workshop, installer=Installer(uv=slow), should_stop=stop.is_set)
    if ending == "stopped":
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(KeyboardInterrupt):
            prepare_environment(requirements_of(tmp_path / "server", "numpy\n"), ["mine"], settings)
    else:
        with pytest.raises(EnvironmentBuildError, match=r"did not finish within 0\.5 s"):
            prepare_environment(
                requirements_of(tmp_path / "server", "numpy\n"), ["mine"], replace(settings, timeout_s=0.5)
            )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_waiting_for_another_process_that_builds_is_bounded_and_can_be_stopped(
    tmp_path: Path, workshop: Workshop, fake_uv: tuple[str, Path]
) -> None:
    slow = program(tmp_path / "slow_uv", f"#!/bin/sh\ntouch {tmp_path}/busy\nexec sleep 60\n")
    requirements = requirements_of(tmp_path / "server", "numpy\n")
    stop = threading.Event()
    builder = threading.Thread(
        target=lambda: _expect_interrupt(
            lambda: prepare_environment(
                requirements, ["first"], replace(workshop, installer=Installer(uv=slow), should_stop=stop.is_set)
            )
        )
    )
    builder.start()
    deadline = time.monotonic() + 20
    while not (tmp_path / "busy").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(EnvironmentBuildError, match="stays locked"):
        prepare_environment(requirements, ["second"], replace(workshop, timeout_s=0.3))
    with pytest.raises(KeyboardInterrupt):
        prepare_environment(requirements, ["third"], replace(workshop, should_stop=lambda: True))
    stop.set()
    builder.join(20)
    assert not builder.is_alive()
    assert prepare_environment(requirements, ["fourth"], replace(workshop, installer=Installer(uv=fake_uv[0]))).exists()


def _expect_interrupt(action: Callable[[], object]) -> None:
    with pytest.raises(KeyboardInterrupt):
        action()


def test_uv_is_told_which_environment_which_limits_and_where_its_cache_is(
    tmp_path: Path, workshop: Workshop, fake_uv: tuple[str, Path]
) -> None:
    uv, log = fake_uv
    settings = replace(
        workshop,
        installer=Installer(uv=uv, verbose=True),
        variables={"UV_CACHE_DIR": "the_cache"},
        pins=(f"pydantic=={version('pydantic')}", "surely-not-installed==1"),
    )
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\n[project]\nname = "x"\ndependencies = ["numpy[fast]>=1"]\n'
    )
    python = prepare_environment(read_requirements(tmp_path / "server"), ["mine"], settings)

    built_in = python.parent.parent
    venv, install, project = log.read_text().splitlines()
    assert venv == f"venv --quiet --python {sys.executable} {built_in} the_cache"
    wanted, limits = built_in / "requirements.txt", built_in / "constraints.txt"
    assert install == f"pip install -v --python {python} -r {wanted} -c {limits} the_cache"
    assert project == f"pip install -v --python {python} --no-deps -e {tmp_path / 'server'} the_cache"
    assert wanted.read_text().splitlines() == ["numpy[fast]>=1", "surely-not-installed==1"]
    assert f"pydantic=={version('pydantic')}" in limits.read_text()
    assert "pydantic>=2.12" in limits.read_text()


def test_a_project_for_another_python_gets_what_it_needs_without_being_installed(
    tmp_path: Path, workshop: Workshop, fake_uv: tuple[str, Path]
) -> None:
    uv, log = fake_uv
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\n[project]\nname = "x"\nrequires-python = ">=3.98"\ndependencies = ["numpy"]\n'
    )

    prepare_environment(read_requirements(tmp_path / "server"), ["mine"], replace(workshop, installer=Installer(uv=uv)))

    assert "-r" in log.read_text()
    assert "-e" not in log.read_text().split()


def test_another_python_gets_the_dependencies_of_nemo_gym_too(
    tmp_path: Path, workshop: Workshop, fake_uv: tuple[str, Path]
) -> None:
    uv, log = fake_uv
    settings = replace(workshop, installer=Installer(uv=uv, python_version="3.99"))
    requirements = requirements_of(tmp_path / "server", "numpy\n")
    python = prepare_environment(requirements, ["mine"], settings)

    assert log.read_text().startswith("venv --quiet --python 3.99 ")
    wanted = (python.parent.parent / "requirements.txt").read_text().splitlines()
    assert wanted == ["numpy", *own_dependencies()]
    assert not list(python.parent.parent.glob("lib/python*/site-packages/*nemo_gym.pth"))
    assert environment_key(requirements, settings) != environment_key(requirements, workshop)


def test_another_python_finds_an_installation_in_site_packages_without_its_neighbours(
    tmp_path: Path, workshop: Workshop, fake_uv: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "own_root_for_path", lambda: None)
    settings = replace(workshop, installer=Installer(uv=fake_uv[0], python_version="3.99"))
    python = prepare_environment(requirements_of(tmp_path / "server", "numpy\n"), ["mine"], settings)

    pth = next(python.parent.parent.glob("lib/python*/site-packages/*nemo_gym.pth"))
    root = Path(pth.read_text().strip())
    assert (root / "nemo_gym").resolve() == PARENT_DIR / "nemo_gym"
    assert {path.name for path in root.iterdir()} <= {
        "nemo_gym",
        "resources_servers",
        "responses_api_agents",
        "responses_api_models",
        "benchmarks",
    }


def test_an_installer_that_cannot_be_run_is_named(tmp_path: Path, workshop: Workshop) -> None:
    settings = replace(workshop, installer=Installer(uv=str(tmp_path / "nothing")))
    with pytest.raises(EnvironmentBuildError, match=r"cannot run .*nothing"):
        prepare_environment(requirements_of(tmp_path / "server", "numpy\n"), ["mine"], settings)


def test_without_uv_another_python_must_be_on_the_path(tmp_path: Path, workshop: Workshop) -> None:
    settings = replace(workshop, installer=Installer(uv=None, python_version="3.99.1"))
    with pytest.raises(EnvironmentBuildError, match=r"python_version is 3\.99\.1.*python3\.99"):
        prepare_environment(requirements_of(tmp_path / "server", "numpy\n"), ["mine"], settings)


def test_the_name_of_an_environment_follows_content_alone(tmp_path: Path, workshop: Workshop) -> None:
    write_package(tmp_path / "tiny", "tiny_library")
    built = requirements_of(tmp_path / "a", "../tiny\n")
    linked = requirements_of(tmp_path / "b", "-e ../tiny\n")
    before = environment_key(built, workshop), environment_key(linked, workshop)
    assert before[0] == environment_key(requirements_of(tmp_path / "c", "# same\n../tiny\n"), workshop)
    assert before[0] != environment_key(built, replace(workshop, pins=("x==1",)))
    (tmp_path / "tiny" / "build").mkdir()
    (tmp_path / "tiny" / "build" / "what_pip_leaves.txt").touch()
    assert environment_key(built, workshop) == before[0]
    (tmp_path / "tiny" / "part").mkdir()
    (tmp_path / "tiny" / "part" / "more.py").touch()
    assert environment_key(built, workshop) != before[0]
    assert environment_key(linked, workshop) == before[1]


def test_a_python_version_names_the_running_python_by_its_leading_parts() -> None:
    major, minor, micro = sys.version_info[:3]
    assert is_running_python(None)
    assert is_running_python(f"{major}.{minor}")
    assert is_running_python(f"{major}.{minor}.{micro}")
    assert not is_running_python(f"{major}.{minor}9")
