"""From a data set to its scores in one process tree: prepare the data, start the servers, collect, stop.

Whatever ends it, the servers are stopped and what was collected can be resumed.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gym import event_loop
from nemo_gym.cli.run_helper import RunHelper
from nemo_gym.cli.signals import stopping_on_signals
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import find_open_port
from nemo_gym.keys import (
    DEFAULT_HEAD_SERVER_PORT,
    DISALLOWED_PORTS_KEY_NAME,
    DRY_RUN_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
)
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.rollouts.config import E2ERolloutCollectionConfig, RolloutCollectionConfig
from nemo_gym.rollouts.finished import summary_if_settled
from nemo_gym.rollouts.summary import RunSummary
from nemo_gym.servers.listening import listen
from nemo_gym.train_data_utils import TrainDataProcessor

logger = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.25
_LET_GO_TIMEOUT_S = 30.0


def run_end_to_end(
    config: E2ERolloutCollectionConfig, global_config: DictConfig, command: Sequence[str] = ()
) -> RunSummary | None:
    """Do all of it; what the run came to, or None after a dry run.

    Raises:
        ConfigError: the data or the servers are not as they should be.
        GymError: a server cannot be started, or ended on its own.
    """
    rows = prepare_rows(config, global_config)
    logger.info("Prepared data sets: %s", config.prepared_dirpath)
    logger.info("Rows of this run: %s", rows)
    return collect_with_servers(config.for_rows_in(rows), global_config, command)


def collect_with_servers(
    config: RolloutCollectionConfig,
    global_config: DictConfig,
    command: Sequence[str] = (),
    collector: RolloutCollectionHelper | None = None,
) -> RunSummary | None:
    """Start the configured servers, collect rollouts, stop; None after a dry run.

    A run that owes nothing more needs no servers.
    """
    is_dry_run = bool(global_config.get(DRY_RUN_KEY_NAME))
    settled = None if is_dry_run else summary_if_settled(config)
    if settled is not None:
        return settled
    _avoid_a_taken_head_port(global_config)
    with contextlib.ExitStack() as stack:
        session = _Session(collector or RolloutCollectionHelper())
        stack.enter_context(stopping_on_signals(session))
        stack.callback(session.helper.shutdown)
        with contextlib.redirect_stdout(sys.stderr) if config.json_format else contextlib.nullcontext():
            session.helper.start()
        if is_dry_run:
            return None
        logger.info("Rollouts: %s", config.paths.rollouts)
        return event_loop.run(session.collect(config, command))


def prepare_rows(config: E2ERolloutCollectionConfig, global_config: DictConfig) -> Path:
    """The prepared rows of the split: those of an earlier run if they are wanted and there, else made now."""
    rows = config.prepared_dirpath / f"{config.split}.jsonl"
    if config.reuse_existing_data_preparation or config.resume_from_cache:
        if rows.is_file():
            logger.info("Using the rows prepared before: %s", rows)
            return rows
        logger.info("There are no rows prepared before (%s), so they are prepared now", rows)
    processor = TrainDataProcessor(
        types=(config.split,),
        agent_name=config.agent_name,
        prompt_config=config.prompt_config,
        replaces_output=True,
    )
    options: dict[str, Any] = {
        "mode": "example_validation" if config.split == "example" else "train_preparation",
        "should_download": True,
        "output_dirpath": str(config.prepared_dirpath),
        "data_source": config.data_source,
        "overwrite_metrics_conflicts": config.overwrite_metrics_conflicts,
        "keep_offending_rows": config.keep_offending_rows,
    }
    processor.run(OmegaConf.merge(global_config, options))
    return rows


def _avoid_a_taken_head_port(global_config: DictConfig) -> None:
    """Another run may have the usual port; nobody but ourselves needs to find the head server of this one there."""
    head = global_config[HEAD_SERVER_KEY_NAME]
    if head.port != DEFAULT_HEAD_SERVER_PORT:
        return
    try:
        listen(head.host, head.port, "the head server", "").close()
    except ConfigError:
        head.port = find_open_port(list(global_config.get(DISALLOWED_PORTS_KEY_NAME) or ()))
        logger.info("Port %d is taken, so the head server listens on %d", DEFAULT_HEAD_SERVER_PORT, head.port)


class _Session:
    """The servers of a run and the collection from them, stopped together."""

    def __init__(self, collector: RolloutCollectionHelper) -> None:
        self.helper = RunHelper()
        self._collector = collector
        self._is_stopping = False

    def request_stop(self, *, at_once: bool = False) -> None:
        """Stop soon; while rollouts are in flight the collector hears the signals itself and ends in good order."""
        self.helper.request_stop(at_once=at_once)
        self._is_stopping = True

    async def collect(self, config: RolloutCollectionConfig, command: Sequence[str]) -> RunSummary:
        """Collect while watching the servers; a server that ends on its own ends the collection."""
        collecting = asyncio.ensure_future(self._collector.collect(config, command))
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
