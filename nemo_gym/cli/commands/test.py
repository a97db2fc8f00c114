"""`ng_test`: the tests of one server."""

from nemo_gym.cli.command import command, whole_config
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import ServerTestsConfig


@command(ServerTestsConfig, needs_model=False, offline=True)
def main(config: ServerTestsConfig) -> int:
    """Run the tests of a server with pytest, in an environment that has what the server requires.

    The exit code is that of pytest. With +should_validate_data=true the example data of a resources server is checked
    as well: five rows, their metrics, five rollouts.

    Examples:
        ng_test +entrypoint=resources_servers/my_env
        ng_test +entrypoint=resources_servers/my_env +should_validate_data=true
    """
    from nemo_gym.launch.server_tests import WARNINGS_PASS, ModulePythons, ServerModule, run_tests

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
