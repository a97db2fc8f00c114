"""Send the requests of the net one after the other and keep the responses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from tests.net.recording import Exchange, Normalizer

REQUEST_TIMEOUT_S = 120.0


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
