"""The API that the pages and scripts ask, as docs/viewing.md describes it, who may ask, and the files of the pages.

Whoever has the token may ask, and no page of somebody else. The address that `ng_view` prints carries a random token,
which becomes a cookie; scripts send it as a bearer token. A browser that was led here under a foreign name (DNS
rebinding) gives itself away by `Host`, a page of another site by `Origin` or `Sec-Fetch-Site`. Answers forbid whatever
the pages do not need: nothing in a record can become a script.
"""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import parse_qs

import orjson
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from nemo_gym import runtime
from nemo_gym._version import __version__
from nemo_gym.jsonl import to_line
from nemo_gym.metrics.charts import STYLE as CHART_STYLE
from nemo_gym.runs.select import SelectError
from nemo_gym.view.answers import LARGEST_PAGE, MOST_TASKS, fields_of_run, grid_of, matches, page_of, stats_of
from nemo_gym.view.export import CHARTS_FILE, PAGES
from nemo_gym.view.library import Library, Watch
from nemo_gym.view.rollout import place_on_disk, rollout_answer
from nemo_gym.view.runs import Run, run_details
from nemo_gym.view.table import read_bytes

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets nobody else through to an app."""

    def __init__(self, app: App, token: str, host: str, port: int) -> None:
        self._app = app
        self._token = token
        self._host = host
        self._cookie = f"ng_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answering = _with_headers(send)
        problem = self._problem(scope, headers)
        if problem is not None:
            await _answer(answering, 403, problem)
        elif self._has_token_in_address(scope):
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"
            await _redirect(answering, cookie)
        elif not self._is_known(headers):
            await _answer(answering, 401, "open the address that ng_view has printed: it carries the token")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(answering, 405, "this API only reads: GET")
        else:
            await self._app(scope, receive, answering)

    def _problem(self, scope: Scope, headers: dict[str, str]) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(_name_in(host)):
            return f"this server is not known as {host[:200]!r}"
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return "pages of other sites may not ask"
        is_visit = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_visit:
            return "pages of other sites may not ask"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in _LOOPBACK_NAMES or name == self._host:
            return True
        if is_loopback(self._host):
            return is_loopback(name)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname(), socket.getfqdn())
        return True

    def _has_token_in_address(self, scope: Scope) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        return scope["path"] == "/" and self._is_token(given)

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def _name_in(host: str) -> str:
    """The host in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _with_headers(send: Send) -> Send:
    async def answering(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(header for header in HEADERS if header[0] not in own)]
        await send(message)

    return answering


