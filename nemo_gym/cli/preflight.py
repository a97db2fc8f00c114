"""What is settled before any server is started: the name and secrets of the run, its ports, and who may call."""

import logging
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from omegaconf import DictConfig

from nemo_gym.cli.plan import PlannedServer
from nemo_gym.config.auth import auth_token, beyond_loopback
from nemo_gym.errors import ConfigError
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME, HEAD_SERVER_KEY_NAME, RUN_ID_KEY_NAME, SESSION_SECRET_KEY_NAME
from nemo_gym.servers.listening import listen

logger = logging.getLogger(__name__)


def identify_run(config: DictConfig) -> str:
    """Give the run its name, and the secret that makes sessions survive the restart of a server."""
    if not config.get(RUN_ID_KEY_NAME):
        config[RUN_ID_KEY_NAME] = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if not config.get(SESSION_SECRET_KEY_NAME):
        config[SESSION_SECRET_KEY_NAME] = secrets.token_hex(32)
    return str(config[RUN_ID_KEY_NAME])


def warn_if_open_to_others(config: DictConfig, planned: Sequence[PlannedServer]) -> None:
    """Say that other machines may call, if they may and need no token."""
    hosts = beyond_loopback([config[HEAD_SERVER_KEY_NAME].host, *(server.host for server in planned)])
    if hosts and auth_token(config) is None:
        logger.warning(
            "Servers listen on %s: whoever can reach this machine can use the model, run tools and read the config. "
            "Require a token with +%s=auto, or stay with +default_host=127.0.0.1",
            ", ".join(hosts),
            AUTH_TOKEN_KEY_NAME,
        )


def show_token(token: str) -> None:
    """Tell whoever started the servers, on stdout."""
    print(
        f"The token of this run, shown this once: {token}\n"
        f"Commands and clients of this run need `{AUTH_TOKEN_KEY_NAME}: <token>` in their env.yaml.",
        flush=True,
    )


def check_ports(config: DictConfig, planned: Sequence[PlannedServer]) -> None:
    """Find out before anything is started that a port is taken."""
    head = config[HEAD_SERVER_KEY_NAME]
    wanted = [(head.host, head.port, "the head server", "+head_server.port=<port> (0: any free one)")]
    wanted += [
        (
            server.host,
            server.port,
            f"server {server.name!r}",
            f"++{server.name}.{server.server_type}.{server.implementation}.port=<port>",
        )
        for server in planned
    ]
    problems = []
    for host, port, who, remedy in wanted:
        try:
            listen(host, port, who, remedy).close()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
