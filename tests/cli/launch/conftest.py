"""Small servers written to disk, started for real; whatever a test started is gone when it ends."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from omegaconf import OmegaConf

from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.launch.run_helper import RunHelper
from tests.ports import free_port as find_free_port
from tests.programs import Piped, ensure_running, still_running

PLAIN_APP = """
# A server that knows nothing of nemo-gym: it starts in no time.
import http.server, os, sys, threading, yaml

name = os.environ["NEMO_GYM_CONFIG_PATH"]
config = yaml.safe_load(open(os.environ["NEMO_GYM_CONFIG_FILE"]))
block = next(iter(next(iter(config[name].values())).values()))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            print("about to crash", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getcwd()} {config['run_id']} {config['session_secret']}".encode())
    def log_message(self, *args): pass

if config["dry_run"]:
    sys.exit(0)
print("listening", flush=True)
http.server.ThreadingHTTPServer((block["host"], block["port"]), Handler).serve_forever()
"""
GYM_APP = """
from nemo_gym.base_resources_server import BaseVerifyResponse, SimpleResourcesServer

class Mine(SimpleResourcesServer):
    async def verify(self, body):
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)

if __name__ == "__main__":
    Mine.run_webserver()
"""

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]
RunCommand = Callable[..., Piped]


@pytest.fixture
def write_server(tmp_path: Path) -> WriteServer:
    """Write a server's folder below the current one and return it."""

    def write(name: str, app: str = PLAIN_APP, requirements: str = "", **files: str) -> Path:
        folder = tmp_path / "resources_servers" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "app.py").write_text(app)
        (folder / "requirements.txt").write_text(requirements)
        for file, text in files.items():
            (folder / f"{file}.py").write_text(text)
        return folder

    return write


@pytest.fixture
def apps() -> dict[str, str]:
    return {"plain": PLAIN_APP, "gym": GYM_APP}


@pytest.fixture
def config_for(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The config of a run with one instance of each named server, and what else is given."""

    def make(*names: str, blocks: dict[str, dict[str, Any]] | None = None, **settings: Any) -> dict[str, Any]:
        servers = {
            name: {
                "resources_servers": {name: {"entrypoint": "app.py", "domain": "other", **(blocks or {}).get(name, {})}}
            }
            for name in names
        }
        defaults = {"head_server": {"port": 0}, "cache_dir": str(tmp_path / "cache"), "server_start_timeout_s": 60}
        return {**servers, **defaults, **settings}

    return make


@pytest.fixture
def start_run(config_for: Callable[..., dict[str, Any]]) -> Iterator[StartRun]:
    """Start a run in this process; its helper is returned and in the end shut down."""
    helpers: list[RunHelper] = []

    def start(*names: str, **settings: Any) -> RunHelper:
        helpers.append(RunHelper())
        config = OmegaConf.create(config_for(*names, **settings))
        helpers[-1].start(GlobalConfigDictParserConfig(initial_global_config_dict=config, skip_load_from_dotenv=True))
        return helpers[-1]

    yield start
    for helper in helpers:
        helper.shutdown()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test after which a process it started still runs."""
    ensure_running()
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    yield
    deadline = time.monotonic() + 10
    while left := [child for child in still_running(me) if child.pid not in before]:
        if time.monotonic() > deadline:
            described = [str(child) for child in left]
            for child in left:
                child.kill()
            pytest.fail(f"left behind: {described}")
        time.sleep(0.05)


@pytest.fixture
def ng_run(tmp_path: Path, config_for: Callable[..., dict[str, Any]]) -> Iterator[RunCommand]:
    """Start `ng_run` as a user does."""
    started: list[Piped] = []

    def run(*names: str, arguments: tuple[str, ...] = (), **settings: Any) -> Piped:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_for(*names, **settings)))
        started.append(Piped("ng_run", "+config_paths=[config.yaml]", *arguments, folder=tmp_path))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate(timeout=15)


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture
def processes_of() -> Callable[[int], list[int]]:
    """Everything a process has started, directly or not."""

    def find(pid: int) -> list[int]:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]

    return find


@pytest.fixture
def is_gone() -> Callable[[int], bool]:
    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return check


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    return wait


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEMO_GYM_CONFIG_PATH", "NEMO_GYM_PARENT_PID", "NEMO_GYM_NUM_REPLICAS"):
        monkeypatch.delenv(name, raising=False)
