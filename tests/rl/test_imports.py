import subprocess
import sys

import pytest

from nemo_gym import rl

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["interfaces", "rollout_manager", "environment", "groups"])
def test_modules_load_nothing_heavy_and_need_no_torch(module: str) -> None:
    heavy = {"torch", "ray", "wandb", "pandas", "fastapi"}
    printed = run(f"import sys, nemo_gym.rl.{module}; print(*sorted({heavy} & set(sys.modules)))")
    assert printed.split() == []
    run(f"{WITHOUT_TORCH}\nimport nemo_gym.rl.{module}")


def test_the_servers_path_works_on_lists_where_torch_is_missing() -> None:
    printed = run(
        f"""{WITHOUT_TORCH}
from nemo_gym.rl.interfaces import logprob_tensor, token_tensor
print(token_tensor((1, 2)), logprob_tensor([]))
"""
    )
    assert printed == "[1, 2] []\n"


def test_the_native_path_says_what_to_install_where_torch_is_missing() -> None:
    printed = run(
        f"""{WITHOUT_TORCH}
from nemo_gym.rl.interfaces import TorchMissingError, require_torch
try:
    require_torch("the native rollout path")
except TorchMissingError as error:
    print(error)
"""
    )
    assert "the native rollout path needs torch" in printed
    assert "[rl]'" in printed


def test_metrics_get_plain_stand_ins_where_wandb_is_missing() -> None:
    printed = run(
        """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "wandb" else find_spec(name, package)
from nemo_gym.rl.rewards import histogram, table
print(histogram([1.0, float("nan")]).values, table([["x"]], ["c"]).columns)
"""
    )
    assert printed == "[1.0] ['c']\n"


def test_the_package_offers_what_it_lists() -> None:
    assert [name for name in rl.__all__ if not hasattr(rl, name)] == []
    assert not hasattr(rl, "no_such_name")


def test_no_module_hides_the_name_that_is_imported_from_the_package() -> None:
    """Once a module is loaded, it is what the package has under its name."""
    assert set(rl._EXPORTS) & set(rl._EXPORTS.values()) == set()
    assert run("from nemo_gym.rl import group_advantages, prompt_groups; print(callable(prompt_groups))") == "True\n"
