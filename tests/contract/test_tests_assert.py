"""Every test can find fault: it asserts something, expects an error, or uses a function of the tests that does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "resources_servers", "responses_api_agents", "responses_api_models", "benchmarks")
EXPECTING = frozenset({"raises", "warns", "fail", "check_call", "check_output", "AssertionError", "timeout", "expect"})
"""Names of what fails where something is not as it should be; also whatever begins with `assert`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""The dotted name of a module, and the name of a function in it."""


def can_fail(node: ast.AST) -> bool:
    """Whether a piece of code itself can find fault with something."""
    for part in ast.walk(node):
        name = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
        is_checked = isinstance(part, ast.keyword) and part.arg == "check"  # of `subprocess.run`
        if isinstance(part, ast.Assert) or name in EXPECTING or name.startswith("assert") or is_checked:
            return True
    return False


def functions_in(module: str, text: str) -> dict[Key, tuple[Function, set[Key]]]:
    """The functions of a module, and those, there or in others, that each of them names."""
    tree = ast.parse(text)
    made = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    meant = {name: (module, name) for name in made}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            meant |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    return {(module, name): (node, {meant[used] for used in named(node) & meant.keys()}) for name, node in made.items()}


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def unable_to_fail(modules: dict[str, str]) -> list[Key]:
    """The tests of these modules that find fault with nothing, and use no function in them that does."""
    functions = {key: found for name, text in modules.items() for key, found in functions_in(name, text).items()}
    failing = {key for key, (node, _) in functions.items() if can_fail(node)}
    while more := {key for key, (_, used) in functions.items() if key not in failing and used & failing}:
        failing |= more
    return sorted(key for key in functions.keys() - failing if key[1].startswith("test_"))


def test_every_test_can_fail() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "tests" in path.parts]
    modules = {str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path.read_text() for path in files}
    assert len(modules) > 400
    assert unable_to_fail(modules) == []


@pytest.mark.parametrize(
    ("text", "unable"),
    [
        ("def test_a(): f()", ["test_a"]),
        ("def test_a(): assert f()", []),
        ("def test_a():\n  with pytest.raises(ValueError): f()", []),
        ("def check(): look()\ndef look(): assert 1\ndef test_a(): check()", []),
        ("from tests.other import check as held\ndef test_a(): held(1)", []),
        ("from tests.other import idle\nasync def test_a(check): await idle(check)", ["test_a"]),
    ],
)
def test_only_tests_that_find_fault_with_something_pass_the_scan(text: str, unable: list[str]) -> None:
    other = "def check(value): assert value\ndef idle(): pass"
    assert unable_to_fail({"tests.test_it": text, "tests.other": other}) == [("tests.test_it", name) for name in unable]
