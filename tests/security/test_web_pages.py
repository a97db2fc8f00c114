"""No web page can drive the servers, whichever way they run, and no program is disturbed by what keeps pages out."""

import asyncio
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from fastapi import APIRouter, Body, FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from omegaconf import OmegaConf
from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocketDisconnect

import nemo_gym.global_config
from nemo_gym.config.hosts import MachineNames, machine_names
from nemo_gym.global_config import find_open_port
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import HeadServer
from nemo_gym.servers.auth import CallerCheck
from nemo_gym.servers.gateway import Duties, Gateway
from tests.servers.conftest import Running, Start, start, starter, write_server

__all__ = ["start"]

CONFIGURED = "trainer-node.cluster"
ALLOWED = "gym.example.com"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module", params=["hosted", "process", "workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without a token, once in each mode, whose config names some hosts."""
    folder = tmp_path_factory.mktemp(request.param)
    known = {"trainer": {"rank_0": {"host": CONFIGURED, "port": 1}}, "allowed_hosts": [ALLOWED]}
    for start_server in starter(folder):
        yield start_server(request.param, write_server(folder / "elsewhere"), **known)


def ask(url: str, path: str, method: str = "POST", body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and body of a request that says exactly this: no header is added but the length."""
    connection = http.client.HTTPConnection(url.partition("://")[2], timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.headers.get_all("access-control-allow-origin") is None
    connection.close()
    return answer.status, text


def own(server: Running) -> str:
    return server.url.partition("://")[2]


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "text/json",
        "application/jsonp",
        "application/json, text/plain",
    ],
)
def test_a_body_that_does_not_say_json_is_refused(server: Running, content_type: str) -> None:
    for path, body in (("/picky", b'{"value": 1}'), ("/verify", b"{}"), ("/seed_session", b"{}")):
        status, text = ask(server.url, path, body=body, Host=own(server), Content_Type=content_type)
        assert status == 415, path
        assert "send `Content-Type: application/json`" in text


def test_what_a_page_can_send_without_asking_reaches_no_endpoint_that_reads_the_request_itself(server: Running) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert ask(server.url, "/echo", body=b"{}", Host=own(server), Content_Type=content_type)[0] == 415
        assert ask(server.url, "/slow", body=b"{}", Host=own(server), Content_Type=content_type)[0] == 415
    assert "tool began" not in server.marks.read_text()


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"],
)
def test_json_by_any_of_its_names_passes(server: Running, content_type: str) -> None:
    status, text = ask(server.url, "/picky", body=b'{"value": 1}', Host=own(server), Content_Type=content_type)

    assert (status, json.loads(text)) == (200, {"value": 1})


def test_a_body_of_no_type_passes_only_if_no_browser_sent_it(server: Running) -> None:
    host = own(server)
    assert ask(server.url, "/picky", body=b'{"value": 1}', Host=host)[0] == 200
    for marks in ({"Origin": f"http://{host}"}, {"Sec_Fetch_Mode": "no-cors"}, {"Sec_Fetch_Site": "same-origin"}):
        assert ask(server.url, "/picky", body=b'{"value": 1}', Host=host, **marks)[0] == 415
    assert ask(server.url, "/echo", Host=host, body=b"{}", Content_Type="", Origin=f"http://{host}")[0] == 415


def test_no_body_needs_no_type(server: Running) -> None:
    assert ask(server.url, "/teapot", Host=own(server))[0] == 418
    assert ask(server.url, "/teapot", body=b"", Host=own(server), Content_Type="text/plain")[0] == 418
    chunked = {"Transfer_Encoding": "chunked", "Content_Type": "text/plain", "Host": own(server)}
    assert raw(server, "/teapot", chunked, b"0\r\n\r\n").startswith(b"HTTP/1.1 418")
    assert raw(server, "/teapot", chunked, b"2\r\n{}\r\n0\r\n\r\n").startswith(b"HTTP/1.1 415")
    as_json = {**chunked, "Content_Type": "application/json"}
    assert raw(server, "/picky", as_json, b'c\r\n{"value": 1}\r\n0\r\n\r\n').startswith(b"HTTP/1.1 200")
    without = {name: value for name, value in chunked.items() if name != "Content_Type"}
    assert raw(server, "/picky", without, b'c\r\n{"value": 1}\r\n0\r\n\r\n').startswith(b"HTTP/1.1 200")


