"""`ng_dev_test`: the tests of nemo-gym itself."""

import subprocess
import sys

from nemo_gym.cli.command import command
from nemo_gym.errors import ConfigError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.schemas.cli_config import DevTestConfig


@command(DevTestConfig, reads_config=False)
def main(config: DevTestConfig) -> int:
    """Run every test of a checkout with pytest, measuring coverage; the exit code is that of pytest.

    Examples:
        ng_dev_test
    """
    if not (PARENT_DIR / "tests").is_dir() or not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation without tests: run this in a checkout")
    sys.stdout.flush()
    tests = [sys.executable, "-m", "pytest", "--cov=.", "--durations=10"]
    return subprocess.run(tests, cwd=PARENT_DIR, check=False).returncode
