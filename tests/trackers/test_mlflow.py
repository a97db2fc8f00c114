"""MLflow: how values and names are put to it, and what arrives in its store of files, where it is installed."""

import json
import os
import posixpath
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.trackers.mlflow import batches, fit_name, logged_as, names_for, params_of, shortened

needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed (make test-mlflow)")

PROGRAM = """
import json, os, sys
from omegaconf import OmegaConf
from nemo_gym.trackers.base import tracking

with tracking(OmegaConf.create(json.loads(sys.argv[1])), ["ng_collect_rollouts", "+limit=3"]) as tracker:
    if tracker is not None:
        tracker.log({"a/pass@1": 0.5, "a/done": True, "a/count": 2, "a/model": "m", "a/none": None, "": 1.0})
        tracker.log({"a/pass@1": 0.75}, 3)
        tracker.log_rollouts([b'{"reward":1.0}', '{"text":"h\\u00e9"}'.encode()])
    if "--raise" in sys.argv:
        raise SystemExit(3)
assert not any(name.startswith("MLFLOW") for name in set(os.environ) - set(json.loads(sys.argv[2]))), dict(os.environ)
"""


def run_program(config: dict[str, Any], *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    environment |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(config), json.dumps(list(environment)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def settings_for(uri: str) -> dict[str, Any]:
    return {"mlflow_tracking_uri": uri, "mlflow_experiment_name": "my experiment", "mlflow_run_name": "a run"}


def test_numbers_are_metrics_and_texts_are_tags() -> None:
    logged = logged_as({"a/mean": 0.5, "b": 3, "c": True, "d": False, "model": "m", "nothing": None, "list": [1]})

    assert logged.metrics == {"a/mean": 0.5, "b": 3.0, "c": 1.0, "d": 0.0}
    assert logged.tags == {"model": "m"}


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("agent/mean/reward", "agent/mean/reward"),
        ("pass@4", "pass_at_4"),
        ("a b:c-d.e_f", "a b:c-d.e_f"),
        ("a[0]{x}=%", "a_0__x___"),
        ("/a", "_/a"),
        ("a//b/", "a/_/b/_"),
        ("./a/../b/.", "_/a/__/b/_"),
        ("..a", "__a"),
        ("", "_"),
        ("größe", "größe"),
    ],
)
def test_names_are_made_fit(name: str, fitting: str) -> None:
    assert fit_name(name) == fitting


@pytest.mark.parametrize("name", ["x" * 1000, "a/" * 300, "../" * 200, "@" * 249, "/" * 251, "x" * 122 + "/./" * 50])
def test_every_name_is_one_that_mlflow_takes(name: str) -> None:
    fitting = fit_name(name)

    assert len(fitting) <= 250
    assert re.fullmatch(r"[/\w.\- :]+", fitting)
    assert posixpath.normpath(fitting) == fitting
    assert not fitting.startswith(("/", ".."))


def test_what_is_too_long_loses_its_middle() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcd___ijk"
    assert fit_name("a" * 200 + "b" * 200) == "a" * 124 + "___" + "b" * 123


def test_names_that_would_become_the_same_stay_apart() -> None:
    assert names_for(["a@b", "a_at_b", "a%", "a&", "a'"]) == {
        "a@b": "a_at_b",
        "a_at_b": "a_at_b_2",
        "a%": "a_",
        "a&": "a__2",
        "a'": "a__3",
    }
    assert max(map(len, names_for(["x" * 300, "x" * 301]).values())) <= 250


def test_a_configuration_becomes_flat_parameters() -> None:
    config = {
        "limit": 3,
        "deep": {"list": ["a", {"b": True}], "none": None, "empty": {}},
        "ratio": 0.5,
        "long": "x" * 9000,
    }

    params = params_of(config)

    assert params.pop("long") == shortened("x" * 9000, 6000)
    assert params == {"limit": "3", "deep.list_0_": "a", "deep.list_1_.b": "true", "ratio": "0.5"}


