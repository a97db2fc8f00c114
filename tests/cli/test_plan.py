import logging
import re
import socket
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.instances import find_instances
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.keys import DEFAULT_HEAD_SERVER_PORT
from nemo_gym.launch.plan import PlannedServer, PlanSettings, plan_servers, root_of
from nemo_gym.launch.requirements import compat_packages, unmet_package
from nemo_gym.launch.run_helper import HeldPorts, hold_ports
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runtime import listen
from tests.ports import free_range


def instance(server_type: str, implementation: str, **block: Any) -> dict[str, Any]:
    domain = {"domain": "other"} if server_type == "resources_servers" else {}
    address = {"host": "127.0.0.1", "port": 1}
    return {server_type: {implementation: {"entrypoint": "app.py", **address, **domain, **block}}}


def plan(settings: PlanSettings | None = None, **instances: dict[str, Any]) -> list[PlannedServer]:
    found, almost = find_instances(OmegaConf.create(instances))
    assert not almost
    return plan_servers(found, settings or PlanSettings())


def plan_one(settings: PlanSettings | None = None, **block: Any) -> PlannedServer:
    return plan(settings, mine=instance("resources_servers", "mine", **block))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server somebody wrote, below the current folder."""
    folder = tmp_path / "resources_servers" / "mine"
    folder.mkdir(parents=True)
    (folder / "app.py").touch()
    (folder / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\nnumpy\n")
    return folder


def test_servers_of_this_distribution_are_hosted() -> None:
    planned = plan(
        agent=instance("responses_api_agents", "simple_agent"),
        tool=instance("resources_servers", "example_single_tool_call"),
    )
    assert [server.isolation for server in planned] == ["hosted", "hosted"]
    assert planned[0].folder == PARENT_DIR / "responses_api_agents" / "simple_agent"
    assert planned[0].alone == "process"


def test_a_users_folder_of_the_same_name_is_the_users_and_not_hosted(tmp_path: Path) -> None:
    shadow = tmp_path / "responses_api_agents" / "simple_agent"
    shadow.mkdir(parents=True)
    (shadow / "app.py").touch()
    (shadow / "requirements.txt").touch()
    planned = plan(agent=instance("responses_api_agents", "simple_agent"))[0]
    assert planned.folder == shadow
    assert planned.isolation == "process"


def test_a_server_from_elsewhere_gets_its_own_process_in_the_running_environment_if_that_will_do(folder: Path) -> None:
    assert plan_one().isolation == "process"
    (folder / "requirements.txt").write_text("surely-not-installed\n")
    assert plan_one().isolation == "venv"


@pytest.mark.parametrize(
    ("asked", "requirements", "expected"),
    [
        ("hosted", "", "hosted"),
        ("hosted", "surely-not-installed", "hosted"),
        ("process", "", "process"),
        ("process", "surely-not-installed", "venv"),
        ("venv", "", "venv"),
    ],
)
def test_isolation_in_the_block_decides(folder: Path, asked: str, requirements: str, expected: str) -> None:
    (folder / "requirements.txt").write_text(requirements)
    planned = plan_one(isolation=asked)
    assert planned.isolation == expected
    assert planned.alone == ("venv" if requirements or asked == "venv" else "process")


def test_process_can_be_forced_for_a_server_of_this_distribution() -> None:
    assert plan(agent=instance("responses_api_agents", "simple_agent", isolation="process"))[0].isolation == "process"


def test_several_workers_need_processes_of_their_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert plan(agent=instance("responses_api_agents", "simple_agent", num_workers=2))[0].isolation == "process"
    with caplog.at_level(logging.WARNING):
        assert plan_one(isolation="hosted", num_workers=2).isolation == "process"
    assert "num_workers is 2" in caplog.text


def test_an_unknown_isolation_is_refused_with_the_choices(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mine'.*isolation: alone.*hosted, process, venv"):
        plan_one(isolation="alone")


def test_another_python_needs_an_environment(folder: Path) -> None:
    assert plan_one(PlanSettings(python_version="3.99")).isolation == "venv"


def test_a_project_for_another_python_runs_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "requirements.txt").unlink()
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nrequires-python = ">=3.98"\n')

    assert plan_one().folder == folder
    assert re.search(r"'mine': \S+ requires Python >=3\.98 and runs with 3\.\S+; .*\+python_version=", caplog.text)

    caplog.clear()
    assert plan_one(PlanSettings(python_version="3.99")).isolation == "venv"
    assert caplog.text == ""


def test_our_own_server_runs_in_place_of_a_namesake_for_another_python(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "resources_servers" / "mcqa"
    theirs.mkdir(parents=True)
    (theirs / "app.py").touch()
    (theirs / "pyproject.toml").write_text('[project]\nname = "x"\nrequires-python = ">=3.98"\n')
    block = instance("resources_servers", "mcqa")

    assert plan(quiz=block)[0].folder == PARENT_DIR / "resources_servers" / "mcqa"
    assert f"so {PARENT_DIR / 'resources_servers' / 'mcqa'} runs instead; +python_version=" in caplog.text
    assert plan(PlanSettings(python_version="3.99"), quiz=block)[0].folder == theirs
    (theirs / "other.py").touch()
    other = instance("resources_servers", "mcqa", entrypoint="other.py")
    assert plan(quiz=other)[0].folder == theirs  # ours has no such entrypoint


def test_an_environment_that_is_there_is_used_as_it_is_when_asked_for(folder: Path, tmp_path: Path) -> None:
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    skip = PlanSettings(skip_venv_if_present=True, uv_venv_dir=str(PARENT_DIR))
    assert plan_one(skip).present_python is None
    (python.parent / "activate").touch()
    assert plan_one(skip).present_python == python
    assert plan_one(skip).isolation == "venv"
    assert plan_one().present_python is None

    elsewhere = tmp_path / "venvs" / "resources_servers" / "mine" / ".venv" / "bin"
    elsewhere.mkdir(parents=True)
    (elsewhere / "python").touch()
    (elsewhere / "activate").touch()
    moved = PlanSettings(skip_venv_if_present=True, uv_venv_dir=str(tmp_path / "venvs"))
    assert plan_one(moved).present_python == elsewhere / "python"


def test_the_entrypoint_must_be_a_relative_path_of_an_existing_file(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"'mine'.*must be relative to the server's folder"):
        plan_one(entrypoint=str(folder / "app.py"))
    with pytest.raises(RuntimeError, match=r"`entrypoint: ap\.py` does not exist in .*did you mean 'app\.py'"):
        plan_one(entrypoint="ap.py")
    with pytest.raises(RuntimeError, match=r"`entrypoint: start_here\.py` does not exist in .*did you mean 'app\.py'"):
        plan_one(entrypoint="start_here.py")
    (folder / "app.py").rename(folder / "tools.py")
    with pytest.raises(RuntimeError, match=r"does not exist in .*; its Python files are tools\.py$"):
        plan_one(entrypoint="app.py")


def test_a_folder_that_is_nowhere_is_reported_with_every_place_and_a_suggestion(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(mine=instance("resources_servers", "mime"))
    message = str(caught.value)
    assert "did you mean 'mine'?" in message
    assert str(folder.with_name("mime")) in message
    assert str(PARENT_DIR / "resources_servers" / "mime") in message


def test_everything_that_is_wrong_is_reported_at_once(folder: Path) -> None:
    (folder / "requirements.txt").unlink()
    with pytest.raises(ConfigError) as caught:
        plan(
            first=instance("resources_servers", "mine"),
            second=instance("responses_api_agents", "nowhere"),
            third=instance("responses_api_agents", "simple_agent"),
        )
    message = str(caught.value)
    assert "2 servers cannot be started" in message
    assert "'first': Missing pyproject.toml or requirements.txt" in message
    assert "'second'" in message


def test_extra_roots_come_first(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = tmp_path / "extra" / "resources_servers" / "mine"
    extra.mkdir(parents=True)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "extra"))
    assert plan_one().folder == folder
    (extra / "requirements.txt").touch()
    (extra / "app.py").touch()
    assert plan_one().folder == extra


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "..", "mine/../../elsewhere"])
def test_a_server_is_named_not_located(tmp_path: Path, folder: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="must be a path below its folder"):
        plan(mine=instance("resources_servers", name))


def test_an_entrypoint_stays_below_the_folders_servers_are_looked_for_in(tmp_path: Path, folder: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-evil.py"
    outside.touch()
    (folder / "link.py").symlink_to(outside)
    up = "../" * (len(folder.relative_to(tmp_path).parts) + 1)
    for entrypoint in (f"{up}{outside.name}", "link.py", "../" * 40 + "etc/passwd", "app.py\0"):
        with pytest.raises(ConfigError, match="not below any of the folders servers are looked for in"):
            plan_one(entrypoint=entrypoint)


def test_folders_may_be_nested_and_an_entrypoint_may_be_that_of_a_neighbour(tmp_path: Path, folder: Path) -> None:
    nested = folder.parent / "conversations" / "simulation"
    nested.mkdir(parents=True)
    (nested / "requirements.txt").touch()
    (nested / "app.py").touch()

    (planned,) = plan(sim=instance("resources_servers", "conversations/simulation"))
    (borrowed,) = plan(sim=instance("resources_servers", "conversations/simulation", entrypoint="../../mine/app.py"))

    assert (planned.folder, borrowed.folder) == (nested, nested)
    assert root_of(nested, "resources_servers") == tmp_path
    assert borrowed.entrypoint == "../../mine/app.py"


def test_only_servers_from_elsewhere_get_the_packages_they_do_not_list(folder: Path) -> None:
    (folder / "requirements.txt").write_text("surely-not-installed\n")
    missing = [name for name in compat_packages() if unmet_package(name)]
    without = plan_one(PlanSettings(compat_packages=False))

    assert missing
    assert list(plan_one().requirements.expected) == missing
    assert (without.requirements.expected, without.expects_compat) == ((), False)
    assert plan(ours=instance("resources_servers", "mcqa"))[0].expects_compat is False


def test_the_port_of_a_head_server_is_taken_from_the_moment_it_is_chosen() -> None:
    """Two runs that start at the same moment: neither listens yet when the other looks."""
    configs = [
        OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": DEFAULT_HEAD_SERVER_PORT}}) for _ in range(2)
    ]
    with hold_ports(configs[0], [], may_move_head=True).head as first:
        with hold_ports(configs[1], [], may_move_head=True).head as second:
            ports = [held.getsockname()[1] for held in (first, second)]
            assert [config.head_server.port for config in configs] == ports
            assert len(set(ports)) == 2
        with pytest.raises(ConfigError, match=f"port {ports[0]} for the head server is already in use by process"):
            hold_ports(configs[0], [])


def test_the_port_of_a_server_is_held_from_the_moment_it_is_planned() -> None:
    """Two runs that start at the same moment, both of which have come upon the same port for a server."""
    low = free_range(4)
    with socket.create_server(("127.0.0.1", low)):
        first = run_of_one_server(low)
        configs = [first, deepcopy(first)]
        held = [hold_ports(config, planned) for config, planned in configs]
        ports = [each.planned[0].port for each in held]
        blocks = [config.one.resources_servers.mcqa for config, _ in configs]
        assert len({low, *ports}) == 3
        assert [block.port for block in blocks] == ports
        for port in ports:
            listen("127.0.0.1", port, "the server", "").close()  # it is held for that
            with pytest.raises(ConfigError, match=f"port {port} for another is already in use"):
                listen("127.0.0.1", port, "another", "", exclusive=True)
        close_all(held)

        config, planned = run_of_one_server(low, port=low)
        with pytest.raises(ConfigError, match=f"port {low} for server 'one' is already in use by process"):
            hold_ports(config, planned)


def run_of_one_server(low: int, **block: Any) -> tuple[DictConfig, list[PlannedServer]]:
    inner = {"entrypoint": "app.py", "domain": "other", **block}
    ports = {"head_server": {"port": 0}, "port_range_low": low, "port_range_high": low + 3}
    given = {"one": {"resources_servers": {"mcqa": inner}}, **ports}
    config = GlobalConfigDictParser().parse_no_environment(OmegaConf.create(given))
    config.head_server.port = 0
    return config, plan_servers(find_instances(config)[0], PlanSettings())


def close_all(held: list[HeldPorts]) -> None:
    for each in held:
        for kept in (each.head, *each.of_servers):
            kept.close()
