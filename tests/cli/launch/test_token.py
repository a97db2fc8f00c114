"""Who starts servers that others can reach is told so, and gets a token by asking for one."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.cli import RunHelper
from nemo_gym.server_status import StatusCommand

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]


def test_servers_that_others_can_reach_start_with_one_warning(
    write_server: WriteServer, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    write_server("one")
    write_server("two")
    start_run("one", "two", default_host="0.0.0.0")

    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "0.0.0.0" in warning
    assert "+auth_token=auto" in warning


def test_auto_makes_a_token_shows_it_once_and_the_servers_ask_for_it(
    write_server: WriteServer,
    start_run: StartRun,
    apps: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_server("one", apps["gym"])
    helper = start_run("one", auth_token="auto", default_host="0.0.0.0")

    client = helper._server_client
    token = client.auth_token
    assert token not in (None, "auto")
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count(str(token)) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    [server] = StatusCommand(client.head_server_config).discover_servers()
    assert server.status == "success"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/openapi.json", timeout=10)
