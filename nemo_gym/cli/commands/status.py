"""`ng_status`: which servers of a run are up."""

import json

from nemo_gym.cli.command import command
from nemo_gym.schemas.run_config import StatusConfig


@command(StatusConfig, needs_model=False, offline=True)
def main(config: StatusConfig) -> None:
    """List the servers that `ng_run` has started and whether each of them answers.

    Examples:
        ng_status
        ng_status +head_server.port=11500
        ng_status +json=true
    """
    from nemo_gym.server_status import StatusCommand

    status = StatusCommand()
    servers = status.discover_servers()
    if config.json_format:
        print(json.dumps([server.model_dump(mode="json") for server in servers], indent=2))
    else:
        status.display_status(servers)
