"""Servers: `ng_run` starts them, `gym env prefetch` builds the environments that they need."""

from contextlib import closing

from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME, STAND_IN
from nemo_gym.launch.plan import PlanSettings, Pythons, environments_folder, plan_servers
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.launch.warden import Warden
from nemo_gym.runtime import stopping_on_signals
from nemo_gym.schemas.cli_config import RunConfig


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
    whole = get_global_config_dict()
    instances = [each for each in find_instances(whole)[0] if each.implementation != STAND_IN]
    if not instances:
        raise ConfigError("no server is configured, so there is nothing to build; name one, such as --environment mcqa")
    planned = plan_servers(instances, PlanSettings.of(config))
    with closing(Warden()) as warden:
        Pythons(whole, config, warden, lambda: False).prepare(planned)
    built = [server.name for server in planned if server.isolation == "venv" and server.present_python is None]
    where = f" in {environments_folder(whole, config)}" if built else ""
    print(f"{len(planned)} servers are ready to start; {len(built)} of them have an environment of their own{where}.")
