"""The built wheel, and a copy of a checkout, each installed into an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from itertools import takewhile
from pathlib import Path
from threading import Timer

import pytest

from nemo_gym.paths import PARENT_DIR

CONFIGS = (
    "+config_paths=[resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,"
    "responses_api_models/scripted_model/configs/scripted_model.yaml]"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    # No build isolation: hatchling is one of the development tools, so nothing is fetched.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=PARENT_DIR,
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = target.glob("*.whl")
    return built


def install(what: Path, root: Path) -> Path:
    """Folder of the commands of a new environment below `root`: it has `what`, and the dependencies of this one."""
    venv.create(root, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", str(what)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return root / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment that has the wheel."""
    return install(wheel, tmp_path_factory.mktemp("environment"))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "PYTHON"))}


def run(command: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    return subprocess.run([command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_configs_and_data_of_the_components_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    assert "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml" in names
    assert "resources_servers/example_single_tool_call/data/example.jsonl" in names
    for provider in ("apptainer", "docker", "local"):
        assert f"nemo_gym/sandbox/providers/{provider}/configs/{provider}.yaml" in names
    assert {"nemo_gym/py.typed", "nemo_gym/view/pages/index.html", "nemo_gym/view/pages/app.js"} <= names
    for namespace in ("resources_servers", "responses_api_agents", "responses_api_models", "benchmarks"):
        assert f"{namespace}/__init__.py" not in names


def test_the_wheel_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    version = run(installed / "ng_version", "+json=true", cwd=tmp_path)
    assert version.returncode == 0, version.stderr
    assert Path(json.loads(version.stdout)["installation_path"]).is_relative_to(installed.parent)

    listed = run(installed / "ng_help", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "ng_validate" in listed.stdout

    valid = run(installed / "ng_validate", CONFIGS, cwd=tmp_path)
    assert valid.returncode == 0, valid.stderr
    assert "Config is valid." in valid.stdout
    assert list(tmp_path.iterdir()) == []


def test_both_spellings_of_every_command_are_installed(installed: Path) -> None:
    commands = {path.name for path in installed.glob("ng_*")}

    assert commands
    assert {path.name.removeprefix("nemo_gym_") for path in installed.glob("nemo_gym_*")} == {
        name.removeprefix("ng_") for name in commands
    }


def test_a_mistake_is_one_message_without_a_traceback(installed: Path, tmp_path: Path) -> None:
    missing = run(installed / "ng_validate", "+config_paths=[nowhere.yaml]", cwd=tmp_path)

    assert missing.returncode == 2
    assert "nowhere.yaml" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_what_people_make_with_the_wheel_goes_below_their_folder(installed: Path, tmp_path: Path) -> None:
    made = run(installed / "ng_init_resources_server", "+entrypoint=resources_servers/mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "resources_servers/mine/tests/test_app.py").is_file()

    listed = run(installed / "ng_list_benchmarks", "+json=true", cwd=tmp_path)
    assert {benchmark["name"] for benchmark in json.loads(listed.stdout)} >= {"gsm8k", "reasoning_gym_mini"}

    source = tmp_path / "gsm8k.jsonl"
    source.write_text('{"question": "1+1?", "answer": "1+1=2\\n#### 2"}\n')
    config = "+config_paths=[benchmarks/gsm8k/config.yaml]"
    prepared = run(installed / "ng_prepare_benchmark", config, f"+source={source}", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    assert (tmp_path / "benchmarks/gsm8k/data/gsm8k_benchmark.jsonl").is_file()


def test_servers_of_the_checkout_that_was_installed_as_a_copy_are_ours(tmp_path: Path) -> None:
    checkout, unwanted = tmp_path / "a checkout", shutil.ignore_patterns("__pycache__", "cache", "results")
    for name in ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models", "benchmarks"):
        shutil.copytree(PARENT_DIR / name, checkout / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PARENT_DIR / name, checkout / name)
    commands = install(checkout, tmp_path / "environment")
    with (checkout / "resources_servers/example_single_tool_call/app.py").open("a") as file:
        file.write('\nprint("edited in the checkout")\n')

    servers = subprocess.Popen(
        [commands / "ng_run", CONFIGS, "+head_server={port: 0}"],
        cwd=checkout,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = Timer(120, servers.kill)
    deadline.start()
    try:
        assert servers.stdout is not None
        said = list(takewhile(lambda line: "servers ready" not in line, servers.stdout))
    finally:
        servers.terminate()
        servers.communicate()
        deadline.cancel()

    places = {line.split()[0]: line.split()[4] for line in said if "http://" in line and not line.startswith("head")}
    assert set(places.values()) == {"hosted"}, said
    assert len(places) == 3
    assert any("edited in the checkout" in line for line in said), said
