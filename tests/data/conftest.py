"""Every test here starts in an empty folder, in a process without a configuration."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import nemo_gym.global_config
from nemo_gym.keys import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
    NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
)

WriteRows = Callable[..., Path]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.chdir(tmp_path)
    for name in (
        NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
        NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME,
        NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME,
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write a JSONL file below the current folder: rows as objects, or as the text of a line."""

    def write(name: str, *rows: dict[str, Any] | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.fixture
def agent_config() -> Callable[..., dict[str, Any]]:
    """The config of agents, each with the data sets given for it, and a stand-in model."""

    def make(**datasets_of_agent: list[dict[str, Any]]) -> dict[str, Any]:
        agents = {
            agent: {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "datasets": datasets}}}
            for agent, datasets in datasets_of_agent.items()
        }
        return {**agents, "policy_model": {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}}}

    return make


class HubStandIn(ThreadingHTTPServer):
    """A hub on this machine: data sets as files in memory, answers in the documented shapes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by data set and path."""
        self.private: set[str] = set()
        """Data sets that want the token."""
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.collected: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def publish(self, repo_id: str, files: dict[str, bytes | str]) -> None:
        """Put files into a data set."""
        for path, content in files.items():
            self.files.setdefault(repo_id, {})[path] = content if isinstance(content, bytes) else content.encode()


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        listing = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/main", path)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        found = listing or file
        repo_id = found[1] if found else ""
        files = self.server.files.get(repo_id)
        if files is None:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif repo_id in self.server.private and self.headers.get("authorization") != "Bearer good_token":
            self._answer(401, {"error": "Access denied"}, X_Error_Code="GatedRepo")
        elif listing:
            entries = [{"type": "file", "path": at, "size": len(text), "oid": "0"} for at, text in files.items()]
            self._answer(200, entries)
        elif file is not None and file[2] in files:
            content = files[file[2]]
            self._answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit="c" * 40)
        else:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        lines = [json.loads(line) for line in self._body().splitlines()]
        hub = self.server
        if path == "/api/repos/create":
            (made,) = lines
            hub.created.append(made)
            self._answer(200, {"url": f"{hub.url}/datasets/{made['organization']}/{made['name']}"})
        elif "/preupload/" in path:
            paths = [file["path"] for file in lines[0]["files"]]
            modes = [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in paths]
            self._answer(200, {"files": modes})
        elif "/commit/" in path:
            hub.commits.append({"path": path, "query": url.query, "lines": lines})
            repository = hub.url + path.removeprefix("/api").partition("/commit/")[0]
            proposed = {"pullRequestUrl": f"{repository}/discussions/1"} if "create_pr" in url.query else {}
            self._answer(200, {"commitUrl": f"{repository}/commit/1", "commitOid": "1", **proposed})
        elif path.startswith("/api/collections/"):
            hub.collected.append((path, lines[0]))
            self._answer(200, _COLLECTION)
        else:
            self._answer(404, {"error": path})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: Any, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


_COLLECTION = {
    "slug": "s",
    "title": "t",
    "owner": {"name": "org"},
    "items": [],
    "lastUpdated": "2024-01-01T00:00:00.000Z",
    "position": 0,
    "private": False,
    "theme": "green",
    "upvotes": 0,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub for this process and for those it starts."""
    standing_in = HubStandIn()
    monkeypatch.setenv("HF_ENDPOINT", standing_in.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub_home"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield standing_in
    standing_in.shutdown()
    standing_in.server_close()
