"""The socket for experiment trackers: what a run expects of one, which there are, and how they are opened together.

A tracker is one module of this package, with a subclass of `TrackerRun`, and one line of `TRACKERS`. The module, and
with it the tracker's library, is loaded only when its settings are complete, or when the program has loaded the library
itself. All trackers that are configured get everything. One that fails costs one warning line and never a rollout: the
results are on disk.
"""

import copy
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.secrets import mask_secrets, mask_url_passwords
from nemo_gym.errors import listed
from nemo_gym.keys import MASK, RESULTS_DIR_KEY_NAME
from nemo_gym.paths import RESULTS_DIR
from nemo_gym.schemas.server_config import ExporterConfig, MLFlowConfig, WANDBConfig

logger = logging.getLogger(__name__)

ROLLOUT_COLUMN = "Rollout"
"""The one column of the table of rollouts: a rollout as JSON."""


class Tracker(Protocol):
    """Where a run sends its results, be it one tracker or several; it never raises."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Take flat values."""

    def log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Take rollouts, one line of JSON each."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run when it is opened."""

    config: Mapping[str, Any]
    """The whole configuration as plain data, its secrets masked."""
    folder: Path
    """Where the tracker may keep files; it need not exist."""
    command: Sequence[str] = ()
    """The command line to record, its secrets masked; the real one may hold some."""


