"""From a data set to its scores in one process tree: prepare the data, start the servers, collect, stop.

Whatever ends it, the servers are stopped and what was collected can be resumed. Scoring again is the same with fewer
servers: the environments, and the models that these ask as judges.
"""

import asyncio
import contextlib
import importlib
import inspect
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from nemo_gym import runtime
from nemo_gym.collect.collector import renew_metrics
from nemo_gym.collect.environments import EnvironmentNames, environments_of_agents, foreign_rollouts, refusal
from nemo_gym.collect.planning import RunPlan, plan_of
from nemo_gym.collect.reverify import ReverifySummary, stored_rollouts
from nemo_gym.collect.run_servers import model_names
from nemo_gym.collect.server_watch import servers_needed_by
from nemo_gym.collect.summary import RunSummary, find_settled
from nemo_gym.config.instances import find_instances
from nemo_gym.data.declared import datasets_of
from nemo_gym.errors import ConfigError, GymError, did_you_mean, listed
from nemo_gym.http.addresses import server_names
from nemo_gym.http.pace_books import sets_pace
from nemo_gym.keys import (
    AGENTS_TYPE,
    DRY_RUN_KEY_NAME,
    MODELS_TYPE,
    NUM_REPLICAS_KEY_NAME,
    RESOURCES_TYPE,
)
from nemo_gym.launch.offline_metrics import OfflineAgents
from nemo_gym.launch.reverify_modes import declared_mode
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.observability.store import ModelCallCaptureConfig
from nemo_gym.paths import require_possible_folder, search_servers_in_all_roots
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.rollout_reverification import RolloutReverificationHelper
from nemo_gym.runs.lock import only_writer
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.runs.resume import Plan
from nemo_gym.runs.run import check_input, check_output
from nemo_gym.schemas.data_config import TrainDataProcessorConfig
from nemo_gym.skills import load_skill_directory
from nemo_gym.train_data_utils import TrainDataProcessor, examine, prepared_lines, refuse_offences

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_MODEL = "dummy_model"
_WATCH_EVERY_S = 0.25
_LET_GO_TIMEOUT_S = 30.0


def run_end_to_end(
    config: E2ERolloutCollectionConfig, global_config: DictConfig, command: Sequence[str] = ()
) -> RunSummary | None:
    """Do all of it; what the run came to, or None after a dry run, or if somebody else's function has collected.

    Raises:
        ConfigError: the data or the servers are not as they should be.
        GymError: a server cannot be started, or ended on its own.
    """
    driver = None if config.rollout_collection_driver is None else _driver(config.rollout_collection_driver)
    paths = config.paths
    ModelCallCaptureConfig.of(global_config)
    is_resumed = config.resume_from_cache and paths.rollouts.exists()
    check_output(paths, is_resumed=is_resumed)
    if config.skills is not None and not is_resumed:
        load_skill_directory(config.skills.path)
    collecting = rows_to_collect(config, global_config)
    if driver is not None:
        _drive(driver, collecting, global_config)
        return None
    return collect_with_servers(collecting, global_config, command)


class DriverError(GymError):
    """A function that collects in place of the collector has failed."""


