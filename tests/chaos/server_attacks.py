"""Web pages that try to drive the servers, and strangers who listen where a server should be."""

import asyncio
import contextlib
import http.client
import json
import random
import socketserver
import threading
from itertools import product
from pathlib import Path

import aiohttp
from omegaconf import OmegaConf

from nemo_gym.config.secrets import proof_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from tests.chaos.attacks import Tried, attack
from tests.chaos.fleet import AGENT, KIND_OF, MODEL, RESOURCES, Fleet, counter_config

PATHS = {
    AGENT: [("POST", "/run"), ("POST", "/v1/responses"), ("POST", "/aggregate_metrics"), ("GET", "/openapi.json")],
    RESOURCES: [("POST", "/verify"), ("POST", "/seed_session"), ("POST", "/increment_counter"), ("GET", "/")],
    MODEL: [("POST", "/v1/responses"), ("POST", "/v1/chat/completions"), ("GET", "/docs")],
    "head_server": [("GET", "/global_config_dict_yaml"), ("GET", "/server_instances"), ("GET", "/health")],
}
FOREIGN: list[dict[str, str]] = [
    *(
        {"Origin": origin}
        for origin in ("http://evil.example", "null", "", "http://localhost:3000", "https://127.0.0.1")
    ),
    *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "odd")),
    *({"Host": host} for host in ("evil.example", "evil.example:80", "x.localhost", "127.0.0.1.evil.example", "[x]:1")),
]
TYPES = ["application/json", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None]
NOT_JSON = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml"]
REFUSED = (403, 415)
TOKEN = "a-token-that-nobody-else-may-have"


@attack("web pages against the head and every server", short=True)
def web_pages(folder: Path) -> Tried:
    """Every sign of a foreign page on every path, with every type of body; and bodies of other types without any."""
    config, tried = counter_config(alone=True), Tried()
    fleet = Fleet(folder, config)
    try:
        ports = {name: config[name][kind][which]["port"] for name, (kind, which) in KIND_OF.items()}
        ports["head_server"] = fleet.head_port
        for name, port in ports.items():
            for (method, path), sign, content_type in product(PATHS[name], FOREIGN, TYPES):
                headers = {**sign, **({} if content_type is None else {"Content-Type": content_type})}
                tried.count(f"{method} {name}{path} {headers}", _got_through(port, method, path, headers))
            for (method, path), content_type in product(PATHS[name], NOT_JSON):
                if method == "POST":
                    found = _got_through(port, method, path, {"Content-Type": content_type})
                    tried.count(f"{method} {name}{path} {content_type}", found)
    finally:
        fleet.stop()
    return tried


def _got_through(port: int, method: str, path: str, headers: dict[str, str]) -> str | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    allowed = [name for name in answer.headers if name.lower().startswith("access-control-")]
    return None if answer.status in REFUSED and not allowed else f"answered {answer.status} {allowed}"


class Stranger(socketserver.ThreadingTCPServer):
    """Answers whatever the test says next, and keeps what it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.answer = b""
        super().__init__(("127.0.0.1", 0), _Listening)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Listening(socketserver.BaseRequestHandler):
    server: Stranger

    def handle(self) -> None:
        self.request.settimeout(0.5)
        with contextlib.suppress(OSError):
            while heard := self.request.recv(65536):
                self.server.received.append(heard)
                self.request.sendall(self.server.answer)


@attack("strangers who listen where a server should be", short=True)
def strangers(folder: Path) -> Tried:
    """Made-up proofs, answers and garbage, against bare connections and aiohttp's."""
    tried, dice = Tried(), random.Random(folder.name)
    with Stranger() as stranger:
        for number in range(200):
            stranger.answer = _made_up(dice, stranger.port)
            stranger.received.clear()
            took_it = _calls(stranger.port, over_aiohttp=number % 2 == 1)
            leaked = any(TOKEN.encode() in heard or b"a prompt" in heard for heard in stranger.received)
            problem = "was taken for a server" if took_it else "was sent the token or the request" if leaked else None
            tried.count(f"{stranger.answer[:200]!r}", problem or (None if stranger.received else "was not even asked"))
        stranger.shutdown()
    return tried


def _made_up(dice: random.Random, port: int) -> bytes:
    body: bytes = dice.choice(
        [
            json.dumps({"proof": proof_of(dice.choice(["", "guess"]), "", port), "port": port}).encode(),
            json.dumps(
                {"proof": dice.choice([None, 7, "é", "\ud800", "0" * 64, []]), "port": dice.randrange(10**6)}
            ).encode(),
            dice.randbytes(dice.randrange(200)),
            b"[" * 10_000,
            b'{"status": "ok"}',
        ]
    )
    status = dice.choice(["200 OK", "200 OK", "200 OK", "401 Unauthorized", "404 Not Found", "500 Oops", "204 None"])
    length = len(body) + dice.choice([0, 0, 0, 5])
    whole = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body
    return dice.choice([whole, whole, whole, whole[: dice.randrange(len(whole))] + b"\r\n\r\n", dice.randbytes(50)])


def _calls(port: int, *, over_aiohttp: bool) -> bool:
    """Whether a call to the server there was answered."""
    block = {"resources_servers": {"x": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=port),
        global_config_dict=OmegaConf.create({"it": block, "auth_token": TOKEN}),
    )
    options = (
        {"timeout": aiohttp.ClientTimeout(total=3, sock_connect=3, sock_read=3)} if over_aiohttp else {"timeout": 3}
    )

    async def call() -> bool:
        try:
            await client.post("it", "/verify", json={"input": "a prompt"}, **options)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    return asyncio.run(call())
