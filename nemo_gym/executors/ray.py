"""`+executor=ray`: Ray itself, connecting to it, and the few things that are asked of it. Nothing else imports it."""

import importlib
import importlib.util
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_gym.collect.summary import RunSummary
from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError, NoServerInstancesError
from nemo_gym.executors.base import Job
from nemo_gym.executors.caps import Board, Budgets, Instruction, Report
from nemo_gym.executors.driver import ShardLostError, run_in_shards
from nemo_gym.executors.shard import ShardEnd, ShardOrder, run_shard
from nemo_gym.keys import AGENTS_TYPE
from nemo_gym.launch.end_to_end import rows_to_collect
from nemo_gym.paths import install_command
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig, RowOptions
from nemo_gym.runs.options.sharding import Shard

logger = logging.getLogger(__name__)

_LOCAL = "local"
_HOST_AND_PORT = re.compile(r"(ray://)?(?P<host>.+):(?P<port>\d+)")
_LISTENS_WITHIN_S = 10.0
_BOARD_ANSWERS_WITHIN_S = 60.0
_OPTION_OF = {"cpu": "num_cpus", "num_cpus": "num_cpus", "gpu": "num_gpus", "num_gpus": "num_gpus", "memory": "memory"}


class RayExecutor:
    """A run cut into `num_shards` shards that a Ray cluster collects."""

    def collect(self, config: RolloutCollectionConfig, job: Job) -> RunSummary:
        """Collect rollouts from servers that each shard starts for itself.

        Raises:
            ConfigError: something the user can correct, here or in a shard.
            ShardFailedError: a shard was lost again and again.
        """
        _check(config, job.global_config)
        ships_folder = "working_dir" in config.ray_runtime_env

        @contextmanager
        def connect(caps: Mapping[str, int], budget: Budgets) -> Iterator[Cluster]:
            with (
                redirect_stdout(sys.stderr),  # where Ray may say what it likes
                connected(config.ray_address, caps, config.shard_resources, config.ray_runtime_env, budget) as cluster,
            ):
                yield cluster

        return run_in_shards(config, job, connect, None if ships_folder else Path.cwd())

    def collect_prepared(self, config: E2ERolloutCollectionConfig, job: Job) -> RunSummary:
        """Do the same for the data sets of a split, which are prepared here, once for all shards."""
        _check(config, job.global_config)
        return self.collect(rows_to_collect(config, job.global_config), job)


class Cluster:
    """A Ray cluster that this process is connected to."""

    def __init__(
        self, ray: Any, caps: Mapping[str, int], resources: Mapping[str, float], budget: Budgets | None = None
    ) -> None:
        self._ray = ray
        self._task = ray.remote(max_retries=0, **task_options(resources))(_run_reporting)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(Board)
        self._board = actor.remote(dict(caps), budget)

    def submit(self, order: ShardOrder) -> Any:
        """Have a shard run as soon as there is room for it; what is returned stands for its end."""
        return self._task.options(name=f"nemo_gym shard {order.shard}").remote(order, self._board)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        """The latest reports of all shards; see `Board.look`."""
        asked = self._board.look.remote(dict(over), stop=stop, at_once=at_once)
        reports: Sequence[Report] = self._ray.get(asked, timeout=_BOARD_ANSWERS_WITHIN_S)
        return reports

    def set_caps(self, caps: Mapping[str, int]) -> None:
        """Have other numbers hold for the caps; see `Board.set_caps`."""
        self._ray.get(self._board.set_caps.remote(dict(caps)), timeout=_BOARD_ANSWERS_WITHIN_S)

    def set_orders(self, orders: Mapping[str, Any]) -> None:
        """Have all shards know what a person wants; see `Board.set_orders`."""
        self._ray.get(self._board.set_orders.remote(dict(orders)), timeout=_BOARD_ANSWERS_WITHIN_S)

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
    address: str,
    caps: Mapping[str, int],
    resources: Mapping[str, float],
    runtime_env: Mapping[str, Any],
    budget: Budgets | None = None,
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
        yield Cluster(ray, caps, resources, budget)
    finally:
        ray.shutdown()


def _check(config: RowOptions, global_config: DictConfig) -> None:
    """What can be found out before anything is started."""
    given = config.output_jsonl_fpath
    output = RolloutPaths(Path(given))
    if output.manifest.exists() and output.rollouts.exists():
        raise ConfigError(
            f"+output_jsonl_fpath={given} holds the rollouts of a run that was not cut into shards (see "
            f"{output.manifest}); choose another output"
        )
    if not any(instance.SERVER_TYPE == AGENTS_TYPE for instance in find_instances(global_config)[0]):
        raise NoServerInstancesError(
            "with +executor=ray each shard starts its own servers, and the configuration has no agent; name the config "
            'files of an environment and of a model: "+config_paths=[resources_servers/<name>/configs/<name>.yaml,...]"'
        )
    require_ray()


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
            "+executor=ray needs Ray, which is not installed; install it here and on every node of the cluster with: "
            f"{install_command('ray')}"
        )
