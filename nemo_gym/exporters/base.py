"""PUBLIC: the class that exporters of programs derive from, and those of this package as such classes."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from omegaconf import DictConfig

from nemo_gym.errors import GymError
from nemo_gym.trackers.base import TRACKERS, TrackedRun, TrackerRun

logger = logging.getLogger(__name__)


class BaseExporter(ABC):
    """An experiment tracker. `export_*` never raise; `setup` may, and what a subclass gives for them may."""

    name: ClassVar[str]

    def __init__(self, global_config_dict: DictConfig) -> None:
        self.global_config_dict = global_config_dict

    @abstractmethod
    def setup(self) -> None:
        """Open the run."""

    @abstractmethod
    def teardown(self) -> None:
        """Close the run."""

    @abstractmethod
    def _log_config(self) -> None: ...

    @abstractmethod
    def _log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None: ...

    @abstractmethod
    def _log_rollouts(self, rollouts: list[dict[str, Any]]) -> None: ...

    def export_config(self) -> None:
        """Log the configuration, its secrets masked."""
        self._try("the configuration", self._log_config)

    def export_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log flat values."""
        self._try("the metrics", lambda: self._log_metrics(metrics, step))

    def export_rollouts(self, rollouts: list[dict[str, Any]]) -> None:
        """Log rollouts as a table."""
        self._try("the rollouts", lambda: self._log_rollouts(rollouts))

    def as_tracker(self) -> TrackerRun:
        """This exporter as the runs of this process know trackers; its `finish` is the `teardown`."""
        return ExporterRun(self)

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.teardown()

    def _try(self, what: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the results are on disk
            logger.warning("the exporter %s did not take %s: %s", self.name, what, error)


class TrackerExporter(BaseExporter):
    """A tracker of this package as an exporter; opening it logs the configuration."""

    _run: TrackerRun | None = None

    def setup(self) -> None:
        """Open the run.

        Raises:
            GymError: it cannot be opened; the warning before says why.
        """
        self._run = TRACKERS[self.name].open(self.global_config_dict, ())
        if self._run is None:
            raise GymError(f"{TRACKERS[self.name].title} has no open run")

    def teardown(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def as_tracker(self) -> TrackerRun:
        """The run itself."""
        return super().as_tracker() if self._run is None else self._run

    def _log_config(self) -> None:
        """It went along when the run was opened."""

    def _log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._run is not None:
            self._run.log(metrics, step)

    def _log_rollouts(self, rollouts: list[dict[str, Any]]) -> None:
        if self._run is not None:
            self._run.log_rollouts(json.dumps(rollout, default=str).encode() for rollout in rollouts)


class ExporterRun(TrackerRun):
    """An exporter of a program, for the runs of this process."""

    def __init__(self, exporter: BaseExporter) -> None:
        self._exporter, self.title = exporter, f"the exporter {exporter.name}"

    @classmethod
    def open(cls, settings: Any, run: TrackedRun) -> TrackerRun:
        """Never called: whoever made the exporter opens it."""
        raise NotImplementedError

    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        self._exporter.export_metrics(dict(values), step)

    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        self._exporter.export_rollouts([json.loads(line) for line in lines])

    def _finish(self, *, failed: bool) -> None:
        self._exporter.teardown()
