"""An environment of somebody else offers its tools over MCP, to a program with the protocol's official client.

Environment and client are processes of their own, as a harness such as Claude Code would be.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.ports import free_port
from tests.programs import WAIT_S, Program, run_program

ENVIRONMENT = """
    from collections import Counter

    from fastapi import FastAPI, HTTPException, Request
    from pydantic import BaseModel

    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer,
    )
    from nemo_gym.server_utils import SESSION_ID_KEY


    class AddRequest(BaseModel):
        amount: int


    class Shop(SimpleResourcesServer):
        config: BaseResourcesServerConfig
        baskets: Counter = Counter()

        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.post("/add", description="Put goods into the basket.")(self.add)
            app.post("/close")(self.close)
            app.post("/stock_{item}")(self.stock)
            return app

        async def add(self, body: AddRequest, request: Request) -> dict:
            session = request.session[SESSION_ID_KEY]
            self.baskets[session] += body.amount
            return {"in_basket": self.baskets[session]}

        def close(self, body: dict) -> str:
            raise HTTPException(409, "the shop is open all night")

        async def stock(self, item: str, body: dict) -> list:
            return [item, body.get("where", "anywhere")]

        def mcp_tools(self, harvested, catchall):
            return [*harvested, catchall.tool("stock_apples", description="How many apples there are.")]

        def mcp_allowed_tools_for_session(self, seed_body):
            return seed_body.get("allowed")

        async def verify(self, body: BaseVerifyRequest, request: Request) -> BaseVerifyResponse:
            names = [item.name for item in body.response.output if item.type == "function_call"]
            filled = self.baskets[request.session[SESSION_ID_KEY]]
            return BaseVerifyResponse(**body.model_dump(), reward=float(names == ["add"] and filled == 5))


    if __name__ == "__main__":
        Shop.run_webserver()
"""
CLIENT = """
    import asyncio, json, sys

    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async def main(url, mode, headers, calls):
        async with asyncio.timeout(100), httpx2.AsyncClient(headers=headers, timeout=60) as http:
            async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
                tools = (await client.list_tools()).tools
                answers = []
                for name, arguments in calls:
                    result = await client.call_tool(name, arguments)
                    text = result.content[0].text
                    answers.append([bool(result.is_error), text, result.structured_content])
                shown = {tool.name: [tool.description, tool.input_schema] for tool in tools}
                said = {"server": client.server_info.name, "tools": shown, "answers": answers}
                print(json.dumps(said), flush=True)

    for line in sys.stdin:
        asyncio.run(main(**json.loads(line)))
"""
CONFIG = """
    shop:
      resources_servers:
        shop:
          entrypoint: app.py
          domain: other
          verified: false
          expose_tools_over_mcp: true
          isolation: {isolation}
          host: 127.0.0.1
          port: {port}
"""


Use = Callable[..., Any]


@pytest.fixture(params=["hosted", "process"], scope="module")
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the environment, started in one process with others, and in one of its own.

    Every test has sessions of its own there.
    """
    folder = tmp_path_factory.mktemp(request.param)
    port = free_port()
    write_shop(folder, port, request.param)
    started = Program("gym", "env", "start", "--config", "shop.yaml", "+head_server.port=0", folder=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + WAIT_S
        while not _is_up(url):
            assert started.is_running, started.stdout + started.stderr
            assert time.monotonic() < until, started.stdout + started.stderr
            time.sleep(0.1)
        yield url
        started.send(signal.SIGINT)
        assert started.wait() in (0, 130), started.stderr
    finally:
        started.stop()


def write_shop(folder: Path, port: int, isolation: str, program: str = ENVIRONMENT) -> None:
    place = folder / "resources_servers/shop"
    place.mkdir(parents=True)
    (place / "app.py").write_text(dedent(program))
    (place / "requirements.txt").write_text("")
    (folder / "shop.yaml").write_text(dedent(CONFIG).format(port=port, isolation=isolation))


@pytest.fixture(scope="module")
def use(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Use]:
    """Have the client list the tools and make calls; it opens a connection each time."""
    program = tmp_path_factory.mktemp("client") / "client.py"
    program.write_text(dedent(CLIENT))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, program], stdin=pipe, stdout=pipe, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None

        def asked(url: str, headers: dict[str, str], calls: list[Any], mode: str = "auto") -> Any:
            wanted = {"url": f"{url}/mcp", "mode": mode, "headers": headers, "calls": calls}
            client.stdin.write(json.dumps(wanted) + "\n")  # type: ignore[union-attr]
            client.stdin.flush()  # type: ignore[union-attr]
            said = client.stdout.readline()  # type: ignore[union-attr]
            assert said, "the client failed; why is on stderr"
            return json.loads(said)

        yield asked
        client.stdin.close()
        assert client.wait(WAIT_S) == 0


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def post(url: str, body: Any, cookies: str = "") -> tuple[Any, str]:
    headers = {"content-type": "application/json", "cookie": cookies}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
        jar: SimpleCookie = SimpleCookie()
        for value in answer.headers.get_all("set-cookie") or []:
            jar.load(value)
        return json.load(answer), "; ".join(f"{name}={morsel.value}" for name, morsel in jar.items())


