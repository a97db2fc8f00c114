"""Commands of the tree without an `ng_` spelling: environments built ahead of time, and what is not offered here."""

from contextlib import closing

from nemo_gym.cli.command import command, whole_config
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig, RunConfig


class NotOfferedConfig(BaseNeMoGymCLIConfig):
    """Arguments of commands that are not offered."""


@command(RunConfig, name="gym env prefetch", needs_model=False, offline=True)
def prefetch(config: RunConfig) -> None:
    """Build the environments that the configured servers need, so that a start finds them; nothing is started.

    An environment is built once for all servers with the same requirements; servers that can run in this one need none.
    """
    from nemo_gym.config.instances import find_instances
    from nemo_gym.launch.plan import PlanSettings, Pythons, environments_folder, plan_servers
    from nemo_gym.launch.server_checks import STAND_IN
    from nemo_gym.launch.warden import Warden

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


@command(NotOfferedConfig, name="gym dataset", reads_config=False)
def no_gitlab(config: NotOfferedConfig) -> None:
    """Transfers to and from GitLab are not offered here: those with the Hugging Face hub are."""
    raise ConfigError(
        "data sets are not uploaded to or downloaded from GitLab here; use --storage hf, or fetch the file yourself "
        "and name it as jsonl_fpath (gym dataset rm and gym dataset migrate do speak to a registry)"
    )


@command(NotOfferedConfig, name="gym env", reads_config=False)
def no_publishing(config: NotOfferedConfig) -> None:
    """Manifests are read and listed, but neither written nor tested here."""
    raise ConfigError(
        "manifests are read and listed (gym list environments), but neither written nor tested here; begin with "
        "gym env init --resources-server <name>, check with gym env validate, and run its tests with gym env test"
    )


@command(NotOfferedConfig, name="gym eval submit", reads_config=False)
def no_submit(config: NotOfferedConfig) -> None:
    """Files of jobs are not read here: `gym eval slurm` writes the jobs of a run from its options."""
    raise ConfigError(
        "files of jobs are not read here; gym eval slurm (ng_slurm) writes the Slurm jobs of a run from its options, "
        "and submit.sh beside them submits them"
    )
