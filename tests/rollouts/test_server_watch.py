"""Servers that are dead, silent or well, as sockets on loopback."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.server_client import ServerClient
from nemo_gym.rollouts.server_watch import ServerDownError, ServerWatch, servers_needed_by

SILENCE_S = 0.8


class _Well(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def ports() -> Iterator[dict[str, int]]:
    """One of a server that is well, one that accepts and is silent, one where nobody listens."""
    well = HTTPServer(("127.0.0.1", 0), _Well)
    thread = threading.Thread(target=well.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            dead = probe.getsockname()[1]
        try:
            yield {"well": well.server_port, "silent": silent.getsockname()[1], "dead": dead}
        finally:
            well.shutdown()
            well.server_close()
            thread.join()


def server(kind: str, port: int, **references: str) -> dict[str, Any]:
    named = {key: {"type": "responses_api_models", "name": name} for key, name in references.items()}
    return {kind: {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **named}}}


def client_for(state_of_model: str, found: dict[str, int]) -> ServerClient:
    config = {
        "busy_agent": server("responses_api_agents", found["well"], model_server="good_model"),
        "hit_agent": server("responses_api_agents", found["well"], model_server="bad_model"),
        "good_model": server("responses_api_models", found["well"]),
        "bad_model": server("responses_api_models", found[state_of_model]),
    }
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(config)
    )


async def outcome(watch: ServerWatch, agent: str, takes_s: float = 60.0) -> str:
    async def work() -> str:
        await asyncio.sleep(takes_s)
        return "done"

    return await watch.guard(agent, work())


@pytest.mark.parametrize(("state", "words"), [("dead", "connections are refused"), ("silent", "says nothing")])
def test_whoever_waits_for_a_server_that_is_down_is_told_which_it_is(state: str, words: str) -> None:
    with ports() as found, pytest.raises(ServerDownError, match=rf"server 'bad_model' \(.*{words}.*max_silence_s=0.8"):
        asyncio.run(outcome(ServerWatch(client_for(state, found), SILENCE_S), "hit_agent"))


def test_servers_of_others_and_finished_work_and_patience_are_no_reason_to_stop() -> None:
    with ports() as found:
        client = client_for("dead", found)
        assert asyncio.run(outcome(ServerWatch(client, SILENCE_S), "busy_agent", takes_s=2.0)) == "done"
        assert asyncio.run(outcome(ServerWatch(client, 60.0), "hit_agent", takes_s=0.1)) == "done"
        assert asyncio.run(outcome(ServerWatch(client, None), "hit_agent", takes_s=0.1)) == "done"


def test_rollouts_that_succeed_and_agents_that_are_well_keep_the_run_going() -> None:
    async def scenario(watch: ServerWatch, agents: set[str]) -> bool:
        waiting = asyncio.ensure_future(watch.until_down(lambda: agents))
        for _ in range(20):
            await asyncio.sleep(0.1)
            if agents == {"hit_agent"}:
                watch.sign_of_life()
        is_down = waiting.done()
        waiting.cancel()
        return is_down

    with ports() as found:
        client = client_for("dead", found)
        assert not asyncio.run(scenario(ServerWatch(client, SILENCE_S), {"hit_agent"}))
        assert not asyncio.run(scenario(ServerWatch(client, SILENCE_S), {"hit_agent", "busy_agent"}))


def test_an_agent_needs_the_servers_it_names_and_those_that_they_name() -> None:
    config = OmegaConf.create(
        {
            "agent": server("responses_api_agents", 1, judge="judge", elsewhere="not_of_this_run"),
            "judge": server("responses_api_models", 2, behind="endpoint"),
            "endpoint": server("responses_api_models", 3, back="judge"),
            "other": server("responses_api_models", 4),
        }
    )

    assert servers_needed_by(config, "agent") == {"agent", "judge", "endpoint"}
    assert servers_needed_by(config, "nobody") == set()
