"""Servers: `ng_run` starts them, `ng_test` and `ng_test_all` test them.

What they run with: `gym env prefetch` builds their environments, `ng_pip_list` lists the packages. What is done to a
whole checkout is here, too: `ng_dev_test` tests it, `reinstall` installs it again.
"""

import shutil
import subprocess
import sys
from contextlib import closing

from nemo_gym.cli.config import whole_config
from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME, STAND_IN
from nemo_gym.launch.plan import PlanSettings, Pythons, environments_folder, plan_servers
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.launch.server_tests import (
    WARNINGS_PASS,
    ModulePythons,
    ServerModule,
    find_modules,
    print_report,
    run_all,
    run_tests,
)
from nemo_gym.launch.warden import Warden
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runtime import stopping_on_signals
from nemo_gym.schemas.cli_config import (
    AllServerTestsConfig,
    DevTestConfig,
    PipListConfig,
    RunConfig,
    ServerTestsConfig,
)


def run(config: RunConfig) -> None:
    """`ng_run`."""
    serve(shows_token=True)


def serve(parser_config: GlobalConfigDictParserConfig | None = None, *, shows_token: bool = False) -> None:
    """Start the servers of `parser_config`, else of this process's config, and keep them running until a signal."""
    helper = RunHelper()
    with stopping_on_signals(helper.request_stop, on_the_spot=True):
        helper.start(parser_config)
        if shows_token and helper.made_token is not None:
            _show_token(helper.made_token)
        helper.run_forever()


def _show_token(token: str) -> None:
    """Print the token of the run to stdout, for whoever started the servers."""
    print(
        f"The token of this run, shown this once: {token}\n"
        f"Commands and clients of this run need `{AUTH_TOKEN_KEY_NAME}: <token>` in their env.yaml.",
        flush=True,
    )


def prefetch(config: RunConfig) -> None:
    """`gym env prefetch`."""
    whole = whole_config()
    instances = [each for each in find_instances(whole)[0] if each.implementation != STAND_IN]
    if not instances:
        raise ConfigError("no server is configured, so there is nothing to build; name one, such as --environment mcqa")
    planned = plan_servers(instances, PlanSettings.of(config))
    with closing(Warden()) as warden:
        Pythons(whole, config, warden, lambda: False).prepare(planned)
    built = [server.name for server in planned if server.isolation == "venv" and server.present_python is None]
    where = f" in {environments_folder(whole, config)}" if built else ""
    print(f"{len(planned)} servers are ready to start; {len(built)} of them have an environment of their own{where}.")


def test(config: ServerTestsConfig) -> int:
    """`ng_test`."""
    module = ServerModule.find(config.entrypoint)
    python = ModulePythons.of(whole_config(), "ng_test").get(module)
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
    pythons = ModulePythons.of(whole_config(), "ng_test_all")
    report = run_all(chosen, pythons, delete_environments=config.delete_venvs_after_each_test)
    print_report(report)
    return 0 if report.is_good else 1


def dev_test(config: DevTestConfig) -> int:
    """`ng_dev_test`."""
    if not (PARENT_DIR / "tests").is_dir() or not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation without tests: run this in a checkout")
    sys.stdout.flush()
    tests = [sys.executable, "-m", "pytest", "--cov=.", "--durations=10"]
    return subprocess.run(tests, cwd=PARENT_DIR, check=False).returncode


def pip_list(config: PipListConfig) -> int:
    """`ng_pip_list`."""
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


def reinstall() -> None:
    """Install this checkout again, with its development tools, into the running environment."""
    if not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation, not a checkout: install nemo-gym as you did before")
    uv = shutil.which("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    done = subprocess.run([*installer, "-e", f"{PARENT_DIR}[dev]"], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
