"""What is particular to calls in memory: who is called, and what happens when the caller vanishes."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request

from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import ServerCallTimeoutError, ServerLostError
from nemo_gym.http.in_memory import CANCELLABLE_PATHS, find_local_app, register_local_app, unregister_local_app
from nemo_gym.http.local_response import LocalResponse
from nemo_gym.http.request import get_response_json

InMemory = Callable[..., Coroutine[Any, Any, Any]]

caller_of: ContextVar[str] = ContextVar("caller_of", default="nobody")


def test_what_runs_in_memory_is_known_by_name_and_address_and_can_be_forgotten(in_memory: InMemory) -> None:
    async def scenario(client: ServerClient) -> Any:
        assert isinstance(await client.get("tools", "/"), LocalResponse)
        assert find_local_app("tools", ("127.0.0.1", 2)) is None
        assert find_local_app("other", ("127.0.0.1", 1)) is None
        unregister_local_app("tools")
        unregister_local_app("tools")
        return find_local_app("tools", ("127.0.0.1", 1))

    assert asyncio.run(in_memory(FastAPI(), scenario)) is None

    async def in_another_loop() -> Any:
        return find_local_app("tools", ("127.0.0.1", 1))

    assert asyncio.run(in_another_loop()) is None


def test_an_in_memory_call_sees_a_copy_of_its_callers_context_and_what_its_lifespan_gave(in_memory: InMemory) -> None:
    app = FastAPI()

    @app.post("/who")
    async def who(request: Request) -> list[str]:
        seen = caller_of.get()
        caller_of.set("changed inside")
        return [seen, request.state.resource]

    async def scenario(client: ServerClient) -> Any:
        caller_of.set("agent")
        answer = await get_response_json(await client.post("tools", "/who"))
        return answer, caller_of.get()

    assert asyncio.run(in_memory(app, scenario, state={"resource": "db"})) == (["agent", "db"], "agent")


class Slow:
    """An app whose handlers all wait, and tell how they ended."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        self.ended.put_nowait("finished")


@pytest.mark.parametrize("vanish", ["cancelled", "out of patience"])
@pytest.mark.parametrize(
    ("path", "end"),
    [
        *((path, "cancelled") for path in sorted(CANCELLABLE_PATHS)),
        ("/verify", "finished"),
        ("/seed_session", "finished"),
        ("/some_tool", "finished"),
    ],
)
def test_a_vanished_caller_cancels_what_only_it_wanted_and_nothing_else(
    path: str, end: str, vanish: str, in_memory: InMemory
) -> None:
    async def main() -> str:
        slow = Slow()

        async def scenario(client: ServerClient) -> str:
            timeout = aiohttp.ClientTimeout(total=0.05 if vanish == "out of patience" else 60)
            call = asyncio.create_task(client.post("tools", path, json={}, timeout=timeout))
            await slow.started.wait()
            if vanish == "cancelled":
                call.cancel()
            with pytest.raises((asyncio.CancelledError, ServerCallTimeoutError)):
                await call
            await asyncio.sleep(0)
            slow.release.set()
            return await asyncio.wait_for(slow.ended.get(), 10)

        how: str = await in_memory(slow, scenario)
        return how

    assert asyncio.run(main()) == end


def test_a_server_may_have_a_tool_called_run(in_memory: InMemory) -> None:
    async def main() -> str:
        slow = Slow()

        async def scenario(client: ServerClient) -> str:
            call = asyncio.create_task(client.post("tools", "/run"))
            await slow.started.wait()
            call.cancel()
            await asyncio.sleep(0)
            slow.release.set()
            return await asyncio.wait_for(slow.ended.get(), 10)

        end: str = await in_memory(slow, scenario, cancellable_paths=frozenset())
        return end

    assert asyncio.run(main()) == "finished"


def test_cancelling_a_rollout_reaches_the_model_call_but_not_the_tool_call_it_waits_for(
    client_for: Callable[[int], ServerClient],
) -> None:
    async def main() -> tuple[str, str]:
        model, tool = Slow(), Slow()
        client = client_for(1)

        async def agent(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.gather(client.post("model", "/v1/responses"), client.post("tool", "/tool"))

        for name, app in (("model", model), ("tool", tool), ("agent", agent)):
            client.global_config_dict[name] = client.global_config_dict["tools"]
            register_local_app(name, app, [("127.0.0.1", 1)])
        rollout = asyncio.create_task(client.post("agent", "/run", json={}))
        await asyncio.gather(model.started.wait(), tool.started.wait())
        rollout.cancel()
        model_end = await asyncio.wait_for(model.ended.get(), 10)
        tool.release.set()
        return model_end, await asyncio.wait_for(tool.ended.get(), 10)

    assert asyncio.run(main()) == ("cancelled", "finished")


def test_a_handler_can_learn_that_its_caller_vanished(in_memory: InMemory) -> None:
    async def main() -> Any:
        waiting = asyncio.Event()
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            listener = asyncio.create_task(receive())
            listener.add_done_callback(lambda task: messages.put_nowait(task.result()))
            waiting.set()
            await asyncio.Event().wait()

        async def scenario(client: ServerClient) -> Any:
            call = asyncio.create_task(client.post("tools", "/run"))
            await waiting.wait()
            call.cancel()
            return await asyncio.wait_for(messages.get(), 10)

        return await in_memory(app, scenario)

    assert asyncio.run(main()) == {"type": "http.disconnect"}


def test_a_server_that_is_stopped_in_the_middle_is_a_lost_connection(in_memory: InMemory) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerLostError, match=r"'tools'.*POST http://127\.0\.0\.1:1/tool"):
            await client.post("tools", "/tool", json={})

    asyncio.run(in_memory(app, scenario))


def test_an_answer_after_the_answer_is_the_authors_mistake(in_memory: InMemory) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError, match="before"):
            await send({"type": "http.response.body", "body": b""})
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        assert await receive() == {"type": "http.disconnect"}
        with pytest.raises(RuntimeError, match="after"):
            await send({"type": "http.response.start", "status": 200})

    async def scenario(client: ServerClient) -> int:
        response = await client.get("tools", "/x")
        await asyncio.sleep(0)
        await response.release()
        await response.wait_for_close()
        assert "204" in repr(response)
        return response.status

    assert asyncio.run(in_memory(app, scenario)) == 204
