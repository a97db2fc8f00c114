"""`ng_run`: start every server of a configuration and keep them running."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.run_config import RunConfig


@command(RunConfig)
def main(config: RunConfig) -> None:
    """Start the configured servers and a head server, and keep them running until Ctrl-C.

    Servers of this distribution share one process; servers written elsewhere get their own, in an environment
    of their own if they require packages that are not installed here. A server that crashes ends the run, or
    is started again with +restart_crashed_servers=true.

    Examples:
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]"
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +head_server.port=0 +num_replicas=4
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +dry_run=true
    """
    from nemo_gym.cli.preflight import show_token
    from nemo_gym.cli.run_helper import RunHelper
    from nemo_gym.cli.signals import stopping_on_signals

    helper = RunHelper()
    with stopping_on_signals(helper):
        helper.start()
        if helper.made_token is not None:
            show_token(helper.made_token)
        helper.run_forever()
