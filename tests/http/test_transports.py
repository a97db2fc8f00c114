"""The two transports side by side: whatever a caller can see is the same over HTTP and in memory."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from fastapi import APIRouter, BackgroundTasks, FastAPI, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.sessions import SessionMiddleware

from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import ServerLostError, ServerResponseError
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.local_response import LocalResponse
from nemo_gym.http.request import get_response_json, raise_for_status

routes = APIRouter()


@routes.post("/count")
async def count(request: Request) -> dict[str, Any]:
    request.session["count"] = request.session.get("count", 0) + 1
    return {"count": request.session["count"]}


@routes.api_route("/echo/{rest:path}", methods=["GET", "POST", "PUT", "HEAD"])
async def echo(rest: str, request: Request) -> dict[str, Any]:
    shown = ("content-type", "content-length", "host", "accept", "x-mine")
    return {
        "method": request.method,
        "rest": rest,
        "query": request.query_params.multi_items(),
        "body": (await request.body()).decode(),
        "headers": {name: request.headers[name] for name in shown if name in request.headers},
        "cookies": request.cookies,
        "url": str(request.url),
    }


@routes.post("/teapot")
async def teapot() -> None:
    raise HTTPException(418, detail="short and stout")


@routes.post("/typed")
async def typed(number: int) -> None:
    return None


@routes.post("/crash")
async def crash() -> None:
    raise ValueError("boom")


@routes.get("/plain")
async def plain() -> Response:
    return PlainTextResponse("grün".encode("latin-1"), 203, media_type="text/plain; charset=latin-1")


@routes.get("/stream")
async def stream() -> StreamingResponse:
    async def lines() -> AsyncIterator[bytes]:
        for number in range(3):
            await asyncio.sleep(0)
            yield b"line %d\n" % number

    return StreamingResponse(lines(), media_type="text/event-stream")


@routes.post("/old")
async def old() -> RedirectResponse:
    return RedirectResponse("/count", 307)


@routes.get("/cookies")
async def cookies_of_all_kinds(response: Response) -> None:
    response.set_cookie("kept", "a b")
    response.set_cookie("elsewhere", "1", path="/nowhere")
    response.set_cookie("safe", "1", secure=True)
    response.set_cookie("plain", "1")
    response.delete_cookie("gone")


def tools_app() -> FastAPI:
    app = FastAPI()
    app.add_middleware(SessionMiddleware, secret_key="secret", session_cookie="Tools___tools")
    app.include_router(routes)
    return app


def test_status_headers_and_bodies_arrive(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        response = await client.get("tools", "/plain")
        return (
            response.status,
            response.ok,
            response.reason,
            response.headers["Content-Type"],
            response.content_type,
            response.charset,
            await response.text(),
            await response.read(),
            response.method,
            response.url.path,
            response.request_info.method,
        )

    assert run_with(tools_app(), scenario) == (
        203,
        True,
        "Non-Authoritative Information",
        "text/plain; charset=latin-1",
        "text/plain",
        "latin-1",
        "grün",
        "grün".encode("latin-1"),
        "GET",
        "/plain",
        "GET",
    )


def test_json_is_read_in_every_way(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        async with await client.post("tools", "/echo/x", json={"a": [1, "é"]}) as response:
            first = await response.json()
            assert first == await get_response_json(response)
        plain = await client.get("tools", "/plain")
        with pytest.raises(aiohttp.ContentTypeError, match="text/plain"):
            await plain.json()
        plain.release()
        plain.close()
        return first["body"], first["headers"]["content-type"], first["headers"]["content-length"]

    assert run_with(tools_app(), scenario) == ('{"a":[1,"é"]}', "application/json", "14")


def test_paths_queries_headers_and_methods_arrive_as_they_were_meant(
    run_with: Callable[..., Any], free_port: int
) -> None:
    async def scenario(client: ServerClient) -> Any:
        calls = [
            client.get("tools", "/echo/a%20b/ü?x=1&x=2", params={"y": "a&b"}, headers={"X-Mine": "yes"}),
            client.get("tools", "echo/no-slash"),
            client.get("tools", "/echo/../echo/dots"),
            client.post("tools", "/echo/empty"),
            client.post("tools", "/echo/text", data="text"),
            client.request("tools", "/echo/put", "put", data=b"bytes", headers={"Content-Type": "x/y"}),
        ]
        return [await get_response_json(await call) for call in calls]

    base = f"http://127.0.0.1:{free_port}"
    shared = {"host": f"127.0.0.1:{free_port}", "accept": "*/*"}
    answers = run_with(tools_app(), scenario)

    assert [answer.pop("cookies") for answer in answers] == [{}] * 6
    assert [answer["method"] for answer in answers] == ["GET", "GET", "GET", "POST", "POST", "PUT"]
    assert [answer["rest"] for answer in answers] == ["a b/ü", "no-slash", "dots", "empty", "text", "put"]
    assert answers[0]["query"] == [["x", "1"], ["x", "2"], ["y", "a&b"]]
    assert answers[0]["url"] == f"{base}/echo/a b/ü?x=1&x=2&y=a%26b"
    assert [answer["headers"].get("content-length") for answer in answers] == [None, None, None, "0", "4", "5"]
    assert answers[0]["headers"] == {**shared, "x-mine": "yes"}
    assert answers[4]["headers"]["content-type"] == "text/plain; charset=utf-8"
    assert answers[5]["headers"]["content-type"] == "x/y"


def test_a_head_request_gets_headers_and_no_body(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        response = await client.request("tools", "/echo/x", "HEAD")
        return response.status, await response.read(), "content-length" in response.headers

    assert run_with(tools_app(), scenario) == (200, b"", True)


def test_a_session_travels_in_the_cookie(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        cookies: Any = None
        counts = []
        for _ in range(3):
            response = await client.post("tools", "/count", json={}, cookies=cookies)
            cookies = response.cookies
            counts.append((await get_response_json(response))["count"])
        by_value = {name: morsel.value for name, morsel in cookies.items()}
        counts.append((await get_response_json(await client.post("tools", "/count", cookies=by_value)))["count"])
        counts.append((await get_response_json(await client.post("tools", "/count")))["count"])
        morsel = cookies["Tools___tools"]
        return counts, morsel["path"], morsel["max-age"], bool(morsel["httponly"]), morsel["samesite"]

    assert run_with(tools_app(), scenario) == ([1, 2, 3, 4, 1], "/", "1209600", True, "lax")


def test_cookies_apply_where_they_are_meant_to(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        giving = await client.get("tools", "/cookies")
        await giving.read()
        cookies = giving.cookies
        header = {"Cookie": "mine=2"}
        inside = await client.get("tools", "/echo/x", cookies=cookies, headers=header)
        return sorted(cookies), (await get_response_json(inside))["cookies"]

    assert run_with(tools_app(), scenario) == (
        ["elsewhere", "gone", "kept", "plain", "safe"],
        {"mine": "2", "kept": "a b", "plain": "1"},
    )


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/teapot", 418, b'{"detail":"short and stout"}'),
        ("/nowhere", 404, b'{"detail":"Not Found"}'),
        ("/stream", 405, b'{"detail":"Method Not Allowed"}'),
        ("/crash", 500, b"Internal Server Error"),
    ],
)
def test_error_answers_are_the_same(path: str, status: int, body: bytes, run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        response = await client.post("tools", path, json={})
        with pytest.raises(ServerResponseError) as caught:
            await raise_for_status(response)
        with pytest.raises(aiohttp.ClientResponseError):
            response.raise_for_status()
        return caught.value.status, caught.value.response_content

    logging.getLogger("nemo_gym.http.in_memory").setLevel(logging.CRITICAL)
    try:
        assert run_with(tools_app(), scenario) == (status, body)
    finally:
        logging.getLogger("nemo_gym.http.in_memory").setLevel(logging.NOTSET)


def test_validation_errors_are_the_same(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        response = await client.post("tools", "/typed?number=x")
        return response.status, (await get_response_json(response))["detail"][0]["loc"]

    assert run_with(tools_app(), scenario) == (422, ["query", "number"])


def test_a_bare_app_that_fails_answers_500_and_says_why_in_the_log(
    run_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            sys.exit("the author thought this ends the handler")

    async def scenario(client: ServerClient) -> Any:
        response = await client.post("tools", "/x", json={})
        return response.status, await response.text()

    caplog.set_level(logging.ERROR)
    logging.getLogger("uvicorn.error").disabled = True
    try:
        assert run_with(app, scenario) == (500, "Internal Server Error")
    finally:
        logging.getLogger("uvicorn.error").disabled = False


def test_an_answer_that_breaks_off_cannot_be_read(run_with: Callable[..., Any]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def scenario(client: ServerClient) -> Any:
        response = await client.post("tools", "/x", json={})
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
        response = await client.post("tools", "/x", json={})
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
        response.close()
        with pytest.raises(ServerLostError):
            await get_response_json(await client.post("tools", "/x", json={}))
        return response.status

    assert run_with(app, scenario) == 200


def test_a_streamed_answer_is_read_whole_or_piece_by_piece(run_with: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> Any:
        whole = await (await client.get("tools", "/stream")).read()
        piecewise = await client.get("tools", "/stream")
        lines = [line async for line in piecewise.content]
        at_once = await (await client.get("tools", "/stream")).content.read()
        return whole, lines, at_once

    text = b"line 0\nline 1\nline 2\n"
    assert run_with(tools_app(), scenario) == (text, [b"line 0\n", b"line 1\n", b"line 2\n"], text)


def test_redirects_are_followed(run_with: Callable[..., Any], listening: Callable[..., Any]) -> None:
    app = tools_app()

    async def scenario(client: ServerClient) -> Any:
        stayed = await client.post("tools", "/old", json={}, allow_redirects=False)
        await stayed.read()
        async with listening(app, 0) as port:
            elsewhere = f"http://127.0.0.1:{port}/count"

            @app.post("/elsewhere")
            async def redirect() -> RedirectResponse:
                return RedirectResponse(elsewhere, 307)

            @app.post("/see-other")
            async def see_other() -> RedirectResponse:
                return RedirectResponse(f"http://127.0.0.1:{port}/plain", 303)

            followed = await client.post("tools", "/elsewhere", json={})
            other = await client.post("tools", "/see-other", json={})
            return stayed.status, await get_response_json(followed), await other.text(), other.method

    assert run_with(app, scenario) == (307, {"count": 1}, "grün", "GET")


def test_middleware_of_other_authors_works(run_with: Callable[..., Any]) -> None:
    app = tools_app()

    async def stamp(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        body = await request.body()
        response = await call_next(request)
        response.headers["x-seen"] = str(len(body))
        return response

    app.add_middleware(BaseHTTPMiddleware, dispatch=stamp)

    async def scenario(client: ServerClient) -> Any:
        response = await client.post("tools", "/echo/x", json={"a": 1})
        return response.headers["X-Seen"], (await get_response_json(response))["body"]

    assert run_with(app, scenario) == ("7", '{"a":1}')


def test_background_work_goes_on_after_the_answer(run_with: Callable[..., Any]) -> None:
    app = FastAPI()
    answered, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await answered.wait()
        done.set()

    @app.post("/start")
    async def start(tasks: BackgroundTasks) -> str:
        tasks.add_task(work)
        return "started"

    async def scenario(client: ServerClient) -> Any:
        answer = await get_response_json(await client.post("tools", "/start"))
        assert not done.is_set()
        answered.set()
        await asyncio.wait_for(done.wait(), 10)
        return answer

    assert run_with(app, scenario) == "started"


def test_a_form_is_sent_over_a_real_connection(
    run_with: Callable[..., Any], listening: Callable[..., Any], client_for: Callable[[int], ServerClient]
) -> None:
    app = tools_app()

    async def scenario(client: ServerClient) -> Any:
        async with listening(app, 0) as port:
            register_local_app("tools", app, [("127.0.0.1", port)])
            response = await client_for(port).post("tools", "/echo/form", data={"a": "1"})
            return isinstance(response, LocalResponse), (await get_response_json(response))["body"]

    assert run_with(app, scenario) == (False, "a=1")
