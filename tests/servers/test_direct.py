"""The short way into a colocated server: what is handed over, what is copied, and what never waits."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from omegaconf import OmegaConf
from pydantic import BaseModel

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.transports.memory import find_local_app, register_local_app
from nemo_gym.judge import JudgeError
from nemo_gym.server_utils import ServerClient, get_response_json
from nemo_gym.servers.direct import DirectLane
from nemo_gym.servers.routes import never_waits, reads_only

PORT = 1
RESPONSE = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": []}
marked: ContextVar[str] = ContextVar("marked", default="nothing")


class Ask(BaseModel):
    words: list[str]


class MoreThanAsk(Ask):
    more: int = 1


class Tools(SimpleResourcesServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        for endpoint in (self.read, self.change, self.mark, self.wait, self.promise, self.vanish, self.remember):
            app.post(f"/{endpoint.__name__}")(endpoint)
        return app

    @reads_only
    async def read(self, body: Ask) -> dict[str, Any]:
        return {"id": id(body), "words": body.words}

    async def change(self, body: Ask) -> list[str]:
        body.words.append("changed")
        return body.words

    @never_waits
    async def mark(self) -> str:
        marked.set("by the tool")
        return marked.get()

    async def wait(self) -> str:
        await asyncio.sleep(0.01)
        return "waited"

    @never_waits
    async def promise(self) -> str:
        await asyncio.sleep(0)
        return "waited in spite of the mark"

    @never_waits
    async def vanish(self) -> str:
        raise asyncio.CancelledError

    async def remember(self, request: Request) -> dict[str, Any]:
        request.session.setdefault("seen", []).append(len(request.session))
        return dict(request.session)

    @never_waits
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        if not body.response.output:
            raise JudgeError("nobody there")
        return BaseVerifyResponse(**dict(body), reward=1.0)


def play(scenario: Callable[[ServerClient], Awaitable[Any]]) -> Any:
    """Run a scenario with the tools in the same event loop."""
    block = {"resources_servers": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": PORT}}}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"tools": block}),
    )

    async def run() -> Any:
        config = BaseResourcesServerConfig(name="tools", host="127.0.0.1", port=PORT, entrypoint="app.py")
        lane = DirectLane(Tools(config=config, server_client=client).complete_app(), "tools")
        register_local_app("tools", lane, [("127.0.0.1", PORT)], direct=lane)
        return await asyncio.wait_for(scenario(client), 30)

    return asyncio.run(run())


async def answer_of(client: ServerClient, path: str, **options: Any) -> Any:
    return await get_response_json(await client.post("tools", path, **options))


def test_an_object_of_the_very_type_is_handed_to_an_endpoint_that_only_reads() -> None:
    async def scenario(client: ServerClient) -> Any:
        asked, more = Ask(words=["a"]), MoreThanAsk(words=["a"])
        answers = [await answer_of(client, "/read", json=each) for each in (asked, more, {"words": ["a"]})]
        return [answer["words"] for answer in answers], [answer["id"] == id(asked) for answer in answers]

    assert play(scenario) == ([["a"]] * 3, [True, False, False])


def test_an_endpoint_that_may_change_its_body_gets_a_copy() -> None:
    async def scenario(client: ServerClient) -> Any:
        asked = Ask(words=["a"])
        return await answer_of(client, "/change", json=asked), asked.words

    assert play(scenario) == (["a", "changed"], ["a"])


def test_a_tool_that_never_waits_runs_at_once_in_a_context_of_its_own() -> None:
    async def scenario(client: ServerClient) -> Any:
        hosted = find_local_app("tools", ("127.0.0.1", PORT))
        assert hosted is not None
        assert hosted.direct is not None
        at_once = {
            path: hosted.direct.never_waits(hosted.direct.find("POST", path))
            for path in ("/mark", "/wait", "/seed_session", "/verify")
        }
        return at_once, await answer_of(client, "/mark"), marked.get(), await answer_of(client, "/wait")

    at_once = {"/mark": True, "/wait": False, "/seed_session": True, "/verify": True}
    assert play(scenario) == (at_once, "by the tool", "nothing", "waited")


def test_only_what_is_marked_never_waits_and_an_override_starts_without_the_mark() -> None:
    class Slower(Tools):
        async def mark(self) -> str:
            return await super().mark()

    assert getattr(Tools.mark, "never_waits", False)
    assert not getattr(Slower.mark, "never_waits", False)
    assert not getattr(Tools.remember, "never_waits", False)  # its code awaits nothing, but nobody said so


def test_a_tool_that_waits_in_spite_of_its_mark_is_an_error_that_names_the_mark() -> None:
    async def scenario(client: ServerClient) -> Any:
        answer = await client.post("tools", "/promise")
        return answer.status, (await answer.read()).decode()

    status, text = play(scenario)
    assert status == 500
    assert "marked never_waits" in text


def test_a_tool_that_cancels_itself_is_a_server_that_vanished_not_a_cancelled_caller() -> None:
    async def scenario(client: ServerClient) -> Any:
        try:
            await client.post("tools", "/vanish")
        except Exception as error:  # noqa: BLE001 - which one is the question
            return type(error).__name__

    assert play(scenario) == "ServerLostError"


def test_a_judge_that_failed_is_no_score_on_the_short_way_either() -> None:
    async def scenario(client: ServerClient) -> Any:
        row = {"responses_create_params": {"input": "?"}, "response": RESPONSE}
        answer = await answer_of(client, "/verify", json=row)
        return answer["reward"], answer["_ng_failure_class"]

    assert play(scenario) == ("NaN", "judge_failed")


def test_what_a_tool_keeps_in_its_session_is_there_next_time_and_only_then() -> None:
    async def scenario(client: ServerClient) -> Any:
        first = await client.post("tools", "/remember")
        second = await client.post("tools", "/remember", cookies=first.cookies)
        again = await client.post("tools", "/remember", cookies=first.cookies)
        return [(await get_response_json(answer))["seen"] for answer in (first, second, again)]

    assert play(scenario) == [[2], [2, 2], [2, 2]]
