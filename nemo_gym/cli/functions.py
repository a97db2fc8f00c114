"""The commands as functions of `nemo_gym.cli`: each does on this process's arguments what its script does.

An exit code other than 0 is raised as SystemExit. The same functions that live in other public modules
(`nemo_gym.benchmarks.prepare_benchmark`, ...) begin here, too.
"""

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command_named
from nemo_gym.cli.registry import loaded
from nemo_gym.errors import ConfigError
from nemo_gym.paths import PARENT_DIR

if TYPE_CHECKING:
    from nemo_gym.global_config import GlobalConfigDictParserConfig


collect_rollouts = command_named("collect_rollouts")
aggregate_rollouts = command_named("aggregate_rollouts")
"""Called with a config, these two do just the work."""


def run_command(name: str) -> None:
    """Do on this process's arguments what `ng_<name>` does."""
    command_named(name)()


def run(global_config_dict_parser_config: "GlobalConfigDictParserConfig | None" = None) -> None:
    """Start the configured servers and keep them running; with a config of its own, nothing is read from argv."""
    if global_config_dict_parser_config is None:
        run_command("run")
    else:
        loaded("nemo_gym.cli.commands.servers:serve")(global_config_dict_parser_config)


def e2e_rollout_collection() -> None:
    """`ng_e2e_collect_rollouts`."""
    run_command("e2e_collect_rollouts")


def test() -> None:
    """`ng_test`."""
    run_command("test")


def test_all() -> None:
    """`ng_test_all`."""
    run_command("test_all")


def dev_test() -> None:
    """`ng_dev_test`."""
    run_command("dev_test")


def init_resources_server() -> None:
    """`ng_init_resources_server`."""
    run_command("init_resources_server")


def dump_config() -> None:
    """`ng_dump_config`."""
    run_command("dump_config")


def display_help() -> None:
    """`ng_help`."""
    run_command("help")


def status() -> None:
    """`ng_status`."""
    run_command("status")


def pip_list() -> None:
    """`ng_pip_list`."""
    run_command("pip_list")


def version() -> None:
    """`ng_version`."""
    run_command("version")


def reinstall() -> None:
    """Install this checkout again, with its development tools, into the running environment."""
    if not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation, not a checkout: install nemo-gym as you did before")
    uv = shutil.which("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    done = subprocess.run([*installer, "-e", f"{PARENT_DIR}[dev]"], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