def _driver(name: str) -> Callable[[RolloutCollectionConfig, DictConfig], Any]:
    """The function that `rollout_collection_driver` names; its module is looked for in all search roots."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"+rollout_collection_driver={name}: it is written <module>:<function>, such as my.module:collect"
        )
    search_servers_in_all_roots()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"+rollout_collection_driver={name}: {module_name} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = did_you_mean(function_name, vars(module))
        raise ConfigError(f"+rollout_collection_driver={name}: {module_name} has no function {function_name!r}{hint}")
    return function  # type: ignore[no-any-return]


def _drive(
    driver: Callable[[RolloutCollectionConfig, DictConfig], Any],
    config: RolloutCollectionConfig,
    global_config: DictConfig,
) -> None:
    """Start the servers, have `driver` collect, stop; what it writes, and where, is its own business."""

    async def collect() -> None:
        try:
            result = driver(config, global_config)
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            if isinstance(error, GymError):
                raise
            name = config.rollout_collection_driver
            raise DriverError(f"rollout_collection_driver {name} failed: {type(error).__name__}: {error}") from error

    with _started(global_config, quiet=config.json_format) as session:
        if not global_config.get(DRY_RUN_KEY_NAME):
            logger.info("%s collects into %s", config.rollout_collection_driver, config.paths.rollouts)
            runtime.run(session.do(collect()))


def plan_end_to_end(config: E2ERolloutCollectionConfig, global_config: DictConfig) -> RunPlan:
    """What `run_end_to_end` would do, and what that would take; starts nothing, and writes nothing.

    Raises:
        ConfigError: the data is not there, or not as it should be.
    """
    paths = config.paths
    is_resumed = config.resume_from_cache and paths.rollouts.exists()
    check_output(paths, is_resumed=is_resumed)
    if config.skills is not None and not is_resumed:
        load_skill_directory(config.skills.path)
    models = model_names(global_config)
    if config.input_jsonl_fpath is not None:
        return plan_of(_given_rows(config, global_config), models)
    rows = config.prepared_dirpath / f"{config.split}.jsonl"
    if rows.is_file() and (config.reuse_existing_data_preparation or config.resume_from_cache):
        return plan_of(config.for_rows_in(rows), models)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / rows.name
        _write_rows_aside(config, global_config, rows)
        made = plan_of(config.for_rows_in(rows), models)
    made.files.append(config.prepared_dirpath)
    return made


def _write_rows_aside(config: E2ERolloutCollectionConfig, global_config: DictConfig, path: Path) -> None:
    """The rows that preparing would write, checked as they are there; nothing is downloaded."""
    processor = _processor(config)
    options = TrainDataProcessorConfig.model_validate({**_preparing(config), "should_download": False})
    agents = processor.load_and_validate_server_instance_configs(options, global_config)
    processor.load_datasets(options, agents)
    datasets = list(datasets_of(agents, config.prompt_config))
    refuse_offences([examine(dataset) for dataset in datasets], keep=config.keep_offending_rows)
    with path.open("wb") as file:
        for dataset in datasets:
            file.writelines(prepared_lines(dataset))


def collect_with_servers(
    config: RolloutCollectionConfig,
    global_config: DictConfig,
    command: Sequence[str] = (),
    collector: RolloutCollectionHelper | None = None,
    started: Callable[[RunHelper], None] | None = None,
) -> RunSummary | None:
    """Start the configured servers, collect rollouts, stop; None after a dry run.

    `started` is told when the servers are there. Unless it is, a shard keeps to its part of the pace of model servers.

    A run that owes nothing more needs no servers: its metrics are computed again by the agents' classes, here.
    """
    is_dry_run = bool(global_config.get(DRY_RUN_KEY_NAME))
    settled = None if is_dry_run else find_settled(config)
    if settled is not None:
        return runtime.run(_with_metrics_renewed(config, *settled, OfflineAgents(global_config)))
    with _started(global_config, quiet=config.json_format) as session:
        if is_dry_run:
            return None
        if started is not None:
            started(session.helper)
        elif config.chosen_shard is not None and sets_pace(global_config):
            count = config.chosen_shard.count
            logger.info("The pace of model servers is for all %d shards: this one keeps to 1/%d of it", count, count)
            session.helper.share_pace(1 / count)
        logger.info("Rollouts: %s", config.paths.rollouts)
        return runtime.run(session.do((collector or RolloutCollectionHelper()).collect(config, command)))


def reverify_with_servers(
    config: RolloutReverificationConfig, global_config: DictConfig, command: Sequence[str] = ()
) -> ReverifySummary:
    """Start the configured environments and their judges, nothing else, score stored rollouts again, and stop.

    Raises:
        ConfigError: the files or the servers are not as they should be.
        GymError: a server cannot be started, or ended on its own.
    """
    with stored_rollouts(config) as chosen:
        environment_of = _keep_only_environments(global_config)
        if not config.force:
            _refuse_before_start(config, chosen.agents(), global_config, environment_of)
        if not isinstance(global_config.get(NUM_REPLICAS_KEY_NAME), int):
            global_config[NUM_REPLICAS_KEY_NAME] = 1  # environments are asked directly, at the address they have
        with _started(global_config, quiet=config.json_format) as session:
            helper = RolloutReverificationHelper(environment_of=environment_of)
            return runtime.run(session.do(helper.score(config, chosen, command)))


def _refuse_before_start(
    config: RolloutReverificationConfig,
    agents: Collection[str],
    global_config: DictConfig,
    environment_of: Mapping[str, str],
) -> None:
    """Refuse what the classes of the environments, or the rollouts, say cannot be scored; servers are asked later."""
    names = EnvironmentNames(global_config, environment_of)
    used = sorted({found for agent in agents if (found := names.find(agent)) is not None})
    declared = [environment for name in used if (environment := declared_mode(global_config, name)) is not None]
    if why := refusal(config, declared, foreign_rollouts(config, agents, names)):
        raise ConfigError(why)


def _keep_only_environments(global_config: DictConfig) -> dict[str, str]:
    """Take agents, and models that no environment asks, out of a configuration; which environment an agent has."""
    tree: Any = OmegaConf.to_container(global_config, resolve=False)
    names = set(server_names(global_config))
    environments = [name for name in names if RESOURCES_TYPE in tree[name]]
    needed = {needed for name in environments for needed in servers_needed_by(global_config, name)}
    for name in sorted(needed):
        if _NO_MODEL in tree[name].get(MODELS_TYPE, {}):
            raise ConfigError(
                f"an environment asks {name!r}, a model that is not configured: add it, such as with +model=…"
            )
    known = environments_of_agents(tree, names)
    for name in names - needed:
        del global_config[name]
    return known


@contextlib.contextmanager
def _started(global_config: DictConfig, *, quiet: bool) -> Iterator["_Session"]:
    """The configured servers while inside; signals stop them, and what is done with them."""
    with contextlib.ExitStack() as stack:
        session = _Session()
        stack.enter_context(runtime.stopping_on_signals(session.request_stop, on_the_spot=True))
        stack.callback(session.helper.shutdown)
        with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            session.helper.start()
        yield session


async def _with_metrics_renewed(
    config: RolloutCollectionConfig, plan: Plan, summary: RunSummary, agents: OfflineAgents
) -> RunSummary:
    """The summary of a complete run, with metrics as the agents' classes compute them now, where they can be built."""
    try:
        with only_writer(config.paths):
            await renew_metrics(config, plan, agents.ask_own, summary, repair=False)
    except ConfigError as error:
        logger.warning("the metrics on disk are shown as they are: %s", error)
    return summary


