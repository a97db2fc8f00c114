"""The socket: which trackers a configuration opens, and that what happens to one of them stays with it."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.schemas.server_config import ExporterConfig
from nemo_gym.trackers import base
from nemo_gym.trackers.base import TRACKERS, TrackedRun, TrackerEntry, TrackerRun, active_tracker, tracking


class ListedConfig(ExporterConfig):
    listed_name: str | None = None

    @property
    def is_available(self) -> bool:
        return bool(self.listed_name)


class BrokenConfig(ExporterConfig):
    broken_name: str | None = None

    @property
    def is_available(self) -> bool:
        return bool(self.broken_name)


class ListedRun(TrackerRun):
    """Keeps what it gets."""

    title = "Listed"
    runs: list["ListedRun"] = []  # noqa: RUF012 - one list for the test

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.run, self.got, self.ended = name, run, list[Any](), list[bool]()
        self.runs.append(self)

    @classmethod
    def open(cls, settings: Any, run: TrackedRun) -> "ListedRun":
        return cls(str(settings.listed_name), run)

    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        self.got.append((dict(values), step))

    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        self.got.append(list(lines))

    def _finish(self, *, failed: bool) -> None:
        self.ended.append(failed)


class BrokenRun(ListedRun):
    """Opens and then takes nothing."""

    title = "Broken"

    @classmethod
    def open(cls, settings: Any, run: TrackedRun) -> "BrokenRun":
        if settings.broken_name == "closed":
            raise ConnectionError("https://me:hunter22@host is closed\nand more")
        return cls(str(settings.broken_name), run)

    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        raise ConnectionError("no network")

    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        raise MemoryError

    def _finish(self, *, failed: bool) -> None:
        raise TimeoutError("too late")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ListedRun]]:
    monkeypatch.setitem(
        TRACKERS, "broken", TrackerEntry("Broken", BrokenConfig, "none", f"{__name__}:BrokenRun", "broken_name")
    )
    monkeypatch.setitem(
        TRACKERS, "listed", TrackerEntry("Listed", ListedConfig, "none", f"{__name__}:ListedRun", "listed_name")
    )
    yield ListedRun.runs
    ListedRun.runs.clear()
    assert base._OPEN == {}


def test_only_what_is_configured_is_opened(runs: list[ListedRun]) -> None:
    with tracking(OmegaConf.create({"limit": 3})) as tracker:
        assert tracker is None
        assert active_tracker() is None

    assert runs == []


def test_a_tracker_is_told_the_masked_configuration_and_where_to_keep_files(runs: list[ListedRun]) -> None:
    config = OmegaConf.create({"listed_name": "a", "any_api_key": "planted", "results_dir": "there"})
    with tracking(config, ["ng_x", "+limit=3"]):
        pass

    (run,) = runs
    assert run.run.config == {"listed_name": "a", "any_api_key": "****", "results_dir": "there"}
    assert (run.run.folder, run.run.command) == (Path("there"), ["ng_x", "+limit=3"])
    assert config.any_api_key == "planted"


def test_all_that_are_configured_get_everything_whatever_happens_to_the_others(
    runs: list[ListedRun], caplog: pytest.LogCaptureFixture
) -> None:
    with tracking(OmegaConf.create({"listed_name": "a", "broken_name": "b"})) as tracker:
        assert tracker is not None
        tracker.log({"reward": 0.5})
        tracker.log({"reward": 1.0}, 7)
        tracker.log_rollouts(line for line in (b"{}", b"[]"))

    broken, listed = runs
    assert (broken.name, listed.name) == ("b", "a")
    assert listed.got == [({"reward": 0.5}, None), ({"reward": 1.0}, 7), [b"{}", b"[]"]]
    assert listed.ended == [False]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "Broken did not take the metrics: no network",
        "Broken did not take the metrics: no network",
        "Broken did not take the rollouts: MemoryError",
        "Broken did not take the end of the run: too late",
    ]


def test_rollouts_that_cannot_be_read_cost_one_warning(runs: list[ListedRun], caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> Iterator[bytes]:
        yield b"{}"
        raise OSError("the disk is gone")

    with tracking(OmegaConf.create({"listed_name": "a", "broken_name": "b"})) as tracker:
        assert tracker is not None
        tracker.log_rollouts(lines())

    assert runs[1].got == []
    assert caplog.text.count("the disk is gone") == 1


@pytest.mark.parametrize("name", ["closed", {"not": "a text"}])
def test_a_tracker_that_cannot_be_opened_leaves_the_others_alone(
    name: object, runs: list[ListedRun], caplog: pytest.LogCaptureFixture
) -> None:
    with tracking(OmegaConf.create({"listed_name": "a", "broken_name": name})) as tracker:
        assert tracker is runs[0]

    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("Broken is configured but no run could be opened, so nothing is uploaded: ")
    assert "hunter22" not in warning
    assert "\n" not in warning


def test_a_run_inside_another_uses_what_is_open_and_leaves_it_open(runs: list[ListedRun]) -> None:
    config = OmegaConf.create({"listed_name": "a"})
    with tracking(config) as outer:
        with tracking(config) as inner:
            assert inner is outer
            assert active_tracker() is outer
        assert runs[0].ended == []

    assert runs[0].ended == [False]
    assert active_tracker() is None


def test_a_run_that_raises_is_closed_as_failed(runs: list[ListedRun]) -> None:
    with pytest.raises(KeyboardInterrupt), tracking(OmegaConf.create({"listed_name": "a"})):
        raise KeyboardInterrupt

    assert runs[0].ended == [True]


def test_a_tracker_that_is_not_configured_is_not_loaded() -> None:
    probe = (
        "import sys; from omegaconf import OmegaConf; from nemo_gym.trackers.base import active_tracker, tracking\n"
        "with tracking(OmegaConf.create({'wandb_name': 'n', 'mlflow_tracking_uri': 'u'})) as tracker:\n"
        "    assert tracker is None and active_tracker() is None\n"
        "print(sorted({'wandb', 'mlflow', 'nemo_gym.trackers.wandb', 'nemo_gym.trackers.mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"wandb_project": "p", "wandb_name": "n", "wandb_api_key": "****"}, "but not wandb_api_key"),
        ({"wandb_project": "p"}, "wandb_project is set, but not wandb_name;"),
        ({"mlflow_experiment_name": "e", "mlflow_run_name": "r"}, "is set, but not mlflow_tracking_uri;"),
    ],
)
def test_a_tracker_that_is_configured_in_part_says_what_is_missing(
    config: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tracking(OmegaConf.create(config)) as tracker:
        assert tracker is None

    (record,) = caplog.records
    assert "is configured only in part, so nothing is uploaded" in record.getMessage()
    assert said in record.getMessage()
