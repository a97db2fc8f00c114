from pathlib import Path

import pytest

from nemo_gym.launch.process import missing_import_remedy, with_output

REQUIREMENTS = Path("/servers/mine/requirements.txt")


@pytest.mark.parametrize(
    ("module", "package"), [("yaml", "PyYAML"), ("sklearn.svm", "scikit-learn"), ("some_tool.part", "some-tool")]
)
def test_a_missing_module_is_translated_into_the_line_to_add(module: str, package: str) -> None:
    lines = ["Traceback", f"ModuleNotFoundError: No module named '{module}'"]
    remedy = missing_import_remedy(lines, REQUIREMENTS)
    assert remedy is not None
    assert f"add the line `{package}` in {REQUIREMENTS}" in remedy
    assert repr(module) in remedy


def test_a_project_gets_a_dependency_instead_of_a_line() -> None:
    remedy = missing_import_remedy(["ModuleNotFoundError: No module named 'x'"], Path("/servers/mine/pyproject.toml"))
    assert remedy is not None
    assert 'add "x" to `dependencies` in /servers/mine/pyproject.toml' in remedy


@pytest.mark.parametrize(
    "line", ["ImportError: cannot import name 'x'", "ModuleNotFoundError: No module named 'nemo_gym.nowhere'", ""]
)
def test_nothing_is_suggested_where_no_package_would_help(line: str) -> None:
    assert missing_import_remedy([line], REQUIREMENTS) is None


def test_a_report_shows_logs_and_lines_or_says_that_there_are_none() -> None:
    assert with_output("It ended.", ["one", "two"], [Path("/logs/a.log")], "Do this.").splitlines() == [
        "It ended.",
        "  log: /logs/a.log",
        "  last lines:",
        "  | one",
        "  | two",
        "Do this.",
    ]
    assert with_output("It ended.", [], []).endswith("It has printed nothing.")
