"""An environment of somebody else offers its tools over MCP, to a program with the protocol's official client.

Environment and client are processes of their own, as a harness such as Claude Code would be.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.ports import free_port

GYM = str(Path(sys.executable).with_name("gym"))
WITHIN_S = 120.0
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

    url, mode, headers, calls = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])

    async def main():
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
                tools = (await client.list_tools()).tools
                answers = []
                for name, arguments in calls:
                    result = await client.call_tool(name, arguments)
                    text = result.content[0].text
                    answers.append([bool(result.is_error), text, result.structured_content])
                shown = {tool.name: [tool.description, tool.input_schema] for tool in tools}
                print(json.dumps({"server": client.server_info.name, "tools": shown, "answers": answers}))

    asyncio.run(main())
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


@pytest.fixture(params=["hosted", "process"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The base URL of the environment, started in one process with others, and in one of its own."""
    folder = tmp_path / "resources_servers/shop"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(dedent(ENVIRONMENT))
    (folder / "requirements.txt").write_text("")
    port = free_port()
    config = dedent(CONFIG).format(port=port, isolation=request.param)
    (tmp_path / "shop.yaml").write_text(config)
    log = tmp_path / "start.log"
    with log.open("w") as out:
        started = subprocess.Popen(
            [GYM, "env", "start", "--config", "shop.yaml", f"+head_server.port={free_port()}"],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + WITHIN_S
        while not _is_up(url):
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        os.kill(started.pid, signal.SIGINT)
        started.wait(WITHIN_S)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def post(url: str, body: Any, cookies: str = "") -> tuple[Any, str]:
    headers = {"content-type": "application/json", "cookie": cookies}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
        jar: SimpleCookie = SimpleCookie()
        for value in answer.headers.get_all("set-cookie") or []:
            jar.load(value)
        return json.load(answer), "; ".join(f"{name}={morsel.value}" for name, morsel in jar.items())


def use(folder: Path, url: str, headers: dict[str, str], calls: list[Any], mode: str = "auto") -> Any:
    program = folder / "client.py"
    program.write_text(dedent(CLIENT))
    words = [sys.executable, str(program), f"{url}/mcp", mode, json.dumps(headers), json.dumps(calls)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def seeded(url: str, **row: Any) -> tuple[dict[str, Any], str]:
    said, cookies = post(f"{url}/seed_session", {"responses_create_params": {"input": []}, **row})
    return said["mcp"], cookies


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_are_called_in_the_session_that_was_seeded(shop: str, tmp_path: Path, mode: str) -> None:
    mcp, cookies = seeded(shop)
    assert (mcp["server_name"], mcp["url_path"], mcp["transport"]) == ("shop", "/mcp", "http")
    assert list(mcp["headers"]) == ["X-NeMo-Gym-Session-Token"]
    calls = [["add", {"amount": 2}], ["add", {"amount": 3}], ["stock_apples", {"where": "here"}]]
    used = use(tmp_path, shop, mcp["headers"], calls, mode)
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


def test_what_a_session_may_not_do_is_said_to_the_model(shop: str, tmp_path: Path) -> None:
    mcp, _ = seeded(shop, allowed=["add"])
    calls = [["close", {}], ["ad", {}], ["add", {"amount": "many"}]]
    used = use(tmp_path, shop, mcp["headers"], calls)
    assert set(used["tools"]) == {"add"}
    assert [is_error for is_error, _, _ in used["answers"]] == [True, True, True]
    assert "this session may not use 'close'; it may use add" in used["answers"][0][1]
    assert "there is no tool 'ad'; did you mean 'add'?" in used["answers"][1][1]
    assert used["answers"][2][1].startswith("HTTP 422 from POST /add: ")
    everything, _ = seeded(shop)
    failed = use(tmp_path, shop, everything["headers"], [["close", {}]])["answers"]
    assert failed == [[True, "HTTP 409 from POST /close: the shop is open all night", None]]


def test_a_token_is_needed_and_cannot_be_made_up(shop: str, tmp_path: Path) -> None:
    mcp, _ = seeded(shop, allowed=["add"])
    ((header, token),) = mcp["headers"].items()
    forged = {header: token[:-1] + ("0" if token[-1] != "0" else "1")}
    for headers in ({}, forged):
        used = use(tmp_path, shop, headers, [["add", {"amount": 1}]])
        assert set(used["tools"]) == {"add", "close", "stock_apples"}
        assert used["answers"][0][0]
        assert header in used["answers"][0][1]


@pytest.mark.parametrize("isolation", ["hosted", "process"])
def test_a_server_whose_tools_cannot_be_offered_does_not_start_and_says_why(tmp_path: Path, isolation: str) -> None:
    folder = tmp_path / "resources_servers/shop"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(
        dedent(ENVIRONMENT).replace("body: AddRequest,", "body: AddRequest, other: AddRequest,")
    )
    (folder / "requirements.txt").write_text("")
    (tmp_path / "shop.yaml").write_text(dedent(CONFIG).format(port=free_port(), isolation=isolation))
    words = [GYM, "env", "start", "--config", "shop.yaml", "+head_server.port=0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "shop: 'add' cannot be a tool over MCP: it takes 2 bodies (body, other)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
