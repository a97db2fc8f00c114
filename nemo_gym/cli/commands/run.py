"""`ng_run`: start every server of a configuration and keep them running."""

from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME
from nemo_gym.schemas.cli_config import RunConfig

if TYPE_CHECKING:
    from nemo_gym.global_config import GlobalConfigDictParserConfig


@command(RunConfig, starts_servers=True)
def main(config: RunConfig) -> None:
    """Start the configured servers and a head server, and keep them running until Ctrl-C.

    Servers of this distribution share one process; servers written elsewhere get their own, in an environment
    of their own if they require packages that are not installed here. A server that crashes ends the run, or
    is started again with +restart_crashed_servers=true.

    Examples:
        ng_run +environment=example_single_tool_call +model=scripted
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]"
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +head_server.port=0 +num_replicas=4
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +dry_run=true
    """
    serve(shows_token=True)


def serve(parser_config: "GlobalConfigDictParserConfig | None" = None, *, shows_token: bool = False) -> None:
    """Start the servers of `parser_config`, else of this process's config, and keep them running until a signal."""
    from nemo_gym.launch.run_helper import RunHelper
    from nemo_gym.runtime import stopping_on_signals

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
