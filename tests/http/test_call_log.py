"""What an agent tells about the calls of a rollout, and what a collector makes of it."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import Body, FastAPI
from omegaconf import OmegaConf
from starlette.middleware.base import BaseHTTPMiddleware

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.run_answers import (
    ASKS_FOR_CALLS,
    ATTEMPT_HEADER,
    CALL_LOG,
    CALLS_HEADER,
    IN_FLIGHT_PATH,
    MOST_CALLS,
    CallLog,
    calls_told,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import raise_for_status

PORT = 9


class Caller(SimpleResponsesAPIAgent):
    """As authors elsewhere write them: `/run` calls the agent itself, which calls something else."""

    is_wrapped: bool = False

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/tool")(self.tool)
        if self.is_wrapped:  # closes the short way

            async def pass_on(request: Any, call_next: Any) -> Any:
                return await call_next(request)

            app.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
        return app

    async def tool(self) -> str:
        await asyncio.sleep(0.002)
        return "done"

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        raise NotImplementedError

    async def run(self, body: dict[str, Any] = Body()) -> dict[str, Any]:  # type: ignore[override]
        for _ in range(body["calls"]):
            await raise_for_status(await self.server_client.post("caller", "/tool"))
        if body.get("fails"):
            await self.server_client.post("caller", "/no_such_path")
            raise RuntimeError("no luck")
        return {"reward": 1.0}


def answers(*bodies: dict[str, Any], is_wrapped: bool, asked: bool = True) -> list[Any]:
    """What the agent answers, asked one after the other."""
    block = {"responses_api_agents": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": PORT}}}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"caller": block}),
    )

    async def ask() -> list[Any]:
        config = BaseResponsesAPIAgentConfig(name="caller", host="127.0.0.1", port=PORT, entrypoint="app.py")
        agent = Caller(config=config, server_client=client, is_wrapped=is_wrapped)
        app = agent.complete_app()
        register_local_app("caller", app, [("127.0.0.1", PORT)])
        headers = {"headers": ASKS_FOR_CALLS} if asked else {}
        found = [await client.post("caller", "/run", json=body, **headers) for body in bodies]
        assert CALL_LOG.get() is None
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_agent_that_does_nothing_for_it_tells_its_calls_to_those_who_ask(is_wrapped: bool) -> None:
    none, two, failed = answers({"calls": 0}, {"calls": 2}, {"calls": 1, "fails": True}, is_wrapped=is_wrapped)

    assert calls_told(none.headers) == {"calls": []}
    calls = calls_told(two.headers)["calls"]
    assert [(call["server"], call["path"]) for call in calls] == [("caller", "/tool")] * 2
    assert all(call["duration_s"] >= 0.002 for call in calls)
    assert calls[1]["start_s"] >= calls[0]["start_s"] + 0.002
    assert failed.status == 500
    assert [call["path"] for call in calls_told(failed.headers)["calls"]] == ["/tool", "/no_such_path"]
    (unasked,) = answers({"calls": 2}, is_wrapped=is_wrapped, asked=False)
    assert CALLS_HEADER not in unasked.headers


def test_of_very_many_calls_the_first_are_told_and_the_others_counted() -> None:
    log = CallLog()
    for number in range(MOST_CALLS + 50):
        log.note("server", f"/tool_{number % 3}", log._began_s + number * 3600)

    name, value = log.header()
    told = calls_told({name.decode(): value.decode()})

    assert len(value) < 8_000
    assert (len(told["calls"]), told["calls_left_out"]) == (MOST_CALLS, 50)
    assert [call["start_s"] for call in told["calls"][:3]] == [0, 3600, 7200]


def test_a_header_stays_short_whatever_the_calls_are_called() -> None:
    log = CallLog()
    for number in range(MOST_CALLS):
        log.note("sérvér " * 20, f"/{number}/" + "\n☃\ud800" * 5_000, log._began_s)

    name, value = log.header()
    told = calls_told({name.decode(): value.decode("ascii")})

    assert len(value) < 8_000
    assert b"\n" not in value
    assert len(told["calls"]) + told["calls_left_out"] == MOST_CALLS
    assert told["calls"][0]["path"].startswith("/0/\n☃")


@pytest.mark.parametrize(
    "value",
    [None, "", "3", "{}", "[]", '["x"]', "[0,3]", "[0,[]]", '[0,["s","/p",1]]', '[0,["s","/p",1,"x"]]', "[" * 50_000],
)
def test_what_cannot_be_read_is_not_told(value: Any) -> None:
    assert calls_told({} if value is None else {CALLS_HEADER: value}) == {}
    assert calls_told(None) == {}


def test_names_that_are_no_text_are_left_out() -> None:
    assert calls_told({CALLS_HEADER: json.dumps([0, [1, 2, 3, 4], ["a", "/b", 5, 6]])}) == {
        "calls": [{"server": "a", "path": "/b", "start_s": 5e-06, "duration_s": 6e-06}]
    }


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_rollout_that_was_asked_for_by_name_can_be_asked_after(is_wrapped: bool) -> None:
    block = {"responses_api_agents": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": PORT}}}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"caller": block}),
    )

    async def look() -> None:
        in_tool, may_end = asyncio.Event(), asyncio.Event()

        class Waiting(Caller):
            async def tool(self) -> str:
                if in_tool.is_set():
                    await may_end.wait()
                in_tool.set()
                return "done"

        config = BaseResponsesAPIAgentConfig(name="caller", host="127.0.0.1", port=PORT, entrypoint="app.py")
        agent = Waiting(config=config, server_client=client, is_wrapped=is_wrapped)
        app = agent.complete_app()
        register_local_app("caller", app, [("127.0.0.1", PORT)])
        headers = {**ASKS_FOR_CALLS, ATTEMPT_HEADER: "run/3/0"}
        rollout = asyncio.create_task(client.post("caller", "/run", json={"calls": 2}, headers=headers))
        await in_tool.wait()
        while (told := (await (await client.get("caller", IN_FLIGHT_PATH)).json())["run/3/0"])["calls"] < 1:
            pass
        while told["call"] is None:
            told = (await (await client.get("caller", IN_FLIGHT_PATH)).json())["run/3/0"]

        assert (told["calls"], told["call"]["server"], told["call"]["path"]) == (1, "caller", "/tool")
        assert told["for_s"] >= told["call"]["for_s"] >= 0
        may_end.set()
        await rollout
        assert await (await client.get("caller", IN_FLIGHT_PATH)).json() == {}

    asyncio.run(look())
