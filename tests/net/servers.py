"""Start the servers of one checkout with `ng_run`, and send them requests."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.net.recording import Exchange, Normalizer
from tests.ports import free_port

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0


@contextmanager
def running(
    root: Path, folder: Path, config: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Run the servers of a config from the checkout at `root`; yield their addresses by name."""
    port = free_port()
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "head_server": {"host": "127.0.0.1", "port": port}}))
    output = folder / "ng_run.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [str(root / ".venv/bin/ng_run"), f"+config_paths=[{path}]"],
            cwd=root,
            env={**os.environ, "NO_COLOR": "1", **(environment or {})},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_ready(process, output)
        yield _addresses(port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(process: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"servers ready!" not in output.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"ng_run did not get its servers ready:\n{output.read_text()[-3000:]}")
        time.sleep(0.05)


def _addresses(head_port: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{head_port}/server_instances", timeout=30) as answer:
        servers = json.load(answer)
    found = {server["process_name"]: server["url"] for server in servers}
    return {**found, "head": f"http://127.0.0.1:{head_port}"}


class Caller:
    """Sends the requests of the net one after the other and keeps the responses."""

    def __init__(self, session: aiohttp.ClientSession, normalizer: Normalizer, prefix: str) -> None:
        self.exchanges: list[Exchange] = []
        self._session, self._normalizer, self._prefix = session, normalizer, prefix

    async def send(
        self,
        case: str,
        method: str,
        url: str,
        body: Any = None,
        headers: Sequence[tuple[str, str]] = (),
        cookies: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes, dict[str, str]]:
        """Send a request; bytes go out as they are, all else as JSON. Return status, body and new cookies."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {**({"content-type": "application/json"} if data is not None else {}), **dict(headers)}
        if cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        try:
            async with self._session.request(
                method, url, data=data, headers=sent, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
                status, names = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            self._keep(Exchange(f"{self._prefix} {case}", 0, {}, type(error).__name__))
            return 0, b"", {}
        set_cookies = names.getall("set-cookie", [])
        shown = self._normalizer.headers(names, set_cookies)
        self._keep(Exchange(f"{self._prefix} {case}", status, shown, self._normalizer.body(answer)))
        new = dict(cookie.split(";")[0].split("=", 1) for cookie in set_cookies)
        return status, answer, new

    def _keep(self, exchange: Exchange) -> None:
        if any(each.case == exchange.case for each in self.exchanges):
            raise AssertionError(f"two requests of the net are called {exchange.case!r}")
        self.exchanges.append(exchange)
