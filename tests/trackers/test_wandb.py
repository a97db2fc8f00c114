"""The tracker, in W&B's own offline mode and before a stand-in of its server, and that its failures stay outside."""

import base64
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

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
PROGRAM_WITHOUT_KEY = """
import sys
from omegaconf import OmegaConf
from nemo_gym.trackers.base import tracking

config = OmegaConf.create({"wandb_project": "gym", "wandb_name": "a run", "results_dir": "results"})
with tracking(config) as run:
    if run is not None:
        run.log({"alpha/mean/reward": 0.5})
print("opened" if run else "not opened", sys.stdin.isatty())
"""
PROJECT = {"id": "p", "name": "gym", "entity": {"id": "e", "name": "me"}}
BUCKET = {"id": "b", "name": "run", "displayName": "a run", "config": "{}", "historyLineCount": 0, "project": PROJECT}


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


@contextmanager
def stand_in() -> Iterator[tuple[str, set[str]]]:
    """The address of a server that opens any run, and a set of the keys that it is asked with."""
    keys = set[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind, _, credentials = self.headers.get("Authorization", "").partition(" ")
            if kind == "Basic":
                keys.add(base64.b64decode(credentials).decode())
            opened = {"data": {"upsertBucket": {"bucket": BUCKET, "inserted": True}}}
            answer = json.dumps(opened if b"UpsertBucket" in asked else {"errors": [{"message": "not here"}]}).encode()
            self.send_response(200 if b"UpsertBucket" in asked else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Those of this process, without what they say about W&B, and with a home of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_", "NETRC"))}
    return {**clean, "WANDB_INIT_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT": "5", "HOME": str(home), **variables}


def wandb(home: Path, *arguments: str) -> None:
    """Run W&B's own command, which keeps in `home` what it is told."""
    command = [str(Path(sys.executable).with_name("wandb")), *arguments]
    subprocess.run(command, cwd=home, env=environment(home), capture_output=True, timeout=60, check=True)


def without_key(home: Path, **variables: str) -> tuple[int, str, str]:
    """Run a program whose configuration has no key, at a terminal that nobody answers.

    Returns its exit code, what it printed, and what the terminal shows.
    """
    master, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM_WITHOUT_KEY],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            timeout=120,
            cwd=home,
            env=environment(home, **variables),
            check=False,
        )
        os.write(terminal, b"end")
        return done.returncode, done.stdout, os.read(master, 1 << 16).decode(errors="replace")
    finally:
        os.close(master)
        os.close(terminal)


def test_the_key_of_the_environment_is_taken(tmp_path: Path) -> None:
    with stand_in() as (address, keys):
        done = without_key(tmp_path, WANDB_BASE_URL=address, WANDB_API_KEY="e" * 40)

    assert done[:2] == (0, "opened True\n"), done
    assert keys == {"api:" + "e" * 40}


def test_the_key_of_wandb_login_is_taken(tmp_path: Path) -> None:
    with stand_in() as (address, keys):
        wandb(tmp_path, "login", "--no-verify", f"--host={address}", "f" * 40)
        assert "f" * 40 in (tmp_path / ".netrc").read_text()
        done = without_key(tmp_path)

    assert done[:2] == (0, "opened True\n"), done
    assert keys == {"api:" + "f" * 40}


@pytest.mark.parametrize("is_set_by", ["WANDB_MODE", "wandb offline"])
def test_offline_mode_needs_no_key(is_set_by: str, tmp_path: Path) -> None:
    if is_set_by == "wandb offline":
        wandb(tmp_path, "offline")
    done = without_key(tmp_path, **({"WANDB_MODE": "offline"} if is_set_by == "WANDB_MODE" else {}))

    assert done[:2] == (0, "opened True\n"), done
    assert list((tmp_path / "results/wandb").glob("offline-run-*/*.wandb"))


def test_a_key_that_is_nowhere_costs_a_warning_and_is_not_asked_for(tmp_path: Path) -> None:
    code, printed, shown = without_key(tmp_path)

    assert (code, printed) == (0, "not opened True\n"), shown
    assert "Weights & Biases is configured but no run could be opened, so nothing is uploaded" in shown
    assert "+wandb_api_key=<key> or set WANDB_API_KEY; with WANDB_MODE=offline" in shown


@pytest.mark.parametrize("missing", [*SETTINGS, "masked"])
def test_without_complete_settings_there_is_no_run(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
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