def rows_to_collect(config: E2ERolloutCollectionConfig, global_config: DictConfig) -> RolloutCollectionConfig:
    """Return the arguments for collecting the rows of a given file, or else those of the split, which are prepared.

    Raises:
        ConfigError: the rows cannot be rolled out by the configured agents.
    """
    if config.input_jsonl_fpath is not None:
        collecting = _given_rows(config, global_config)
    else:
        rows = prepare_rows(config, global_config)
        logger.info("Prepared data sets: %s", config.prepared_dirpath)
        collecting = config.for_rows_in(rows.absolute())
    logger.info("Rows of this run: %s", collecting.input_jsonl_fpath)
    return collecting


def _given_rows(config: E2ERolloutCollectionConfig, global_config: DictConfig) -> RolloutCollectionConfig:
    """Return the arguments for collecting the rows of `input_jsonl_fpath`, all of which have been checked."""
    agents = [instance.name for instance in find_instances(global_config)[0] if instance.SERVER_TYPE == AGENTS_TYPE]
    collecting = config.for_given_rows(agents)
    inputs = check_input(collecting)
    of_rows = {} if inputs is None else inputs.scan.rows_of_agent  # of a resumed run the collector checks them
    missing = sorted(set(of_rows) - set(agents))
    if missing:
        raise ConfigError(
            f"rows of {config.input_jsonl_fpath} are for {listed(map(repr, missing))}, and the configuration has no "
            f"such agent{did_you_mean(missing[0], agents) or '.'} Its agents: {listed(agents)}. Correct +agent_name or "
            "the agent_ref of the rows"
        )
    return collecting


def prepare_rows(config: E2ERolloutCollectionConfig, global_config: DictConfig) -> Path:
    """The prepared rows of the split: those of an earlier run if they are wanted and there, else made now."""
    require_possible_folder(config.prepared_dirpath)
    rows = config.prepared_dirpath / f"{config.split}.jsonl"
    if config.reuse_existing_data_preparation or config.resume_from_cache:
        if rows.is_file():
            logger.info("Using the rows prepared before: %s", rows)
            return rows
        logger.info("There are no rows prepared before (%s), so they are prepared now", rows)
    _processor(config).run(OmegaConf.merge(global_config, _preparing(config)))
    return rows


def _processor(config: E2ERolloutCollectionConfig) -> TrainDataProcessor:
    assert config.split is not None
    return TrainDataProcessor(
        types=(config.split,),
        agent_name=config.agent_name,
        prompt_config=config.prompt_config,
        replaces_output=True,
    )


def _preparing(config: E2ERolloutCollectionConfig) -> dict[str, Any]:
    """What preparing the data is told."""
    return {
        "mode": "example_validation" if config.split == "example" else "train_preparation",
        "should_download": True,
        "output_dirpath": str(config.prepared_dirpath),
        "data_source": config.data_source,
        "overwrite_metrics_conflicts": config.overwrite_metrics_conflicts,
        "keep_offending_rows": config.keep_offending_rows,
    }


class _Session:
    """The servers of a run and what is done with them, stopped together."""

    def __init__(self) -> None:
        self.helper = RunHelper()
        self.helper.may_move_head = True  # nobody but ourselves needs to find it where it usually is
        self._is_stopping = False

    def request_stop(self, *, at_once: bool = False) -> None:
        """Stop soon; while rollouts are in flight the collector hears the signals itself and ends in good order."""
        self.helper.request_stop(at_once=at_once)
        self._is_stopping = True

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it while watching the servers; a server that ends on its own ends it."""
        collecting = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                collecting.cancel()
                await asyncio.wait({collecting}, timeout=_LET_GO_TIMEOUT_S)
                watching.result()
                raise KeyboardInterrupt
            return await collecting
        finally:
            watching.cancel()
            await asyncio.wait({watching}, timeout=_LET_GO_TIMEOUT_S)

    async def _watch(self) -> None:
        """Return when this session is to stop; raise when a server has ended."""
        while not self._is_stopping:
            await asyncio.to_thread(self.helper.poll)
            await asyncio.sleep(_WATCH_EVERY_S)
