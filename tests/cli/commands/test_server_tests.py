"""`ng_test`, `ng_test_all` and `ng_pip_list` on small servers written for the purpose."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.launch.server_tests import example_problems

pip_list = command_named("pip_list")
ng_test = command_named("test")
ng_test_all = command_named("test_all")


PASSES = "from resources_servers.{name}.app import ANSWER\ndef test_it() -> None:\n    assert ANSWER == 42\n"
FAILS = "def test_it() -> None:\n    assert False\n"
Write = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("bare_pytest")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a server with a test; with complete example data if asked to."""

    def server(name: str, tests: str = PASSES, *, requirements: str = "", with_data: bool = False) -> Path:
        folder = tmp_path / "resources_servers" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "data").mkdir()
        (folder / "app.py").write_text("ANSWER = 42\n")
        (folder / "README.md").write_text("")
        (folder / "requirements.txt").write_text(requirements)
        (folder / "tests" / "test_app.py").write_text(tests.format(name=name))
        if with_data:
            (folder / "data/example.jsonl").write_text("{}\n" * 5)
            (folder / "data/example_metrics.json").write_text('{"Number of examples": 5}')
            (folder / "data/example_rollouts.jsonl").write_text("{}\n" * 5)
        return folder

    return server


def test_the_tests_of_a_server_run_in_its_folder(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("mine", with_data=True)
    ng_test.run(["+entrypoint=resources_servers/mine", "+should_validate_data=true"])
    printed = capfd.readouterr().out
    assert "1 passed" in printed
    assert "The example data of resources_servers/mine is complete." in printed


def test_the_exit_code_is_that_of_pytest(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("mine", FAILS)
    with pytest.raises(SystemExit) as ended:
        ng_test.run(["+entrypoint=resources_servers/mine"])
    assert ended.value.code == 1
    assert "To look into it" in capfd.readouterr().out


def test_incomplete_data_is_told_with_the_commands_that_make_it(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    write("mine")
    with pytest.raises(SystemExit) as ended:
        ng_test.run(["+entrypoint=resources_servers/mine", "+should_validate_data=true"])
    assert ended.value.code == 2
    errors = capfd.readouterr().err
    assert "example.jsonl is missing" in errors
    assert "ng_prepare_data +mode=example_validation" in errors
    assert "ng_e2e_collect_rollouts +split=example" in errors


@pytest.mark.parametrize("entrypoint", ["mine", "resources_servers/a/b", "somewhere/mine", "resources_servers/gone"])
def test_what_is_no_server_is_refused(entrypoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ng_test.run([f"+entrypoint={entrypoint}"])
    assert ended.value.code == 2
    assert entrypoint.rpartition("/")[2] in capsys.readouterr().err


def test_every_server_is_tested_and_counted(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("good", with_data=True)
    write("bad", FAILS, with_data=True)
    write("empty", "", with_data=True)
    (write("undocumented") / "README.md").unlink()
    with pytest.raises(SystemExit) as ended:
        ng_test_all.run([])
    assert ended.value.code == 1
    printed = capfd.readouterr().out
    assert "passed: 1 of 3 (33 %)" in printed
    assert "failed: 1 of 3 (33 %) resources_servers/bad" in printed
    assert "missing: 1 of 3 (33 %) resources_servers/empty" in printed
    assert "Again: ng_test +entrypoint=resources_servers/bad" in printed
    assert "undocumented" not in printed


def test_shards_divide_the_servers_and_missing_data_fails(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("a", with_data=True)
    write("b")
    ng_test_all.run(["+num_shards=2", "+shard_index=0"])
    assert "passed: 1 of 1" in capfd.readouterr().out
    with pytest.raises(SystemExit) as ended:
        ng_test_all.run(["+num_shards=2", "+shard_index=1"])
    assert ended.value.code == 1
    assert "The example data of resources_servers/b is not complete" in capfd.readouterr().out


def test_a_server_without_a_readme_can_be_an_error(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    (write("mine") / "README.md").unlink()
    with pytest.raises(SystemExit) as ended:
        ng_test_all.run(["+fail_on_total_and_test_mismatch=true"])
    assert ended.value.code == 2
    assert "resources_servers/mine" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        ng_test_all.run(["+shard_index=1"])
    assert ended.value.code == 2


def test_the_packages_of_a_server_are_listed(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("mine")
    pip_list.run(["+entrypoint=resources_servers/mine", "+format=json"])
    names = {package["name"] for package in json.loads(capfd.readouterr().out)}
    assert {"pydantic", "pytest"} <= names


def test_an_environment_that_does_not_exist_yet_is_told(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write("mine", requirements="surely-not-installed\n")
    with pytest.raises(SystemExit) as ended:
        pip_list.run(["+entrypoint=resources_servers/mine", f"+cache_dir={tmp_path}/cache"])
    assert ended.value.code == 1
    assert "`ng_test +entrypoint=resources_servers/mine` makes it" in capfd.readouterr().err


def test_an_environment_of_its_own_is_used(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # uv would look at the interpreter more closely
    folder = write("mine", requirements="surely-not-installed\n")
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho own environment: $*\n")
    python.chmod(0o755)
    pip_list.run(["+entrypoint=resources_servers/mine"])
    printed = capfd.readouterr().out
    assert f"Packages of resources_servers/mine ({python})" in printed


def test_example_data_is_checked_file_by_file(write: Write) -> None:
    folder = write("mine", with_data=True)
    assert example_problems(folder) == []
    data = folder / "data"
    (data / "example.jsonl").write_text("{}\n" * 4)
    (data / "example_metrics.json").write_text('{"Number of examples": 4}')
    (data / "example_metrics_conflict.json").write_text("{}")
    (data / "example_rollouts.jsonl").write_text("{}\n" * 6)
    problems = example_problems(folder)
    for problem, expected in zip(
        problems,
        ["example.jsonl has 4 lines", "counts 4 examples", "example_metrics_conflict.json", "has 6 lines instead of 5"],
        strict=True,
    ):
        assert expected in problem
    (data / "example_metrics.json").write_text("no json")
    assert any("counts None examples" in problem for problem in example_problems(folder))


WARNS = "import warnings\ndef test_it() -> None:\n    warnings.warn('old', DeprecationWarning)\n"


def test_the_strictness_of_a_checkout_about_warnings_is_for_its_own_tests(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    folder = write("mine", WARNS)

    ng_test.run(["+entrypoint=resources_servers/mine"])
    assert "1 passed, 1 warning" in capfd.readouterr().out

    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    with pytest.raises(SystemExit):
        ng_test.run(["+entrypoint=resources_servers/mine"])
    assert "-m pytest -W default`" in capfd.readouterr().out