def raw(server: Running, path: str, headers: dict[str, str], body: bytes) -> bytes:
    host, port = own(server).split(":")
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, int(port)), timeout=20) as caller:
        caller.sendall(f"POST {path} HTTP/1.1\r\nconnection: close\r\n{lines}\r\n".encode() + body)
        return b"".join(iter(lambda: caller.recv(65536), b""))


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://evil.example", "null", "", "http://localhost:3000", "http://127.0.0.1", "file://"],
)
def test_a_page_of_another_origin_is_refused_whatever_it_sends(server: Running, origin: str) -> None:
    host = own(server)
    for method, path, headers in (
        ("POST", "/picky", JSON),
        ("POST", "/picky", {}),
        ("GET", "/question", {}),
        ("GET", "/openapi.json", {}),
        ("GET", "/", {}),
        ("OPTIONS", "/picky", {"Access-Control-Request-Method": "POST"}),
        ("OPTIONS", "/picky", {"Access-Control-Request-Private-Network": "true"}),
    ):
        body = b'{"value": 1}' if method == "POST" else None
        status, text = ask(server.url, path, method, body, Host=host, Origin=origin, **headers)
        assert status == 403, (method, path)
        assert "pages of other web sites" in text


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything new"])
def test_a_browser_that_says_another_site_asks_is_refused_without_an_origin(server: Running, site: str) -> None:
    host = own(server)
    assert ask(server.url, "/question", "GET", Host=host, Sec_Fetch_Site=site)[0] == 403
    assert ask(server.url, "/picky", "POST", b"{}", Host=host, Sec_Fetch_Site=site, Content_Type="application/json")[
        0
    ] == (403)


def test_pages_of_the_server_itself_and_typed_addresses_work(server: Running) -> None:
    host = own(server)
    assert ask(server.url, "/docs", "GET", Host=host, Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate")[0] == 200
    assert ask(server.url, "/openapi.json", "GET", Host=host, Sec_Fetch_Site="same-origin")[0] == 200
    tried_out = {"Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin", "Content_Type": "application/json"}
    assert ask(server.url, "/picky", "POST", b'{"value": 1}', Host=host, **tried_out)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8000",
        "evil.localhost",
        "127.0.0.1@evil.example",
        "[::1].evil.example",
        "[evil.example]",
        "testserver",
        f"{CONFIGURED}.evil.example",
    ],
)
def test_a_page_that_had_its_name_point_here_gets_nothing(server: Running, host: str) -> None:
    for method, path in (("GET", "/question"), ("GET", "/openapi.json"), ("GET", "/"), ("POST", "/picky")):
        body = b'{"value": 1}' if method == "POST" else None
        origin = {"Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"} if method == "POST" else {}
        status, text = ask(server.url, path, method, body, Host=host, **JSON, **origin)
        assert status == 403, (method, path)
        assert "`allowed_hosts`" in text


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "127.0.0.1",
        "10.1.2.3:80",
        "[::1]",
        "[::1]:8000",
        "::1",
        "[fe80::1%25eth0]:8000",
        socket.gethostname(),
        f"{socket.gethostname().upper()}:8000",
        socket.getfqdn(),
        CONFIGURED,
        f"{CONFIGURED}:8000",
        ALLOWED.upper(),
        "",
    ],
)
def test_addresses_and_known_names_pass(server: Running, host: str) -> None:
    assert ask(server.url, "/picky", body=b'{"value": 1}', Host=host, **JSON)[0] == 200