def test_batches_have_as_many_entries_and_bytes_as_mlflow_takes() -> None:
    many = [(f"n{number}", "v") for number in range(250)]
    assert [len(batch) for batch in batches(many, 100)] == [100, 100, 50]

    large = [(f"n{number}", "\u00e9" * 6000) for number in range(100)]
    sizes = [len(json.dumps(batch)) for batch in batches(large, 100)]
    assert len(sizes) == 5
    assert max(sizes) < 1_000_000
    assert list(batches([], 100)) == []


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="MLflow is installed")
def test_without_mlflow_the_warning_says_what_to_install() -> None:
    done = run_program(settings_for("http://127.0.0.1:9"))

    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert "MLflow is configured but no run could be opened, so nothing is uploaded" in warning
    assert "pip install -c constraints.txt -e '.[mlflow]'" in warning


@needs_mlflow
def test_a_run_arrives_in_a_store_of_files_without_secrets(tmp_path: Path) -> None:
    config = {**settings_for(tmp_path.as_uri()), "mlflow_tracking_token": "planted1", "other_api_key": "planted2"}
    config["list"] = list(range(150))

    first, second = run_program(config), run_program(config, "--raise")

    assert (first.returncode, second.returncode) == (0, 3), first.stderr + second.stderr
    assert "did not take" not in first.stderr
    stored = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(b"planted" in content for content in stored.values())
    (experiment,) = {path.parent for path in tmp_path.glob("*/meta.yaml")} - {tmp_path / "0"}
    ended = sorted((run / "meta.yaml").read_text().count("status: 3") for run in experiment.iterdir() if run.is_dir())
    assert ended == [0, 1]  # the second run raised
    for run in (path for path in experiment.iterdir() if path.is_dir()):
        check_run(run)


def check_run(run: Path) -> None:
    assert "run_name: a run" in (run / "meta.yaml").read_text()
    values = [line.split()[1:] for line in (run / "metrics/a/pass_at_1").read_text().splitlines()]
    assert values == [["0.5", "0"], ["0.75", "3"]]
    assert {name: (run / "metrics" / name).read_text().split()[1] for name in ("a/done", "a/count", "_")} == {
        "a/done": "1.0",
        "a/count": "2.0",
        "_": "1.0",
    }
    assert (run / "tags/a/model").read_text() == "m"
    assert (run / "tags/mlflow.source.name").read_text() == "ng_collect_rollouts +limit=3"
    assert not (run / "metrics/a/none").exists()
    assert (run / "params/list_149_").read_text() == "149"
    assert json.loads((run / "artifacts/global_config.json").read_text())["other_api_key"] == "****"
    table = json.loads((run / "artifacts/rollouts.json").read_text())
    assert table == {"columns": ["Rollout"], "data": [['{"reward":1.0}'], ['{"text":"h\u00e9"}']]}
    assert json.loads((run / "tags/mlflow.loggedArtifacts").read_text()) == [{"path": "rollouts.json", "type": "table"}]


class Refusing(BaseHTTPRequestHandler):
    """A server of MLflow's that says no, and remembers who asked."""

    asked: list[str | None]

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Authorization"))
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"not you")

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[str | None]]]:
    Refusing.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", Refusing.asked
        server.shutdown()


@needs_mlflow
def test_a_server_that_refuses_costs_one_warning_and_is_shown_the_token(refusing: tuple[str, list[str | None]]) -> None:
    address, asked = refusing

    done = run_program({**settings_for(address), "mlflow_tracking_token": "the-token"})

    assert done.returncode == 0, done.stderr
    assert set(asked) == {"Bearer the-token"}
    assert done.stderr.count("MLflow is configured but no run could be opened, so nothing is uploaded") == 1
    assert "the-token" not in done.stderr


@pytest.mark.parametrize("missing", ["mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "masked"])
def test_without_complete_settings_there_is_no_run(missing: str) -> None:
    from nemo_gym.config_types import MLFlowConfig

    settings = settings_for("http://127.0.0.1:9")
    assert MLFlowConfig.model_validate(settings).is_available
    settings |= {"mlflow_tracking_token": "****"} if missing == "masked" else {missing: None}
    assert not MLFlowConfig.model_validate(OmegaConf.to_container(OmegaConf.create(settings))).is_available