def seeded(url: str, **row: Any) -> tuple[dict[str, Any], str]:
    said, cookies = post(f"{url}/seed_session", {"responses_create_params": {"input": []}, **row})
    return said["mcp"], cookies


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_are_called_in_the_session_that_was_seeded(shop: str, use: Use, mode: str) -> None:
    mcp, cookies = seeded(shop)
    assert (mcp["server_name"], mcp["url_path"], mcp["transport"]) == ("shop", "/mcp", "http")
    assert list(mcp["headers"]) == ["X-NeMo-Gym-Session-Token"]
    calls = [["add", {"amount": 2}], ["add", {"amount": 3}], ["stock_apples", {"where": "here"}]]
    used = use(shop, mcp["headers"], calls, mode)
    assert used["server"] == "shop"
    assert set(used["tools"]) == {"add", "close", "stock_apples"}
    assert used["tools"]["add"][0] == "Put goods into the basket."
    assert used["tools"]["add"][1]["properties"]["amount"]["type"] == "integer"
    assert used["tools"]["stock_apples"] == [
        "How many apples there are.",
        {"type": "object", "additionalProperties": True},
    ]
    assert used["answers"][:2] == [
        [False, '{"in_basket": 2}', {"in_basket": 2}],
        [False, '{"in_basket": 5}', {"in_basket": 5}],
    ]
    assert used["answers"][2] == [False, '["stock_apples", "here"]', None]
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "mcp__shop__add", "arguments": "{}"}
    response = {
        "id": "r", "created_at": 0, "model": "m", "object": "response", "output": [call],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    verdict, _ = post(f"{shop}/verify", {"responses_create_params": {"input": []}, "response": response}, cookies)
    assert verdict["reward"] == 1.0
    assert verdict["response"]["output"][0]["name"] == "mcp__shop__add"


def test_what_a_session_may_not_do_is_said_to_the_model(shop: str, use: Use) -> None:
    mcp, _ = seeded(shop, allowed=["add"])
    calls = [["close", {}], ["ad", {}], ["add", {"amount": "many"}]]
    used = use(shop, mcp["headers"], calls)
    assert set(used["tools"]) == {"add"}
    assert [is_error for is_error, _, _ in used["answers"]] == [True, True, True]
    assert "this session may not use 'close'; it may use add" in used["answers"][0][1]
    assert "there is no tool 'ad'; did you mean 'add'?" in used["answers"][1][1]
    assert used["answers"][2][1].startswith("HTTP 422 from POST /add: ")
    everything, _ = seeded(shop)
    failed = use(shop, everything["headers"], [["close", {}]])["answers"]
    assert failed == [[True, "HTTP 409 from POST /close: the shop is open all night", None]]


def test_a_text_is_no_list_of_tools(shop: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="500") as refused:
        seeded(shop, allowed="add, close")
    assert "must return a list of names, or None for all: 'add, close'" in refused.value.read().decode()


def test_a_token_is_needed_and_cannot_be_made_up(shop: str, use: Use) -> None:
    mcp, _ = seeded(shop, allowed=["add"])
    ((header, token),) = mcp["headers"].items()
    forged = {header: token[:-1] + ("0" if token[-1] != "0" else "1")}
    for headers in ({}, forged):
        used = use(shop, headers, [["add", {"amount": 1}]])
        assert set(used["tools"]) == {"add", "close", "stock_apples"}
        assert used["answers"][0][0]
        assert header in used["answers"][0][1]


@pytest.mark.parametrize("isolation", ["hosted", "process"])
def test_a_server_whose_tools_cannot_be_offered_does_not_start_and_says_why(tmp_path: Path, isolation: str) -> None:
    two_bodies = ENVIRONMENT.replace("body: AddRequest,", "body: AddRequest, other: AddRequest,")
    write_shop(tmp_path, free_port(), isolation, two_bodies)
    done = run_program("gym", "env", "start", "--config", "shop.yaml", "+head_server.port=0", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "shop: 'add' cannot be a tool over MCP: it takes 2 bodies (body, other)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
