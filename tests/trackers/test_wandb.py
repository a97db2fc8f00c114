"""The tracker, in W&B's own offline mode: what arrives in its files, and that its failures stay outside."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_gym.trackers.wandb import WandbRun, wandb_run

SETTINGS = {"wandb_project": "gym", "wandb_name": "a run", "wandb_api_key": "0" * 40}

PROGRAM = """
import sys
from omegaconf import OmegaConf
from nemo_gym.exporters.wandb import wandb_run

config = OmegaConf.create({
    "wandb_project": "gym", "wandb_name": "a run", "wandb_api_key": "0" * 40,
    "results_dir": sys.argv[1], "other_api_key": "planted-secret", "limit": 3,
})
with wandb_run(config) as run:
    run.log({"alpha/mean/reward": 0.5})
    run.log_rollouts([b'{"reward":1.0}', b'{"reward":0.0}'])
"""


def test_a_run_is_written_in_offline_mode_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "+any_api_key=planted-secret"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"alpha/mean/reward" in written
    assert b"Rollouts" in written
    assert b'{\\"reward\\":1.0}' in written
    assert b"planted-secret" not in written
    assert b"0" * 40 not in written


@pytest.mark.parametrize("missing", [*SETTINGS, "masked"])
def test_without_complete_settings_there_is_no_run(missing: str) -> None:
    settings = {**SETTINGS, "wandb_api_key": "****"} if missing == "masked" else {**SETTINGS, missing: None}
    with wandb_run(OmegaConf.create(settings)) as run:
        assert run is None


def test_a_tracker_that_fails_is_reported_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, values: object) -> None:
            raise ConnectionError("no network")

        finish = log

    run = WandbRun(Broken())
    run.log({"a": 1})

    assert "did not take the metrics: no network" in caplog.text
