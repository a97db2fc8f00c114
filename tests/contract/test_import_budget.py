"""Importing a public module must stay light: heavy libraries are loaded where they are used."""

import subprocess
import sys

import pytest

from nemo_gym.paths import ROOT_DIR

HEAVY = {"mcp", "ray", "wandb", "mlflow", "torch", "pandas", "openai", "anthropic"}
PUBLIC = sorted(
    [f"nemo_gym.{path.stem}" for path in ROOT_DIR.glob("*.py") if path.stem != "__init__"]
    + ["nemo_gym", "nemo_gym.cli"]
)


@pytest.mark.parametrize("module", PUBLIC)
def test_importing_a_public_module_loads_nothing_heavy(module: str) -> None:
    probe = f"import sys, {module}; print(*sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
