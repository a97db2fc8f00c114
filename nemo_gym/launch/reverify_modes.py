"""Whether environments can score stored responses again, as their classes declare it: no server is started for that."""

import contextlib
import sys
from typing import Any

from omegaconf import DictConfig

from nemo_gym.base_resources_server import ReverifyMode, SimpleResourcesServer
from nemo_gym.collect.environments import Environment, Mode
from nemo_gym.config.instances import find_instances
from nemo_gym.launch.offline_metrics import load_server_class
from nemo_gym.process_inputs import running_as


def declared_mode(config: DictConfig, server: str) -> Environment | None:
    """Return what the class of a configured environment declares; None where only the running server can tell."""
    instance = next((each for each in find_instances(config)[0] if each.name == server), None)
    if instance is None:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr), running_as(server), load_server_class(instance) as server_class:
            return _environment_of(server, server_class)
    except (Exception, SystemExit):  # noqa: BLE001 - an author's code may raise anything, and may need its own venv
        return None


def _environment_of(server: str, server_class: Any) -> Environment | None:
    if getattr(server_class, "get_reverify_mode", None) is not SimpleResourcesServer.get_reverify_mode:
        return None
    mode = server_class.REVERIFY_MODE
    if mode is ReverifyMode.UNKNOWN:
        mode = getattr(server_class.model_fields["config"].annotation, "REVERIFY_MODE", ReverifyMode.UNKNOWN)
    return Environment(server, Mode(mode.value), server_class.REVERIFY_REASON)
