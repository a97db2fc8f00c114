"""Data sets between a registry and the hub, under the names of the original."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym import global_config
from nemo_gym.dataset_orchestrator import (
    RegistryError,
    delete_jsonl_dataset_from_gitlab,
    delete_jsonl_dataset_from_gitlab_cli,
    upload_jsonl_dataset_to_hf_maybe_delete,
)
from nemo_gym.errors import ConfigError
from nemo_gym.hf_utils import (
    check_jsonl_format,
    create_huggingface_client,
    download_hf_dataset_as_jsonl,
    upload_jsonl_dataset,
)
from nemo_gym.schemas.data_config import (
    DownloadJsonlDatasetHuggingFaceConfig,
    UploadJsonlDatasetHuggingFaceConfig,
    UploadJsonlDatasetHuggingFaceMaybeDeleteConfig,
)


class Registry(HTTPServer):
    """A model registry that can only delete."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = {"mine"}
        self.asked: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/registry"


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_DELETE(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers["authorization"], body))
        if self.headers["authorization"] != "Bearer right":
            self.send_error(403)
        elif body["name"] not in self.server.models:
            self.send_error(404)
        else:
            self.server.models.remove(body["name"])
            self.send_response(200)
            self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    server = Registry()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    configure(monkeypatch, mlflow_tracking_uri=server.url, mlflow_tracking_token="right")
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def configure(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create(settings))


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_data_set_is_deleted_only_if_somebody_agrees(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "n\n", "\n"):
        answer(monkeypatch, text)
        delete_jsonl_dataset_from_gitlab("mine")
    assert registry.asked == []
    answer(monkeypatch, "Yes\n")
    delete_jsonl_dataset_from_gitlab("mine")

    assert registry.asked == [("/registry/api/2.0/mlflow/registered-models/delete", "Bearer right", {"name": "mine"})]
    assert registry.models == set()
    assert "Delete the data set 'mine' from" in capsys.readouterr().out
    answer(monkeypatch, "y\n")
    with pytest.raises(ConfigError, match="there is no data set 'mine'"):
        delete_jsonl_dataset_from_gitlab("mine")


def test_a_registry_that_refuses_or_is_not_there_is_named(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, mlflow_tracking_uri=registry.url, mlflow_tracking_token="wrong")
    answer(monkeypatch, "y\n")
    with pytest.raises(RegistryError, match="refuses to delete 'mine': 403"):
        delete_jsonl_dataset_from_gitlab("mine")
    configure(monkeypatch, mlflow_tracking_uri="http://127.0.0.1:9", mlflow_tracking_token="right")
    answer(monkeypatch, "y\n")
    with pytest.raises(RegistryError, match="cannot be reached"):
        delete_jsonl_dataset_from_gitlab("mine")
    configure(monkeypatch, mlflow_tracking_token="right")
    with pytest.raises(ConfigError, match="needs mlflow_tracking_uri: put them into"):
        delete_jsonl_dataset_from_gitlab("mine")
    configure(monkeypatch, mlflow_tracking_uri="file:///etc", mlflow_tracking_token="right")
    with pytest.raises(ConfigError, match="must begin with https"):
        delete_jsonl_dataset_from_gitlab("mine")


def test_the_command_deletes_too(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, dataset_name="mine", mlflow_tracking_uri=registry.url, mlflow_tracking_token="right")
    monkeypatch.setattr(sys, "argv", ["program"])
    answer(monkeypatch, "y\n")
    delete_jsonl_dataset_from_gitlab_cli()
    assert registry.models == set()


def upload_arguments(tmp_path: Path, rows: str) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "config.yaml").write_text("mine: {resources_servers: {sums: {entrypoint: app.py, domain: math}}}")
    return {
        "hf_token": "t",
        "hf_organization": "o",
        "hf_collection_name": "C",
        "hf_collection_slug": "1",
        "input_jsonl_fpath": "rows.jsonl",
        "resource_config_path": "config.yaml",
        "dataset_name": "mine",
    }


def test_a_data_set_goes_to_the_hub_and_then_from_the_registry(
    hub: Any, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    given = upload_arguments(tmp_path, '{"responses_create_params": {"input": "hi"}}\n')

    upload_jsonl_dataset_to_hf_maybe_delete(UploadJsonlDatasetHuggingFaceConfig(**given))
    assert registry.asked == []
    answer(monkeypatch, "y\n")
    moved = UploadJsonlDatasetHuggingFaceMaybeDeleteConfig(**given, delete_from_gitlab=True)
    upload_jsonl_dataset_to_hf_maybe_delete(moved)
    assert registry.models == set()
    unnamed = UploadJsonlDatasetHuggingFaceConfig(**{**given, "dataset_name": None})
    with pytest.raises(ConfigError, match="needs the data set's name"):
        upload_jsonl_dataset_to_hf_maybe_delete(unnamed, delete_from_gitlab=True)


def test_rows_are_checked_before_they_go_to_the_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for rows, is_good in (
        ('{"responses_create_params": {}}\n\n', True),
        ('{"responses_create_params": {}}\n{}\n', False),
        ("no JSON\n", False),
        ("", False),
    ):
        given = upload_arguments(tmp_path, rows)
        assert check_jsonl_format("rows.jsonl") is is_good
    upload_arguments(tmp_path, "{}\n")
    with pytest.raises(ConfigError, match="is not uploaded"):
        upload_jsonl_dataset(UploadJsonlDatasetHuggingFaceConfig(**given))


def test_the_hub_is_read_under_the_former_names(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n'})

    assert "train.jsonl" in create_huggingface_client("t").list_repo_files("o/d", repo_type="dataset")
    download_hf_dataset_as_jsonl(
        DownloadJsonlDatasetHuggingFaceConfig(repo_id="o/d", split="train", output_fpath="out/t.jsonl")
    )
    assert json.loads(Path("out/t.jsonl").read_text()) == {"a": 1}
