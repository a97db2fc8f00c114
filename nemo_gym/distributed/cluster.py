"""Ray itself: connecting, and the few things that are asked of it. Nothing else in this package imports it."""

import importlib
import importlib.util
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_gym.distributed.board import Board
from nemo_gym.distributed.messages import Instruction, Report, ShardEnd, ShardOrder
from nemo_gym.distributed.shard_task import run_shard
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.rollouts.sharding import Shard

logger = logging.getLogger(__name__)

_LOCAL = "local"
_HOST_AND_PORT = re.compile(r"(ray://)?(?P<host>.+):(?P<port>\d+)")
_LISTENS_WITHIN_S = 10.0
_BOARD_ANSWERS_WITHIN_S = 60.0
_OPTION_OF = {"cpu": "num_cpus", "num_cpus": "num_cpus", "gpu": "num_gpus", "num_gpus": "num_gpus", "memory": "memory"}


class ShardLostError(GymError):
    """A shard's worker or node is gone; what the shard had written is not."""


class Cluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any, caps: Mapping[str, int], resources: Mapping[str, float]) -> None:
        self._ray = ray
        self._task = ray.remote(max_retries=0, **task_options(resources))(_run_reporting)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(Board)
        self._board = actor.remote(dict(caps))

    def submit(self, order: ShardOrder) -> Any:
        """Have a shard run as soon as there is room for it; what is returned stands for its end."""
        return self._task.options(name=f"nemo_gym shard {order.shard}").remote(order, self._board)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        """The latest reports of all shards; see `Board.look`."""
        asked = self._board.look.remote(dict(over), stop=stop, at_once=at_once)
        reports: Sequence[Report] = self._ray.get(asked, timeout=_BOARD_ANSWERS_WITHIN_S)
        return reports

    def ended(self, running: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Those that have ended, waiting for the first of them no longer than so."""
        done: Sequence[Any] = self._ray.wait(list(running), num_returns=len(running), timeout=timeout_s)[0]
        return done

    def result(self, ended: Any) -> ShardEnd:
        """How a shard ended.

        Raises:
            ShardLostError: its worker did not live to tell.
        """
        try:
            end: ShardEnd = self._ray.get(ended)
        except self._ray.exceptions.RayTaskError as error:
            raise ShardLostError(str(error).strip().splitlines()[-1]) from error
        except self._ray.exceptions.RayError as error:
            raise ShardLostError(str(error).strip().splitlines()[0]) from error
        return end

    def abandon(self, running: Sequence[Any]) -> None:
        """End workers without waiting for them; their shards notice and end, too."""
        for each in running:
            self._ray.cancel(each, force=True)


@contextmanager
def connected(
    address: str, caps: Mapping[str, int], resources: Mapping[str, float], runtime_env: Mapping[str, Any]
) -> Iterator[Cluster]:
    """A connection to the cluster at `address`; one that was started for it is gone afterwards.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    require_ray()
    _require_listener(address)
    ray = importlib.import_module("ray")
    importlib.import_module("ray.util.scheduling_strategies")
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.WARNING}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    if address == _LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, error) from error
    try:
        yield Cluster(ray, caps, resources)
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would end the process over it."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        return
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), _LISTENS_WITHIN_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0]
    return ConfigError(
        f"+ray_address={address}: no Ray cluster can be reached ({reason}); start one with `ray start --head`, give "
        "the address of one, or try things out with +ray_address=local"
    )


def task_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """What Ray is to set aside for a shard, in its own words."""
    options: dict[str, Any] = {"num_cpus": 1.0, "resources": {}}
    for name, amount in resources.items():
        known = _OPTION_OF.get(name.lower())
        if known is None:
            options["resources"][name] = amount
        else:
            options[known] = amount
    return options


def _run_reporting(order: ShardOrder, board: Any) -> ShardEnd:
    """What a worker does: run the shard and keep in touch with the board."""
    ray = importlib.import_module("ray")

    def tell(report: Report) -> Instruction:
        answer: Instruction = ray.get(board.report.remote(report), timeout=_BOARD_ANSWERS_WITHIN_S)
        return answer

    return run_shard(order, tell)


def require_ray() -> None:
    """Make sure that Ray is installed, without importing it.

    Raises:
        ConfigError: saying what to install.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "+executor=ray needs Ray, which is not installed; install the extra here and on every node of the cluster: "
            "pip install '.[ray]' (in a checkout)"
        )
