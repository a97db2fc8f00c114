"""Ray, for servers that use it: connected to or started when one asks, and never otherwise."""

import atexit
import importlib
import logging
import sys
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.settings import replaceable
from nemo_gym.keys import RAY_HEAD_NODE_ADDRESS_KEY_NAME

logger = logging.getLogger(__name__)


def initialize_ray() -> None:
    """Connect to the cluster that `ray_head_node_address` names, or start one on this machine and record its address.

    Does nothing when this process is connected already. The process that started a cluster stops it at its end.
    """
    ray = _ray()
    if ray.is_initialized():
        logger.debug("this process is connected to Ray already")
        return
    config = replaceable("get_global_config_dict", get_global_config_dict)()
    address = config.get(RAY_HEAD_NODE_ADDRESS_KEY_NAME)
    if address:
        ray.init(address=address, ignore_reinit_error=True)
        return
    ray.init(ignore_reinit_error=True)
    atexit.register(ray.shutdown)
    config[RAY_HEAD_NODE_ADDRESS_KEY_NAME] = ray.get_runtime_context().gcs_address
    logger.info("started a Ray cluster at %s", config[RAY_HEAD_NODE_ADDRESS_KEY_NAME])


def maybe_ray_cluster_exit() -> None:
    """Leave the cluster this process is connected to, if it ever loaded Ray and is connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a server asks for Ray, which is not installed; install the extra: pip install '.[ray]'"
        ) from error
