"""Trackers by the names of the original."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym import exporters
from nemo_gym.exporters.base import BaseExporter
from nemo_gym.schemas.server_config import ExporterConfig
from nemo_gym.trackers.base import active_tracker, tracking


class MineConfig(ExporterConfig):
    mine: str | None = None

    @property
    def is_available(self) -> bool:
        return self.mine is not None


class MineExporter(BaseExporter):
    name = "mine"

    def __init__(self, global_config_dict: DictConfig) -> None:
        super().__init__(global_config_dict)
        self.calls: list[Any] = []

    def setup(self) -> None:
        if self.global_config_dict.mine == "closed":
            raise ConnectionError("no network")
        self.calls.append("setup")

    def teardown(self) -> None:
        self.calls.append("teardown")

    def _log_config(self) -> None:
        self.calls.append("config")

    def _log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def _log_rollouts(self, rollouts: list[dict[str, Any]]) -> None:
        raise ConnectionError("too large")


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exporters.EXPORTER_REGISTRY, "mine", (MineConfig, f"{__name__}:MineExporter"))


def test_an_exporter_of_a_program_gets_what_is_exported_and_what_runs_log(caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"mine": "yes"})
    (exporter,) = exporters.setup_exporters(config)
    assert isinstance(exporter, MineExporter)

    exporters.export_metrics({"a": 1}, step=2)
    exporters.export_rollouts([{"reward": 1.0}])
    with tracking(config) as tracker:
        assert tracker is not None
        tracker.log({"b": 2})
    exporters.teardown_exporters()

    assert exporter.calls == ["setup", "config", ({"a": 1}, 2), ({"b": 2}, None), "teardown"]
    assert "the exporter mine did not take the rollouts: too large" in caplog.text
    assert exporters.get_exporters() == []
    assert active_tracker() is None


def test_setting_up_again_closes_what_was_open() -> None:
    (before,) = exporters.setup_exporters(OmegaConf.create({"mine": "yes"}))
    assert exporters.setup_exporters(OmegaConf.create({})) == []
    assert isinstance(before, MineExporter)
    assert before.calls[-1] == "teardown"


def test_an_exporter_that_cannot_be_opened_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert exporters.setup_exporters(OmegaConf.create({"mine": "closed"})) == []
    assert "the exporter mine is configured but could not be opened: no network" in caplog.text


def test_settings_that_are_none_leave_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"wandb_project": {"a": 1}, "wandb_name": "n", "wandb_api_key": "k", "mine": "yes"})
    assert [exporter.name for exporter in exporters.setup_exporters(config)] == ["mine"]
    exporters.teardown_exporters()
    assert "the exporter wandb is configured but could not be opened: 1 validation error" in caplog.text


def test_the_trackers_of_this_package_are_exporters() -> None:
    from nemo_gym.exporters.mlflow import MLflowExporter
    from nemo_gym.exporters.wandb import WandbExporter

    assert [exporter.name for exporter in (WandbExporter, MLflowExporter)] == list(exporters.EXPORTER_REGISTRY)[:2]
    with pytest.raises(Exception, match="Weights & Biases has no open run"), WandbExporter(OmegaConf.create({})):
        pass
