"""`ng_test_all`: the tests of every server."""

from nemo_gym.cli.command import command, whole_config
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import AllServerTestsConfig


@command(AllServerTestsConfig, needs_model=False, offline=True)
def main(config: AllServerTestsConfig) -> int:
    """Run the tests of every server below the current folder, or of this distribution when there is none.

    Servers with a README.md are tested, the example data of resources servers is checked. Ends with exit code 1 when
    tests fail or are missing, or example data is not complete.

    Examples:
        ng_test_all
        ng_test_all +num_shards=4 +shard_index=0 +delete_venvs_after_each_test=true
    """
    from nemo_gym.launch.server_tests import ModulePythons, find_modules, print_report, run_all

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
