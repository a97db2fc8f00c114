"""The question that a stall asks, put to real servers; what becomes of it is tested with the dispatcher."""

import asyncio
import socket

import pytest
from aiohttp import web
from omegaconf import OmegaConf

from nemo_gym.collect.stopping import health_probe
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.session import use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig


def client_for(port: int) -> ServerClient:
    block = {"responses_api_agents": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"agent": block}),
    )


async def finding_about(status: int) -> str:
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        return await health_probe(client_for(listener.getsockname()[1]))("agent")
    finally:
        await runner.cleanup()


def test_an_agent_that_is_well_answers() -> None:
    assert asyncio.run(finding_about(200)) == "answers /health"


def test_an_agent_that_is_unwell_says_so() -> None:
    assert asyncio.run(finding_about(500)) == "answers /health with status 500"


def test_an_agent_that_is_not_there_raises() -> None:
    use_client_settings(GlobalAIOHTTPAsyncClientConfig(http_retry_max_tries=1))
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with pytest.raises(OSError, match="Cannot connect"):
            asyncio.run(health_probe(client_for(port))("agent"))  # type: ignore[arg-type]
    finally:
        use_client_settings(None)