@pytest.mark.parametrize("origin", ["null", "", "http://", "null://", "evil.example"])
def test_a_page_without_a_name_is_not_that_of_a_server_without_one(server: Running, origin: str) -> None:
    assert ask(server.url, "/picky", body=b'{"value": 1}', Host="", Origin=origin, **JSON)[0] == 403


def test_a_request_without_a_host_passes(server: Running) -> None:
    address, port = own(server).split(":")
    with socket.create_connection((address, int(port)), timeout=20) as caller:
        caller.sendall(b"GET /question HTTP/1.0\r\n\r\n")
        assert caller.recv(65536).startswith(b"HTTP/1.1 200")


def test_programs_are_not_disturbed(server: Running) -> None:
    body, url = {"value": 3}, f"{server.url}/picky"
    assert requests.post(url, json=body, timeout=20).json() == body
    assert requests.post(url, data=json.dumps(body), timeout=20).json() == body
    assert requests.post(url, json=body, headers={"Host": socket.gethostname()}, timeout=20).json() == body
    assert httpx.post(url, json=body).json() == body

    async def over_aiohttp() -> Any:
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return await answer.json()

    assert asyncio.run(over_aiohttp()) == body


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_a_json_header_is_not_disturbed_and_without_one_is_told_to_send_it(server: Running) -> None:
    def curl(*arguments: str) -> str:
        given = ["curl", "-sS", *arguments, f"{server.url}/picky"]
        return subprocess.run(given, capture_output=True, text=True, check=True, timeout=60).stdout

    body = '{"value":3}'
    assert curl("-d", body, "-H", "Content-Type: application/json") == body
    assert curl("--json", body) == body
    assert "send `Content-Type: application/json`" in curl("-d", body)


def test_the_log_names_the_first_page_that_was_refused(server: Running) -> None:
    ask(server.url, "/question", "GET", Host=own(server), Origin="http://evil.example")

    assert "was refused with 4" in server.log.read_text()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    address = {"host": "127.0.0.1", "port": find_open_port()}
    config = OmegaConf.create({"head_server": address, "allowed_hosts": ALLOWED})
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", config)
    server, thread, _ = HeadServer.run_webserver()
    yield f"http://127.0.0.1:{address['port']}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_the_head_server_tells_its_config_to_no_page(head: str) -> None:
    for path in ("/global_config_dict_yaml", "/server_instances", "/health", "/"):
        assert ask(head, path, "GET", Host="evil.example")[0] == 403
        assert ask(head, path, "GET", Host="localhost", Origin="http://evil.example")[0] == 403
        assert ask(head, path, "GET", Host="localhost", Sec_Fetch_Site="cross-site")[0] == 403
        for host in ("localhost", "127.0.0.1:1", "[::1]", socket.gethostname(), ALLOWED):
            assert ask(head, path, "GET", Host=host)[0] == 200


OPENAI_PROGRAM = """
import sys
from openai import OpenAI

with OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=20) as client:
    said = [{"role": "user", "content": "hi"}]
    print(len(client.responses.create(model="m", input="hi").output))
    print(len(client.chat.completions.create(model="m", messages=said).choices))
"""


def test_openai_clients_are_not_disturbed(start: Start) -> None:
    pytest.importorskip("openai")
    server = start("hosted", PARENT_DIR / "responses_api_models" / "scripted_model")

    done = subprocess.run(
        [sys.executable, "-c", OPENAI_PROGRAM, server.url], capture_output=True, text=True, timeout=60
    )

    assert (done.stdout, done.stderr) == ("1\n1\n", "")


