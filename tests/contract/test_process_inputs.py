"""Arguments and environment are read where a process begins, and in one place for programs that begin elsewhere."""

import ast
from pathlib import Path

import pytest

import nemo_gym

PACKAGE = Path(nemo_gym.__file__).parent
READERS = {
    "process_inputs.py": "the one place for the library",
    "servers/host.py": "the program of a child process: many servers",
    "workers/worker.py": "the program of a child process: calls functions of authors",
    "servers/run.py": "the program of a child process: one server and its workers",
    "sandbox/confine.py": "the program of a child process: untrusted code",
    "sandbox/reaper.py": "the program of a child process: removes containers that are left",
    "data/declared.py": "the program of a child process: a benchmark's script",
    "launch/inspection_process.py": "the program of a child process: imports servers to look at their types",
    "launch/warden.py": "the program of a child process: stops what its launcher left",
    "trackers/wandb.py": "W&B takes both from the process and offers no other way",
    "trackers/mlflow.py": "MLflow takes its settings from the environment",
    "executors/ray.py": "Ray takes its settings from the environment",
}
LOOKS = {"os.environ", "os.getenv", "os.putenv", "sys.argv", "sys.orig_argv"}


def touches_the_process(text: str) -> bool:
    """Whether a module has to do with the environment or the arguments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {f"{node.value.id}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        if names & LOOKS:
            return True
    return False


def test_only_commands_and_programs_of_child_processes_look_at_the_process() -> None:
    modules = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    looking = [path for path in modules if touches_the_process((PACKAGE / path).read_text())]
    others = [str(path) for path in looking if path.parts[0] != "cli" and str(path) not in READERS]

    assert Path("process_inputs.py") in looking
    assert not others, f"pass the value down as an argument, or add it to nemo_gym.process_inputs: {others}"


@pytest.mark.parametrize(
    ("program", "does"),
    [
        ("import os\nos.environ['A']", True),
        ("import os\nos.getenv('A')", True),
        ("from os import environ", True),
        ("import sys\nprint(sys.argv[1:])", True),
        ("import os\nos.getpid()", False),
        ("'import sys; sys.argv'", False),
    ],
)
def test_every_way_to_look_is_found(program: str, does: bool) -> None:
    assert touches_the_process(program) is does
