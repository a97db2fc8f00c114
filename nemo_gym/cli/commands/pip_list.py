"""`ng_pip_list`: which packages a server runs with."""

import subprocess
import sys

from nemo_gym.cli.command import command, whole_config
from nemo_gym.schemas.cli_config import PipListConfig


@command(PipListConfig, needs_model=False, offline=True)
def main(config: PipListConfig) -> int:
    """List the packages of the environment that a server runs in.

    Examples:
        ng_pip_list +entrypoint=resources_servers/my_env
        ng_pip_list +entrypoint=resources_servers/my_env +format=json +outdated=true
    """
    from nemo_gym.launch.server_tests import ModulePythons, ServerModule

    module = ServerModule.find(config.entrypoint)
    pythons = ModulePythons.of(whole_config(), "ng_pip_list")
    python = pythons.present(module)
    if python is None:
        print(
            f"{config.entrypoint} needs an environment of its own, which does not exist yet. "
            f"`ng_test +entrypoint={config.entrypoint}` makes it.",
            file=sys.stderr,
        )
        return 1
    if config.format is None:
        print(f"Packages of {config.entrypoint} ({python}):", flush=True)
    uv = pythons.workshop.installer.uv
    program = [uv, "pip", "list", "--python", str(python)] if uv else [str(python), "-m", "pip", "list"]
    options = [*(["--format", config.format] if config.format else []), *(["--outdated"] if config.outdated else [])]
    quiet = [] if uv else ["--disable-pip-version-check"]
    return subprocess.run([*program, *quiet, *options], check=False).returncode
