"""Who starts servers that others can reach is told so, and gets a token by asking for one."""

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.cli import RunHelper
from nemo_gym.server_status import StatusCommand
from tests.programs import Piped

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]
RunCommand = Callable[..., Piped]


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
    write_server: WriteServer, ng_run: RunCommand, apps: dict[str, str], free_port: int
) -> None:
    write_server("one", apps["gym"])
    process = ng_run("one", auth_token="auto", default_host="0.0.0.0", head_server={"port": free_port})
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "env.yaml" in line:
            break

    found = re.findall(r"shown this once: (\S{40,})\n", printed)
    [token] = found
    head = f"http://127.0.0.1:{free_port}/server_instances"
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(head, timeout=10)
    refused.value.close()
    request = urllib.request.Request(head, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        [server] = json.loads(answer.read())
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{server['port']}/openapi.json", timeout=10)
    refused.value.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (printed + out + err).count(token) == 1
    assert "whoever can reach this machine" not in err


def test_a_program_gets_the_token_and_nothing_is_printed(
    write_server: WriteServer, start_run: StartRun, capfd: pytest.CaptureFixture[str]
) -> None:
    write_server("one")
    helper = start_run("one", auth_token="auto")

    assert helper.made_token == helper._server_client.auth_token
    printed = capfd.readouterr()
    assert str(helper.made_token) not in printed.out + printed.err
    assert [server.status for server in StatusCommand(helper._server_client.head_server_config).discover_servers()] == [
        "success"
    ]