async def _answer(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": {"message": message}})})


async def _redirect(send: Send, cookie: str) -> None:
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


logger = logging.getLogger(__name__)

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_POLL_S = 2.0
_SIGN_OF_LIFE_S = 15.0
_MOST_IDS = 10_000
Where = Annotated[str | None, Query(max_length=10_000)]
Sort = Annotated[str | None, Query(max_length=2_000)]
Offset = Annotated[int, Query(ge=0, le=10**9)]


def make_app(library: Library) -> FastAPI:
    """The app that shows these runs."""
    app = FastAPI(title="ng_view", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    app.state.library = library
    app.state.is_closing = False
    app.add_exception_handler(SelectError, _misunderstood)
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    for error in (OSError, sqlite3.Error, ValueError, RecursionError, MemoryError, Exception):
        app.add_exception_handler(error, _broken)
    _add_pages(app)
    _add_lists(app, library)
    _add_rollouts(app, library)
    _add_streams(app, library)
    return app


def answer(content: Any, status: int = 200) -> Response:
    """JSON, whatever is in it."""
    return Response(to_line(content), status, media_type="application/json")


def _problem(status: int, message: str, **more: Any) -> Response:
    return answer({"error": {"message": message, **more}}, status)


async def _misunderstood(request: Request, error: Exception) -> Response:
    assert isinstance(error, SelectError)
    if not error.expression:
        return _problem(400, str(error))
    return _problem(400, error.problem, expression=error.expression, position=error.position)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return _problem(error.status_code, str(error.detail))


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _problem(400, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}")


async def _broken(request: Request, error: Exception) -> Response:
    logger.error("%s: %s", request.url.path, error)
    return _problem(409, f"the files changed while they were read, or cannot be read ({type(error).__name__})")


def _run(library: Library, name: str) -> Run:
    run = library.get(name)
    if run is None:
        raise HTTPException(404, f"there is no run {name[:50]!r}; it may have been moved or deleted")
    return run


def _add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return _file("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        return _file(name)


def _file(name: str) -> Response:
    if name == CHARTS_FILE:
        return Response(CHART_STYLE, media_type=_TYPES[".css"])
    path = PAGES / name
    if path.parent != PAGES or path.suffix not in _TYPES or not path.is_file():
        raise HTTPException(404, f"there is no page {name[:50]!r}")
    return FileResponse(path, media_type=_TYPES[path.suffix])


def _add_lists(app: FastAPI, library: Library) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return answer({"root": library.name, "version": __version__, "exported": False, "runs": library.summaries()})

    @app.get("/api/runs/{run}")
    def run_(run: str) -> Response:
        found = _run(library, run)
        return answer({**found.summary(), **run_details(found)})

    @app.get("/api/runs/{run}/rollouts")
    def rollouts(
        run: str,
        where: Where = None,
        sort: Sort = None,
        limit: Annotated[int, Query(ge=0, le=LARGEST_PAGE)] = 50,
        offset: Offset = 0,
        fields: Sort = None,
    ) -> Response:
        found = _run(library, run)
        with found.lock:
            return answer(page_of(found.table, where, sort, limit, offset, (fields or "").split(",")))

    @app.get("/api/runs/{run}/fields")
    def fields_(run: str) -> Response:
        found = _run(library, run)
        with found.lock:
            return answer(fields_of_run(found.table))

    @app.get("/api/runs/{run}/stats")
    def stats(run: str, where: Where = None) -> Response:
        found = _run(library, run)
        with found.lock:
            return answer(stats_of(found, where))

    @app.get("/api/runs/{run}/grid")
    def grid(
        run: str,
        where: Where = None,
        limit: Annotated[int, Query(ge=0, le=MOST_TASKS)] = 2_000,
        offset: Offset = 0,
        order: Annotated[str, Query(pattern="^(task|mean|-mean)$")] = "task",
    ) -> Response:
        found = _run(library, run)
        with found.lock:
            return answer(grid_of(found.table, where, limit, offset, order))


def _add_rollouts(app: FastAPI, library: Library) -> None:
    @app.get("/api/rollouts/{run}/{rollout}")
    def rollout_(run: str, rollout: str, where: Where = None, sort: Sort = None) -> Response:
        found = _run(library, run)
        with found.lock:
            shown = rollout_answer(found, rollout, where, sort)
        if shown is None:
            raise HTTPException(404, f"there is no rollout {rollout[:50]!r} in this run")
        return answer(shown)

    @app.get("/api/rollouts/{run}/{rollout}/raw")
    def raw(run: str, rollout: str) -> Response:
        found = _run(library, run)
        with found.lock:
            place = place_on_disk(found, rollout)
        if place is None:
            raise HTTPException(404, f"there is no rollout {rollout[:50]!r} in this run")
        name = f"{found.paths.rollouts.stem}-{rollout}.json"
        return Response(read_bytes(*place), media_type="application/json", headers=_download(name))

    @app.get("/api/runs/{run}/export.jsonl")
    def export(
        run: str,
        where: Where = None,
        sort: Sort = None,
        limit: Annotated[int | None, Query(ge=0)] = None,
        offset: Offset = 0,
        ids: Annotated[str | None, Query(max_length=200_000)] = None,
    ) -> Response:
        found = _run(library, run)
        with found.lock:
            if ids is not None:
                named = [found.table.row_of(name) for name in ids.split(",")[:_MOST_IDS]]
                chosen = [row for row in named if row is not None]
            else:
                chosen = found.table.choose(where, sort, limit, offset).rows.tolist()
            places = [found.table.file_place(row) for row in chosen]
        name = f"{found.paths.rollouts.stem}-selection.jsonl"
        return StreamingResponse(_lines(places), media_type="application/x-ndjson", headers=_download(name))


def _download(name: str) -> dict[str, str]:
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)
    return {"content-disposition": f'attachment; filename="{safe}"'}


def _lines(places: list[tuple[Path, int, int]]) -> Iterator[bytes]:
    for place in places:
        yield read_bytes(*place) + b"\n"


def _add_streams(app: FastAPI, library: Library) -> None:
    @app.get("/api/runs/{run}/search")
    def search(
        run: str,
        q: Annotated[str, Query(min_length=1, max_length=1_000)],
        where: Where = None,
        sort: Sort = None,
        limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    ) -> Response:
        found = _run(library, run)
        with found.lock:
            rows = found.table.choose(where, sort).rows
        events = (event(name, data) for name, data in matches(found, rows, q, limit))
        return StreamingResponse(events, media_type="text/event-stream")

    @app.get("/api/events")
    async def events_of_all() -> Response:
        return StreamingResponse(_events(app, Watch(library)), media_type="text/event-stream")

    @app.get("/api/runs/{run}/events")
    async def events_of_one(run: str) -> Response:
        found = await asyncio.to_thread(_run, library, run)
        return StreamingResponse(_events(app, Watch(library, found.id)), media_type="text/event-stream")


def event(name: str, data: Any) -> bytes:
    """A server-sent event; JSON has no newline in it but the last."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), to_line(data).strip())


async def _events(app: FastAPI, watch: Watch) -> AsyncIterator[bytes]:
    """What changes, until whoever listens goes away or the server ends."""
    silence_s = 0.0
    yield b": watching\n\n"
    while not app.state.is_closing:
        for name, data in await asyncio.to_thread(watch.changes):
            silence_s = 0.0
            yield event(name, data)
        if silence_s >= _SIGN_OF_LIFE_S:
            silence_s = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(_POLL_S)
        silence_s += _POLL_S


Started = Callable[[str], object]
"""Called with the address as soon as the server listens."""


def serve(library: Library, host: str, port: int, started: Started) -> None:
    """Serve until Ctrl-C or SIGTERM; `port` 0 takes any that is free.

    Raises:
        OSError: it is not possible to listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()
        port = listening.getsockname()[1]
        token = new_token()
        app = make_app(library)
        guard = Guard(app, token, host, port)
        settings: Any = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2, "lifespan": "off"}
        settings |= {"date_header": False, "server_header": False}
        server = _quiet_server(uvicorn.Config(guard, **settings), app)
        shown = f"[{host}]" if ":" in host else host
        runtime.collect_garbage_less_often()
        started(f"http://{shown}:{port}/?token={token}")
        server.run(sockets=[listening])


def _quiet_server(config: uvicorn.Config, app: FastAPI) -> uvicorn.Server:
    """A server that sleeps until it is asked something, or told to end: uvicorn's own looks around all the time."""

    class QuietServer(uvicorn.Server):
        async def main_loop(self) -> None:
            self._end = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            if not self.should_exit:
                await self._end.wait()

        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.is_closing = True  # streams end, too: the server waits for them
            super().handle_exit(sig, frame)
            if hasattr(self, "_end"):
                self._loop.call_soon_threadsafe(self._end.set)

    return QuietServer(config)
