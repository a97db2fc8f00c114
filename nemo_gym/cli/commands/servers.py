"""Servers and their configuration: `ng_run`, `ng_validate`, `ng_dump_config`."""

import sys

from nemo_gym.cli.command import whole_config
from nemo_gym.cli.config import safe_yaml
from nemo_gym.cli.shortcuts import shown_expansion
from nemo_gym.config.instances import find_instances
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.launch.server_checks import STAND_IN
from nemo_gym.runtime import stopping_on_signals
from nemo_gym.schemas.cli_config import DumpConfigConfig, RunConfig, ValidateConfig
from nemo_gym.terminal import print_line


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


def validate(config: ValidateConfig) -> None:
    """`ng_validate`."""
    instances = find_instances(whole_config())[0]
    print("Config is valid.")
    if all(instance.implementation == STAND_IN for instance in instances):
        print("It configures no server, so there is nothing to start.")
        return
    column = max(len(instance.name) for instance in instances) + 2
    for instance in instances:
        note = " (stand-in: no model is configured)" if instance.implementation == STAND_IN else ""
        print(f"  {instance.name:<{column}}{instance.SERVER_TYPE}/{instance.implementation}{note}")


def dump_config(config: DumpConfigConfig) -> None:
    """`ng_dump_config`."""
    expansion = shown_expansion(sys.argv[1:], DumpConfigConfig)
    if expansion is not None:
        print_line(f"# {expansion}")
    print(safe_yaml(whole_config()), end="")
