"""PUBLIC: experiment trackers by the names of the original; `nemo_gym.trackers` does the work.

Commands and the collector open the trackers that are configured themselves. A program that calls `setup_exporters` has
them open until `teardown_exporters` or its end, and every run it makes meanwhile uses those.
"""

import atexit
import logging
from importlib import import_module
from typing import Any

from omegaconf import DictConfig

from nemo_gym.exporters.base import BaseExporter, ExporterRun
from nemo_gym.schemas.server_config import ExporterConfig, MLFlowConfig, WANDBConfig
from nemo_gym.trackers.base import register, unregister

logger = logging.getLogger(__name__)

EXPORTER_REGISTRY: dict[str, tuple[type[ExporterConfig], str]] = {
    "wandb": (WANDBConfig, "nemo_gym.exporters.wandb:WandbExporter"),
    "mlflow": (MLFlowConfig, "nemo_gym.exporters.mlflow:MLflowExporter"),
}
"""Settings and `module:Class` of each; the module is imported only when the settings are complete."""

_EXPORTERS: dict[str, BaseExporter] = {}


def get_exporters() -> list[BaseExporter]:
    """Those that are open."""
    return list(_EXPORTERS.values())


def setup_exporters(global_config_dict: DictConfig) -> list[BaseExporter]:
    """Open every exporter whose settings are complete, after closing those of before; a failure is a warning."""
    teardown_exporters()
    for name, (settings_class, place) in EXPORTER_REGISTRY.items():
        settings = {key: global_config_dict.get(key) for key in settings_class.model_fields}
        try:
            if not settings_class.model_validate(settings).is_available:
                continue
            exporter = _load(place)(global_config_dict)
            exporter.setup()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the results are on disk
            logger.warning("the exporter %s is configured but could not be opened: %s", name, error)
            continue
        exporter.export_config()
        _EXPORTERS[name] = exporter
        register(name, exporter.as_tracker())
    atexit.register(teardown_exporters)
    return get_exporters()


def teardown_exporters() -> None:
    """Close those that are open."""
    atexit.unregister(teardown_exporters)
    while _EXPORTERS:
        name, exporter = _EXPORTERS.popitem()
        unregister(name)
        ExporterRun(exporter).finish()


def export_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
    """Log flat values with all that are open."""
    for exporter in get_exporters():
        exporter.export_metrics(metrics, step)


def export_rollouts(rollouts: list[dict[str, Any]]) -> None:
    """Log rollouts with all that are open."""
    for exporter in get_exporters():
        exporter.export_rollouts(rollouts)


def _load(place: str) -> type[BaseExporter]:
    module, _, name = place.partition(":")
    loaded: type[BaseExporter] = getattr(import_module(module), name)
    return loaded
