"""A server written by somebody else, running in each of the ways a server can run."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.handover import child_environment, write_config_file
from nemo_gym.global_config import GlobalConfigDictParser

PROBE_APP = Path(__file__).with_name("probe_app.py.txt").read_text()
SECRET = "a secret of this test run"


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cookies(self) -> dict[str, str]:
        jar: SimpleCookie = SimpleCookie()
        for value in self.headers.get_all("set-cookie") or []:
            jar.load(value)
        return {name: morsel.value for name, morsel in jar.items()}


@dataclass
class Running:
    """A server that answers, and what it printed."""

    config: DictConfig
    name: str
    url: str
    marks: Path
    process: subprocess.Popen[str]
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        cookies: dict[str, str] | None = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        request = urllib.request.Request(self.url + path, data=data if method == "POST" else None, method=method)
        request.add_header("content-type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        if cookies:
            request.add_header("cookie", "; ".join(f"{name}={value}" for name, value in cookies.items()))
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())


Start = Callable[..., Running]


def write_server(
    root: Path, *, server_type: str = "resources_servers", name: str = "probe", app: str | None = None
) -> Path:
    folder = root / server_type / name
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(PROBE_APP if app is None else app)
    (folder / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\n")
    return folder


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert process.poll() is None, f"ended early: {log.read_text()}"
        assert time.monotonic() < deadline, f"never ready: {log.read_text()}"
        time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from starter(tmp_path)


def starter(tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start_server(mode: str, folder: Path, *, block: dict[str, Any] | None = None, **top_level: Any) -> Running:
        marks = tmp_path / "marks.txt"
        marks.touch()
        inner = {"entrypoint": "app.py", "domain": "other", "greeting": "hello", "marks": str(marks), **(block or {})}
        if mode == "workers":
            inner["num_workers"] = 2
        instance = {"probe_one": {folder.parent.name: {folder.name: inner}}}
        config = GlobalConfigDictParser().parse_no_environment(
            OmegaConf.create({**instance, "session_secret": SECRET, **top_level})
        )
        address = config.probe_one[folder.parent.name][folder.name]
        log = tmp_path / f"{mode}.log"
        base = os.environ | {"NEMO_GYM_EXTRA_ROOTS": str(folder.parent.parent), "PYTHONUNBUFFERED": "1"}
        env = child_environment(config, write_config_file(config), "probe_one", base)
        url = f"http://{address.host}:{address.port}"
        with log.open("w") as output:
            if mode == "hosted":
                env.pop("NEMO_GYM_CONFIG_PATH")
                process, events = start_host(["probe_one"], env, output)
                running.append(process)
                with events:
                    found = [json.loads(events.readline())]
                return Running(config, "probe_one", url, marks, process, log, found)
            env["PYTHONPATH"] = str(folder)
            process = subprocess.Popen(
                [sys.executable, "app.py"], cwd=folder, env=env, stdout=output, stderr=output, text=True
            )
        running.append(process)
        wait_for(lambda: answers(url), process, log)
        return Running(config, "probe_one", url, marks, process, log)

    yield start_server
    for process in running:
        stop(process)


def start_host(
    names: list[str], env: dict[str, str], output: Any, *, replica: int = 0
) -> tuple[subprocess.Popen[str], Any]:
    read_end, write_end = os.pipe()
    arguments = ["-m", "nemo_gym.servers.host", "--events-fd", str(write_end), "--replica", str(replica), *names]
    process = subprocess.Popen(
        [sys.executable, *arguments], env=env, stdout=output, stderr=output, pass_fds=[write_end], text=True
    )
    os.close(write_end)
    return process, os.fdopen(read_end)


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@pytest.fixture(scope="module", params=["hosted", "process", "workers"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The probe server, once in each mode."""
    folder = tmp_path_factory.mktemp(request.param)
    for start_server in starter(folder):
        yield start_server(request.param, write_server(folder / "elsewhere"))
