import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.schemas.server_config import ServerInstanceDisplayConfig
from nemo_gym.server_status import StatusCommand, format_uptime

main = command_named("status")


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start an HTTP server that answers everything with one status and body; its URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(body: bytes = b"ok", status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def refused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


def entry(name: str, url: str | None, **more: Any) -> dict[str, Any]:
    return {"process_name": name, "server_type": "resources_servers", "name": "tool", "url": url, "pid": 7, **more}


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def command_for(head_url: str) -> StatusCommand:
    return StatusCommand(BaseServerConfig(host="127.0.0.1", port=port_of(head_url)))


def test_every_server_the_head_lists_is_asked(
    serve: Serve, refused_port: int, silent_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [
        entry("up", serve(), start_time=time.time() - 3725, isolation="hosted"),
        entry("angry", serve(status=500), replica=1),
        entry("down", f"http://127.0.0.1:{refused_port}"),
        entry("silent", silent_url),
        entry("nowhere", None),
    ]
    command = command_for(serve(json.dumps(listed).encode()))
    servers = command.discover_servers()
    assert [server.status for server in servers] == [
        "success",
        "success",
        "connection_error",
        "timeout",
        "unknown_error",
    ]
    command.display_status(servers)
    printed = capsys.readouterr().out
    assert "[1] ✓ up (resources_servers/tool)" in printed
    assert "[2] ✓ angry (replica 1) (resources_servers/tool)" in printed
    assert "[3] ✗ down (resources_servers/tool)" in printed
    assert "1h 2m " in printed
    assert printed.splitlines()[-1] == "5 servers found (2 healthy, 3 unhealthy)"


def test_without_a_head_server_the_user_is_told_how_to_start_one(
    refused_port: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_for(f"http://127.0.0.1:{refused_port}")
    assert command.discover_servers() == []
    assert "Could not connect to head server" in caplog.text
    assert "ng_run" in caplog.text
    command.display_status([])
    assert capsys.readouterr().out == "No NeMo Gym servers found running.\n"


@pytest.mark.parametrize("body", [b"<html>", b'{"a": 1}', b"[1]", b'[{"pid": "x"}]'])
def test_something_else_on_the_heads_port_is_no_head(
    serve: Serve, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert command_for(serve(body)).discover_servers() == []
    assert "Could not connect to head server" in caplog.text


def test_an_address_nobody_can_read_is_an_unknown_error() -> None:
    assert StatusCommand().check_health(ServerInstanceDisplayConfig(url="http://nowhere")) == "unknown_error"


def test_the_command_asks_the_head_server_it_is_told_of(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemo_gym.runs.sockets.socket_folders", list)  # runs of other tests are not ours
    head = serve(json.dumps([entry("up", serve()), entry("two", serve())]).encode())
    for arguments in ([], ["+json=true"]):
        monkeypatch.setattr("nemo_gym.global_config._GLOBAL_CONFIG_DICT", None)
        main.run([f"+head_server.port={port_of(head)}", *arguments])
    printed = capsys.readouterr().out
    table, _, listed = printed.partition("2 servers found (2 healthy, 0 unhealthy)\n")
    assert "up (resources_servers/tool)" in table
    assert [server["status"] for server in json.loads(listed)] == ["success", "success"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.25, "1.2s"), (61, "1m 1.0s"), (3600, "1h 0m 0.0s"), (90061.5, "1d 1h 1m 1.5s")]
)
def test_uptime_is_written_for_people(seconds: float, text: str) -> None:
    assert format_uptime(seconds) == text
