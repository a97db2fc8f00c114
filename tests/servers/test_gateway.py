"""What every request passes: sessions, errors, authors' own middleware, and the work of callers that are gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from omegaconf import OmegaConf
from pydantic import BaseModel, PrivateAttr
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.judge import JudgeError
from nemo_gym.server_utils import ServerClient, get_response_json

PORT = 1
RESPONSE = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}


class Ask(BaseModel):
    words: list[str]


class Tools(SimpleResourcesServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        for endpoint in (self.change, self.vanish, self.remember, self.refuse, self.crash):
            app.post(f"/{endpoint.__name__}")(endpoint)
        return app

    async def change(self, body: Ask) -> list[str]:
        body.words.append("changed")
        return body.words

    async def vanish(self) -> str:
        raise asyncio.CancelledError

    async def refuse(self) -> str:
        raise HTTPException(409, "not now")

    async def crash(self) -> str:
        raise LookupError("lost")

    async def remember(self, request: Request) -> dict[str, Any]:
        request.session.setdefault("seen", []).append(len(request.session))
        return dict(request.session)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        if not body.response.output:
            raise JudgeError("nobody there")
        return BaseVerifyResponse(**dict(body), reward=1.0)


class Noting(Tools):
    _paths: list[str] = PrivateAttr(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            self._paths.append(request.url.path)
            answer = await call_next(request)
            answer.headers["x-from-author"] = request.session["session_id"]
            return answer

        return app


def tools(kind: type[Tools] = Tools) -> Any:
    block = {"resources_servers": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": PORT}}}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": block}),
    )
    config = BaseResourcesServerConfig(name="tools", host="127.0.0.1", port=PORT, entrypoint="app.py")
    return kind(config=config, server_client=client)


def play(scenario: Callable[[ServerClient], Awaitable[Any]]) -> Any:
    """Run a scenario with the tools in the same event loop."""

    async def run() -> Any:
        server = tools()
        register_local_app("tools", server.complete_app(), [("127.0.0.1", PORT)])
        return await asyncio.wait_for(scenario(server.server_client), 30)

    return asyncio.run(run())


def test_a_tool_changes_a_copy_of_what_its_caller_sent() -> None:
    async def scenario(client: ServerClient) -> Any:
        asked = Ask(words=["a"])
        return await get_response_json(await client.post("tools", "/change", json=asked)), asked.words

    assert play(scenario) == (["a", "changed"], ["a"])


def test_a_tool_that_cancels_itself_is_a_server_that_vanished() -> None:
    async def scenario(client: ServerClient) -> Any:
        try:
            await client.post("tools", "/vanish")
        except Exception as error:  # noqa: BLE001 - which one is the question
            return type(error).__name__

    assert play(scenario) == "ServerLostError"


def test_a_judge_that_failed_is_no_score() -> None:
    async def scenario(client: ServerClient) -> Any:
        row = {"responses_create_params": {"input": "?"}, "response": RESPONSE}
        answer = await get_response_json(await client.post("tools", "/verify", json=row))
        return answer["reward"], answer["_ng_failure_class"]

    assert play(scenario) == ("NaN", "judge_failed")


def test_a_session_holds_what_a_tool_put_there_and_nothing_of_later_requests() -> None:
    async def scenario(client: ServerClient) -> Any:
        first = await client.post("tools", "/remember")
        second = await client.post("tools", "/remember", cookies=first.cookies)
        again = await client.post("tools", "/remember", cookies=first.cookies)
        return [(await get_response_json(answer))["seen"] for answer in (first, second, again)]

    assert play(scenario) == [[2], [2, 2], [2, 2]]


def test_a_cookie_that_somebody_else_signed_begins_a_new_session() -> None:
    name = tools().get_session_middleware_key()

    async def scenario(client: ServerClient) -> Any:
        first = await client.post("tools", "/remember")
        value = first.cookies[name].value
        forged = {name: value[:-1] + ("0" if value[-1] != "0" else "1")}
        return [
            len((await get_response_json(answer))["seen"])
            for answer in (
                await client.post("tools", "/remember", cookies=first.cookies),
                await client.post("tools", "/remember", cookies=forged),
                await client.post("tools", "/remember", cookies={name: "nonsense"}),
            )
        ]

    assert play(scenario) == [2, 1, 1]


def test_errors_carry_the_session_and_say_where_they_began() -> None:
    client = TestClient(tools().complete_app(), raise_server_exceptions=False)

    refused, crashed, invalid = (client.post(path, json={}) for path in ("/refuse", "/crash", "/change"))

    assert (refused.status_code, refused.json()) == (409, {"detail": "not now"})
    assert (crashed.status_code, crashed.json()) == (500, "LookupError('lost')")
    assert (invalid.status_code, invalid.json()["detail"][0]["loc"]) == (422, ["body", "words"])
    for answer in (refused, crashed, invalid):
        assert answer.headers["x-nemo-gym-error-server"] == "tools"
        assert answer.headers["x-nemo-gym-error-status"] == str(answer.status_code)
    assert len(refused.headers.get_list("set-cookie")) == len(crashed.headers.get_list("set-cookie")) == 1


def test_middleware_of_an_author_sees_the_session_and_the_path_without_the_rollout() -> None:
    for app_of in (Noting.setup_webserver, Noting.complete_app):
        server = tools(Noting)
        client = TestClient(app_of(server), raise_server_exceptions=False)

        answer = client.post("/remember", json={})

        assert answer.headers["x-from-author"] == answer.json()["session_id"]
        assert server._paths == ["/remember"]

    assert client.post("/ng-rollout/3-1/remember", json={}).status_code == 200
    assert server._paths == ["/remember", "/remember"]