class TrackerRun(ABC):
    """An open run of one tracker. Its public methods never raise; those that an implementation gives may."""

    title: str
    """The tracker's name for people."""

    @classmethod
    def active(cls) -> "TrackerRun | None":
        """The run that the program has opened without us, for trackers that know of such; it is never closed here."""
        return None

    @classmethod
    @abstractmethod
    def open(cls, settings: Any, run: TrackedRun) -> "TrackerRun":
        """Open a run with complete `settings` (those of the tracker's line in `TRACKERS`)."""

    @abstractmethod
    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        """Send flat values."""

    @abstractmethod
    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Send rollouts, one line of JSON each, as a table."""

    @abstractmethod
    def _finish(self, *, failed: bool) -> None:
        """Send what is left and close the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log flat values."""
        self._try("the metrics", lambda: self._log_metrics(values, step))

    def log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Log every rollout, one line of JSON each, as a table."""
        logger.info("Uploading the rollouts to %s", self.title)
        self._try("the rollouts", lambda: self._log_rollouts(lines))

    def finish(self, *, failed: bool = False) -> None:
        """Send what is left and close the run."""
        self._try("the end of the run", lambda: self._finish(failed=failed))

    def _try(self, what: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the results are on disk
            logger.warning("%s did not take %s: %s", self.title, what, _first_line(error))


class TrackerEntry(NamedTuple):
    """One line of `TRACKERS`."""

    title: str
    settings: type[ExporterConfig]
    library: str
    """What the tracker's module imports when a run is opened."""
    place: str
    """`module:Class` of its `TrackerRun`."""
    switch: str
    """A setting that says nothing else: without it there is no run."""
    optional: tuple[str, ...] = ()
    """Settings that it can do without."""

    def load(self) -> type[TrackerRun]:
        """The class behind the line."""
        module, _, name = self.place.partition(":")
        loaded: type[TrackerRun] = getattr(import_module(module), name)
        return loaded

    def active(self) -> TrackerRun | None:
        """The run that the program has opened itself; without the library there is none, and nothing is loaded."""
        is_loaded = {self.library, self.place.partition(":")[0]} & sys.modules.keys()
        return self.load().active() if is_loaded else None

    def open(self, config: DictConfig, command: Sequence[str]) -> TrackerRun | None:
        """The run that `config` asks for; None when it asks for none, or with a warning when it cannot be opened."""
        try:
            settings = self.settings.model_validate({key: config.get(key) for key in self.settings.model_fields})
            if not settings.is_available:
                self._warn_of_gaps(settings)
                return None
            folder = Path(config.get(RESULTS_DIR_KEY_NAME) or RESULTS_DIR)
            return self.load().open(settings, TrackedRun(_shown(config), folder, command))
        except Exception as error:  # noqa: BLE001 - as above
            problem = "%s is configured but no run could be opened, so nothing is uploaded: %s"
            logger.warning(problem, self.title, _first_line(error))
            return None

    def _warn_of_gaps(self, settings: ExporterConfig) -> None:
        """Say what is missing where somebody began to configure it."""
        given = settings.model_dump()
        if not given[self.switch]:
            return
        lacking = [key for key, it in given.items() if it == MASK or (not it and key not in self.optional)]
        logger.warning(
            "%s is configured only in part, so nothing is uploaded: %s is set, but not %s; add it to env.yaml or pass "
            "+%s=<value>",
            self.title,
            self.switch,
            listed(lacking),
            lacking[0],
        )


TRACKERS = {
    "wandb": TrackerEntry(
        "Weights & Biases",
        WANDBConfig,
        "wandb",
        "nemo_gym.trackers.wandb:WandbRun",
        switch="wandb_project",
        optional=("wandb_api_key",),
    ),
    "mlflow": TrackerEntry(
        "MLflow",
        MLFlowConfig,
        "mlflow",
        "nemo_gym.trackers.mlflow:MlflowRun",
        switch="mlflow_experiment_name",
        optional=("mlflow_tracking_token",),
    ),
}

_OPEN: dict[str, TrackerRun] = {}
"""The runs that are open in this process, by the names of their trackers."""


class _Together:
    """Several trackers as one: each gets everything, whatever happens to the others."""

    def __init__(self, runs: Sequence[TrackerRun]) -> None:
        self._runs = runs

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log flat values."""
        for run in self._runs:
            run.log(values, step)

    def log_rollouts(self, lines: Iterable[bytes]) -> None:
        """Log every rollout; the lines are read once and kept for all."""
        try:
            kept = list(lines)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("The rollouts cannot be read, so they are not uploaded: %s", _first_line(error))
            return
        for run in self._runs:
            run.log_rollouts(kept)


def active_tracker() -> Tracker | None:
    """What is open in this process, whoever opened it; None when nothing is."""
    return _as_one([run for name in _names() if (run := _active(name)) is not None])


@contextmanager
def tracking(config: DictConfig, command: Sequence[str] = ()) -> Iterator[Tracker | None]:
    """All trackers that `config` asks for, open while inside; None when it asks for none or none can be opened.

    `command` is what is recorded as the command line. A run that is open in this process already is used instead of
    a new one, and left open.
    """
    with ExitStack() as stack:
        runs = [_active(name) or stack.enter_context(opened(name, config, command)) for name in _names()]
        yield _as_one([run for run in runs if run is not None])


@contextmanager
def opened(name: str, config: DictConfig, command: Sequence[str] = ()) -> Iterator[TrackerRun | None]:
    """One tracker's new run, open while inside; None when `config` asks for none or it cannot be opened."""
    run = TRACKERS[name].open(config, command)
    if run is None:
        yield None
        return
    register(name, run)
    failed = True
    try:
        yield run
        failed = False
    finally:
        unregister(name)
        run.finish(failed=failed)


def register(name: str, run: TrackerRun) -> None:
    """Let every run of this process use `run`, which whoever opened it closes; the name may be one of no line."""
    _OPEN[name] = run


def unregister(name: str) -> None:
    """Let no run use it any more."""
    _OPEN.pop(name, None)


def _names() -> list[str]:
    return list({**TRACKERS, **_OPEN})


def _active(name: str) -> TrackerRun | None:
    return _OPEN.get(name) or TRACKERS[name].active()


def _as_one(runs: Sequence[TrackerRun]) -> Tracker | None:
    if len(runs) > 1:
        return _Together(runs)
    return runs[0] if runs else None


def _shown(config: DictConfig) -> dict[str, Any]:
    masked = copy.deepcopy(config)
    mask_secrets(masked)
    shown: Any = OmegaConf.to_container(masked, resolve=False)
    return dict(shown)


def _first_line(error: Exception) -> str:
    return mask_url_passwords(next(iter(str(error).splitlines()), type(error).__name__))
