"""MLflow: one run per collection, with the configuration, the metrics and, if wanted, every rollout.

Spoken through `MlflowClient`, so the process's own active run, if a program has one, is left alone. MLflow refuses a
whole batch over one name or value it does not like, hence the mapping: names are made fit, texts become tags.
"""

import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.config_types import MLFlowConfig
from nemo_gym.errors import ConfigError
from nemo_gym.paths import install_command
from nemo_gym.trackers.base import ROLLOUT_COLUMN, TRACKERS, TrackedRun, TrackerRun

logger = logging.getLogger(__name__)

CONFIG_FILE = "global_config.json"
ROLLOUTS_FILE = "rollouts.json"

_MAX_NAME = 250
_MAX_PARAM = 6_000
_MAX_TAG = 8_000
_MAX_PARAMS_OR_TAGS_AT_ONCE = 100
_MAX_METRICS_AT_ONCE = 1_000
_MAX_BYTES_AT_ONCE = 900_000
"""MLflow takes a million; the rest is for what is around the entries."""
_CUT = "___"
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
_TABLE_TAG = "mlflow.loggedArtifacts"
_SOURCE_TAG = "mlflow.source.name"
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # MLflow would wait for 120 s and try 7 times more, for each request
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""What holds for our calls unless the environment says otherwise."""
_TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"


class Logged(NamedTuple):
    """Flat values in MLflow's terms."""

    metrics: dict[str, float]
    tags: dict[str, str]


class MlflowRun(TrackerRun):
    """An open run; logging to it never raises."""

    title = TRACKERS["mlflow"].title

    def __init__(self, client: Any, run_id: str, token: str | None = None) -> None:
        self._client, self._run_id, self._token = client, run_id, token

    @classmethod
    def open(cls, settings: MLFlowConfig, run: TrackedRun) -> "MlflowRun":
        """Open a run in the experiment of that name, which is made if there is none, and log the configuration."""
        if find_spec("mlflow") is None:
            raise ConfigError(f"MLflow is not installed; install it with: {install_command('mlflow')}")
        logger.info("Opening the MLflow run %s/%s", settings.mlflow_experiment_name, settings.mlflow_run_name)
        with _environment(settings.mlflow_tracking_token):
            from mlflow.tracking import MlflowClient

            client = MlflowClient(tracking_uri=settings.mlflow_tracking_uri)
            experiment_id = _experiment(client, str(settings.mlflow_experiment_name))
            tags = {_SOURCE_TAG: shortened(shlex.join(run.command), _MAX_TAG)} if run.command else {}
            made = client.create_run(experiment_id, tags=tags, run_name=settings.mlflow_run_name)
        opened = cls(client, made.info.run_id, settings.mlflow_tracking_token)
        opened._try("the configuration", lambda: opened._log_config(run.config))
        return opened

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with _environment(self._token):
            self._client.log_text(self._run_id, json.dumps(config, indent=2, default=str), CONFIG_FILE)
            for some in batches(params_of(config).items(), _MAX_PARAMS_OR_TAGS_AT_ONCE):
                self._client.log_batch(self._run_id, params=[Param(name, value) for name, value in some])

    def _log_metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        from mlflow.entities import Metric, RunTag

        logged, now_ms = logged_as(values), int(time.time() * 1000)
        with _environment(self._token):
            for numbers in batches(logged.metrics.items(), _MAX_METRICS_AT_ONCE):
                metrics = [Metric(name, value, now_ms, step or 0) for name, value in numbers]
                self._client.log_batch(self._run_id, metrics=metrics)
            for texts in batches(logged.tags.items(), _MAX_PARAMS_OR_TAGS_AT_ONCE):
                self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in texts])

    def _log_rollouts(self, lines: Iterable[bytes]) -> None:
        """A table as `MlflowClient.log_table` writes it, which would need pandas and all rollouts in memory."""
        with tempfile.TemporaryDirectory(prefix="nemo_gym_mlflow_") as folder:
            table = Path(folder, ROLLOUTS_FILE)
            _write_table(lines, table)
            with _environment(self._token):
                self._client.log_artifact(self._run_id, str(table))
                shown = json.dumps([{"path": ROLLOUTS_FILE, "type": "table"}])
                self._client.set_tag(self._run_id, _TABLE_TAG, shown)

    def _finish(self, *, failed: bool) -> None:
        with _environment(self._token):
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def logged_as(values: Mapping[str, Any]) -> Logged:
    """Truth values as numbers, texts as tags, null not at all; names as MLflow takes them."""
    names = names_for(values)
    return Logged(
        {names[name]: float(value) for name, value in values.items() if isinstance(value, int | float)},
        {names[name]: shortened(value, _MAX_TAG) for name, value in values.items() if isinstance(value, str)},
    )


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration as flat parameters, `a.b[0]`, in names that MLflow takes; null is left out."""
    flat = dict(_leaves(config, ""))
    names = names_for(flat)
    return {names[name]: shortened(_text(value), _MAX_PARAM) for name, value in flat.items()}


def names_for(names: Iterable[str]) -> dict[str, str]:
    """A name that MLflow takes for each; no two are the same."""
    given: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        wanted = fitting = fit_name(name)
        count = 1
        while fitting in taken:
            count += 1
            fitting = f"{shortened(wanted, _MAX_NAME - 8)}_{count}"
        taken.add(fitting)
        given[name] = fitting
    return given


def fit_name(name: str) -> str:
    """`name` as MLflow takes it: few characters, a path without empty or dot parts, and not too long."""
    plain = _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
    return shortened("/".join(_fit_part(part) for part in plain.split("/")), _MAX_NAME)


def shortened(text: str, limit: int) -> str:
    """`text` with its middle left out if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    kept = limit - len(_CUT)
    return text[: kept - kept // 2] + _CUT + text[len(text) - kept // 2 :]


def batches(entries: Iterable[tuple[str, Any]], max_count: int) -> Iterator[list[tuple[str, Any]]]:
    """The entries in pieces that MLflow takes at once."""
    batch: list[tuple[str, Any]] = []
    size = 0
    for entry in entries:
        needed = len(json.dumps(entry))
        if batch and (len(batch) == max_count or size + needed > _MAX_BYTES_AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += needed
    if batch:
        yield batch


def _fit_part(part: str) -> str:
    if part.startswith(".."):  # MLflow refuses a name that begins so, whatever follows
        return part.replace(".", "_")
    return "_" if part in ("", ".") else part


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{path}[{index}]")
    elif node is not None:
        yield path, node


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _experiment(client: Any, name: str) -> str:
    """The experiment of that name, also when another run makes it at the same moment."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except Exception:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _write_table(lines: Iterable[bytes], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"columns": [ROLLOUT_COLUMN]})[:-1] + ', "data": [')
        for number, line in enumerate(lines):
            file.write((", " if number else "") + json.dumps([line.decode()], ensure_ascii=False))
        file.write("]}")


@contextmanager
def _environment(token: str | None) -> Iterator[None]:
    """MLflow takes its token and its patience from the environment, and offers no other way."""
    wanted = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    if token:
        wanted[_TOKEN_VARIABLE] = token
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
