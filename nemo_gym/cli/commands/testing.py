"""Servers put to the test (`ng_test`, `ng_test_all`), and the packages that they run with (`ng_pip_list`)."""

import subprocess
import sys

from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.launch.server_tests import (
    WARNINGS_PASS,
    ModulePythons,
    ServerModule,
    find_modules,
    print_report,
    run_all,
    run_tests,
)
from nemo_gym.schemas.cli_config import AllServerTestsConfig, PipListConfig, ServerTestsConfig


def test(config: ServerTestsConfig) -> int:
    """`ng_test`."""
    module = ServerModule.find(config.entrypoint)
    python = ModulePythons.of(get_global_config_dict(), "ng_test").get(module)
    outcome = run_tests(module, python)
    if outcome.exit_code:
        print(
            f"To look into it: cd {module.folder} and run `{python} -m pytest {' '.join(WARNINGS_PASS)}`; "
            "`-x --pdb` stops at the first failure."
        )
        return outcome.exit_code
    problems = module.data_problems() if config.should_validate_data else []
    if problems:
        raise ConfigError("\n- ".join([f"the example data of {config.entrypoint} is not complete:", *problems]))
    if config.should_validate_data:
        print(f"The example data of {config.entrypoint} is complete.")
    return 0


def test_all(config: AllServerTestsConfig) -> int:
    """`ng_test_all`."""
    modules = find_modules()
    if config.fail_on_total_and_test_mismatch and modules.without_readme:
        raise ConfigError(f"these servers have no README.md, so they are not tested: {modules.without_readme}")
    if config.shard_index >= config.num_shards:
        raise ConfigError(f"+shard_index={config.shard_index}: there are {config.num_shards} shards, counted from 0")
    chosen = modules.tested[config.shard_index :: config.num_shards]
    pythons = ModulePythons.of(get_global_config_dict(), "ng_test_all")
    report = run_all(chosen, pythons, delete_environments=config.delete_venvs_after_each_test)
    print_report(report)
    return 0 if report.is_good else 1


def pip_list(config: PipListConfig) -> int:
    """`ng_pip_list`."""
    module = ServerModule.find(config.entrypoint)
    pythons = ModulePythons.of(get_global_config_dict(), "ng_pip_list")
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
