"""Hosts and ports: what was given stays, the rest is filled in."""

import socket
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config import hosts
from nemo_gym.config.hosts import address_problems, assign_addresses, default_host, find_open_port
from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError, NoOpenPortError


def server(**settings: Any) -> dict[str, Any]:
    return {"responses_api_models": {"m": {"entrypoint": "app.py", **settings}}}


def assigned(tree: dict[str, Any], *, offline: bool = False) -> DictConfig:
    config = OmegaConf.create(tree)
    numbers = iter(range(20_001, 30_000))
    assign_addresses(
        config,
        find_instances(config)[0],
        lambda avoided, low, high: next(n for n in numbers if n not in avoided),
        offline=offline,
    )
    return config


def complaints(tree: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in address_problems(tree, find_instances(OmegaConf.create(tree))[0])]


def test_servers_get_the_default_host_and_a_port_of_their_own_in_config_order() -> None:
    config = assigned({"a": server(), "b": server(host="0.0.0.0", port=9000), "c": server(port=0), "d": server()})

    blocks = [config[name].responses_api_models.m for name in "abcd"]
    assert [(block.host, block.port) for block in blocks] == [
        ("127.0.0.1", 20_001),
        ("0.0.0.0", 9000),
        ("127.0.0.1", 20_002),
        ("127.0.0.1", 20_003),
    ]
    assert config.disallowed_ports == [11_000, 20_001, 9000, 20_002, 20_003]
    assert config.head_server == {"host": "127.0.0.1", "port": 11_000}
    assert (config.port_range_low, config.port_range_high) == (10_001, 20_000)


def test_a_port_given_further_down_is_not_given_away_before() -> None:
    config = assigned({"a": server(), "b": server(port=20_001), "c": server(port="${p}"), "p": "20002"})

    assert config.a.responses_api_models.m.port == 20_003
    assert config.disallowed_ports == [11_000, 20_003, 20_001, 20_002]


def test_ports_the_user_disallows_are_avoided_and_stay_listed() -> None:
    config = assigned({"a": server(), "disallowed_ports": [20_001, "20002"]})

    assert config.a.responses_api_models.m.port == 20_003
    assert config.disallowed_ports == [11_000, 20_003, 20_001, 20_002]


@pytest.mark.parametrize(
    ("given", "complete"),
    [
        ({"port": 12_000}, {"host": "127.0.0.1", "port": 12_000}),
        ({"host": "0.0.0.0"}, {"host": "0.0.0.0", "port": 11_000}),
        ({"host": None, "port": None}, {"host": "127.0.0.1", "port": 11_000}),
        ({"port": "12000"}, {"host": "127.0.0.1", "port": 12_000}),
        ({"port": 0}, {"host": "127.0.0.1", "port": 20_001}),
        ({"num_workers": 2}, {"host": "127.0.0.1", "num_workers": 2, "port": 11_000}),
        (None, {"host": "127.0.0.1", "port": 11_000}),
    ],
)
def test_missing_parts_of_the_head_server_are_filled_in(given: Any, complete: dict[str, Any]) -> None:
    config = assigned({"head_server": given})

    assert config.head_server == complete
    assert config.disallowed_ports == [complete["port"]]


def test_the_default_host_can_be_chosen() -> None:
    config = assigned({"a": server(), "default_host": "10.0.0.1"})

    assert config.a.responses_api_models.m.host == config.head_server.host == "10.0.0.1"


def test_the_absolute_address_of_the_machine_is_used_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "gethostname", lambda: "me")
    monkeypatch.setattr(hosts, "gethostbyname", {"me": "192.0.2.7"}.__getitem__)

    assert default_host({"use_absolute_ip": True, "default_host": "h"}, offline=False) == "192.0.2.7"
    assert default_host({"use_absolute_ip": True, "default_host": "h"}, offline=True) == "h"


def test_a_machine_without_address_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "gethostname", lambda: "no-such-host.invalid")

    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid' has no address.*\+default_host="):
        default_host({"use_absolute_ip": True}, offline=False)


def test_an_offline_parse_chooses_no_port_and_a_later_one_does() -> None:
    offline = assigned({"a": server(), "b": server(port=9000), "head_server": {"port": 0}}, offline=True)

    assert offline.a.responses_api_models.m.port == offline.head_server.port == -1
    assert offline.disallowed_ports == [9000]
    online = assigned(OmegaConf.to_container(offline))  # type: ignore[arg-type]
    assert online.a.responses_api_models.m.port == 20_001
    assert online.head_server.port == 20_002


def test_one_port_for_two_servers_is_an_error_that_names_both() -> None:
    tree = {"a": server(port=9000), "b": server(port=9000, host="localhost"), "c": server(port=11_000)}

    assert complaints(tree) == [
        "port 9000 is given to 'a' and to 'b'; change one of them, or leave `port` out to have a free one chosen",
        "port 11000 is given to the head server and to 'c'; change one of them, or leave `port` out to have a free one "
        "chosen",
    ]


def test_one_port_on_different_hosts_is_fine() -> None:
    assert complaints({"a": server(host="pod-a", port=8000), "b": server(host="pod-b", port=8000)}) == []


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"head_server": "abc"}, "head_server is 'abc'; it takes `host` and `port`"),
        ({"head_server": {"port": "abc"}}, "head_server.port is 'abc'; a port is a number between 0 and 65535"),
        ({"head_server": {"port": True}}, "head_server.port is True; a port"),
        ({"head_server": {"port": 70_000}}, "head_server.port is 70000; a port"),
        ({"port_range_low": "x"}, "port_range_low is 'x'; a port"),
        ({"port_range_low": 9, "port_range_high": 5}, "port_range_low is 9 and port_range_high is 5"),
    ],
)
def test_addresses_that_are_none_are_refused(tree: dict[str, Any], complaint: str) -> None:
    assert [text[: len(complaint)] for text in complaints(tree)] == [complaint]


def test_disallowed_ports_must_be_ports() -> None:
    with pytest.raises(ConfigError, match="disallowed_ports is 'x'"):
        assigned({"disallowed_ports": "x"})


def listening() -> socket.socket:
    busy = socket.socket()
    busy.bind(("", 0))
    busy.listen()
    return busy


def test_a_free_port_is_one_nothing_listens_on() -> None:
    with listening() as busy:
        taken = busy.getsockname()[1]
        low, high = taken - 8, taken  # some of the neighbours may be in use, too
        found = {find_open_port([], low, high) for _ in range(20)}

    assert taken not in found
    assert all(low <= port <= high for port in found)


def test_the_only_port_that_is_not_disallowed_is_found() -> None:
    with listening() as other:
        free = other.getsockname()[1]

    assert find_open_port([free - 1, free - 2, free + 1, 99], free - 2, free + 1, max_retries=1) == free


@pytest.mark.parametrize("disallowed", [[], [1]], ids=["listened on", "disallowed"])
def test_no_free_port_is_an_error_with_a_remedy(disallowed: list[int]) -> None:
    with listening() as busy:
        port = busy.getsockname()[1]
        with pytest.raises(NoOpenPortError, match="Unable to find an open port") as failure:
            find_open_port([port] * len(disallowed), port, port, max_retries=3)

    assert "after 3 attempts" in str(failure.value)
    assert "+port_range_low=" in str(failure.value)
    assert isinstance(failure.value, RuntimeError)
