"""`ng_run` without its watchfulness: starts servers and looks at nothing more, so that one may be dead among many."""

import signal
import sys

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import RunConfig


@command(RunConfig, name="ng_run")
def main(config: RunConfig) -> None:
    """Start the configured servers, wait for SIGTERM, stop them."""
    from nemo_gym.launch.run_helper import RunHelper

    helper = RunHelper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    helper.start()
    try:
        while True:
            signal.pause()
    finally:
        helper.shutdown()


if __name__ == "__main__":
    main()
