"""`ng_status`: which servers are up, and which runs are being collected."""

import json

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import StatusConfig


@command(StatusConfig, needs_model=False, offline=True)
def main(config: StatusConfig) -> None:
    """List the servers that `ng_run` has started and whether each of them answers, and the runs that go on here.

    Runs are those of this user on this machine, each as its collector says how it stands.

    Examples:
        ng_status
        ng_status +head_server.port=11500
        ng_status +json=true +runs=true
    """
    from nemo_gym.cli.runs import print_runs
    from nemo_gym.runs.sockets import living_runs
    from nemo_gym.server_status import StatusCommand

    status = StatusCommand()
    servers = status.discover_servers()
    if config.json_format:
        listed = [server.model_dump(mode="json") for server in servers]
        shown = {"servers": listed, "runs": [run.status for run in living_runs()]} if config.runs else listed
        print(json.dumps(shown, indent=2))
        return
    status.display_status(servers)
    runs = living_runs()
    if runs:
        print_runs(runs)