def foreign_app(**config: Any) -> FastAPI:
    """An app with endpoints of every kind, behind the same door as every server."""
    app, router = FastAPI(), APIRouter()

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @app.post("/declared", openapi_extra={"requestBody": {"content": {"text/plain": {}}}})
    async def declared(request: Request) -> int:
        return len(await request.body())

    @router.post("/{name}/octets")
    async def octets(name: str, body: bytes = Body(media_type="application/octet-stream")) -> int:
        return len(name + body.decode())

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("mounted")(scope, receive, send)

    app.include_router(router, prefix="/below")
    app.mount("/mounted", mounted)
    callers = CallerCheck(OmegaConf.create(config), "it", described_by=app)
    app.add_middleware(Gateway, duties=Duties("it", callers=callers))
    return app


def test_an_endpoint_gets_the_bodies_that_it_declares() -> None:
    client = TestClient(foreign_app())

    def post(path: str, content_type: str) -> int:
        return client.post(path, content=b"body", headers={"Content-Type": content_type}).status_code

    assert [post("/raw", kind) for kind in ("text/plain", "application/octet-stream", "text/csv")] == [415, 200, 200]
    assert [post("/declared", kind) for kind in ("text/plain; charset=utf-8", "text/csv")] == [200, 415]
    assert [post("/below/x/octets", kind) for kind in ("application/octet-stream", "text/plain")] == [200, 415]
    assert [post("/mounted/there", "text/plain"), post("/nowhere", "application/json")] == [200, 404]


def test_an_app_that_cannot_be_described_takes_json(caplog: pytest.LogCaptureFixture) -> None:
    app = foreign_app()
    app.openapi = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]

    assert TestClient(app).post("/declared", content=b"b", headers={"Content-Type": "text/plain"}).status_code == 415
    assert "cannot be described" in caplog.text


def test_calls_in_memory_have_whatever_name_their_transport_gives_the_server() -> None:
    assert TestClient(foreign_app()).post("/raw", json={}).status_code == 200
    assert TestClient(foreign_app()).post("/raw", json={}, headers={"Host": "evil.example"}).status_code == 403
    transport = httpx.ASGITransport(foreign_app())

    async def call() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
            return (await client.post("/raw", json={})).status_code

    assert asyncio.run(call()) == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_page_can_open_no_web_socket(headers: dict[str, str]) -> None:
    with TestClient(foreign_app()).websocket_connect("/socket") as socket:
        assert socket.receive_text() == "hello"
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        TestClient(foreign_app()).websocket_connect("/socket", headers=headers),
    ):
        raise AssertionError
    assert refused.value.code == 1008


def test_a_web_socket_needs_the_token_too() -> None:
    client = TestClient(foreign_app(auth_token="t0ken"))
    with client.websocket_connect("/socket", headers={"Authorization": "Bearer t0ken"}) as socket:
        assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket"):
        raise AssertionError


def test_with_a_token_names_do_not_matter_and_pages_and_types_do() -> None:
    client = TestClient(foreign_app(auth_token="t0ken"), headers={"Authorization": "Bearer t0ken"})

    assert client.post("/raw", json={}, headers={"Host": "behind.a.proxy"}).status_code == 200
    assert client.post("/raw", json={}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("/raw", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_name_server_that_does_not_answer_holds_up_only_who_calls_by_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = threading.Event()
    monkeypatch.setattr("nemo_gym.config.hosts.getfqdn", lambda: "late.example" if asked.wait(10) else "")
    monkeypatch.setattr("nemo_gym.servers.auth._LONGEST_WAIT_FOR_NAME_S", 0.1)
    machine_names.cache_clear()
    try:
        client = TestClient(foreign_app())
        hosts = ["localhost", "127.0.0.1", socket.gethostname()]
        assert [client.get("/openapi.json", headers={"Host": host}).status_code for host in hosts] == [200] * 3
        assert client.get("/openapi.json", headers={"Host": "late.example"}).status_code == 403
        asked.set()
        machine_names()._asked.join(10)
        assert client.get("/openapi.json", headers={"Host": "late.example"}).status_code == 200
    finally:
        asked.set()
        machine_names.cache_clear()
    assert isinstance(machine_names(), MachineNames)
