"""What small names of the original do here: adapters, parser steps, worker flags, printing."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

import nemo_gym
from nemo_gym import server_utils
from nemo_gym.config_types import (
    BaseServerInstanceConfig,
    BaseServerTypeConfig,
    ModelServerRef,
    ResourcesServerInstanceConfig,
    ServerInstanceConfigTypeAdapter,
    ServerRefTypeAdapter,
    UploadJsonlDatasetHuggingFaceConfig,
)
from nemo_gym.decorators import experimental
from nemo_gym.errors import ConfigError, ServerRefNotFoundError
from nemo_gym.global_config import GlobalConfigDictParser, format_almost_server_warning
from nemo_gym.prompt import load_prompt_config
from nemo_gym.secret_utils import recursively_hide_secrets

SUMS: dict[str, Any] = {"resources_servers": {"sums": {"entrypoint": "app.py", "domain": "math"}}}
AGENT: dict[str, Any] = {
    "responses_api_agents": {
        "simple_agent": {"entrypoint": "app.py", "resources_server": {"type": "resources_servers", "name": "sums"}}
    }
}


def instances(config: DictConfig) -> list[Any]:
    return GlobalConfigDictParser().filter_for_server_instance_configs(config)


def test_adapters_read_references_and_instances() -> None:
    assert ServerRefTypeAdapter.validate_python({"type": "responses_api_models", "name": "m"}) == ModelServerRef(
        type="responses_api_models", name="m"
    )
    with pytest.raises(ValidationError):
        ServerRefTypeAdapter.validate_python({"type": "no_such_type", "name": "m"})
    read = ServerInstanceConfigTypeAdapter.validate_python({**SUMS, "name": "s", "server_type_config_dict": SUMS})
    assert isinstance(read, ResourcesServerInstanceConfig)
    assert isinstance(read, BaseServerInstanceConfig)
    assert isinstance(read, BaseServerTypeConfig)
    assert read.validate_domain_for_resources_server() is read
    assert read.get_server_ref().name == "s"


def test_an_upload_that_keeps_the_source_refuses_to_delete_it() -> None:
    assert UploadJsonlDatasetHuggingFaceConfig.forbidden_fields == {"delete_from_gitlab"}
    for given in ({"delete_from_gitlab": True}, OmegaConf.create({"delete_from_gitlab": False})):
        with pytest.raises(ValidationError, match="Forbidden fields present: delete_from_gitlab"):
            UploadJsonlDatasetHuggingFaceConfig.model_validate(given)


def test_the_command_line_is_read_without_help_ending_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "++abc=2", "+a.b=[x,y]", "--help", "-h"])

    assert GlobalConfigDictParser().parse_global_config_dict_from_cli() == {"abc": 2, "a": {"b": ["x", "y"]}}


def test_config_files_are_loaded_with_all_they_include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parent.yaml").write_text("config_paths: [child.yaml]\nk: parent\n")
    Path("child.yaml").write_text("k: child\nonly: here\n")

    paths, configs = GlobalConfigDictParser().load_extra_config_paths(["parent.yaml"])

    assert paths == ["parent.yaml", "child.yaml"]
    assert all(isinstance(config, DictConfig) for config in configs)
    assert OmegaConf.merge(*configs).k == "parent"
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        GlobalConfigDictParser().load_extra_config_paths(["none.yaml"])


def test_servers_get_the_host_and_port_they_lack() -> None:
    config = OmegaConf.create({"sums": SUMS, "agent": AGENT})
    config.sums.resources_servers.sums.port = 7000

    ports = GlobalConfigDictParser().validate_and_populate_defaults(instances(config), "h", 20_001, 29_999, [11_000])

    assigned = config.agent.responses_api_agents.simple_agent
    assert ports == [11_000, 7000, assigned.port]
    assert (config.sums.resources_servers.sums.host, assigned.host) == ("h", "h")
    assert 20_001 <= assigned.port <= 29_999
    alone = instances(OmegaConf.create({"agent": AGENT}))
    with pytest.raises(ServerRefNotFoundError, match="Could not find 'sums'"):
        GlobalConfigDictParser().validate_and_populate_defaults(alone, "h", 20_001, 29_999)


def test_agents_are_told_about_verification_and_no_port_is_looked_for_when_that_is_not_wanted() -> None:
    config = OmegaConf.create({"sums": SUMS, "agent": AGENT})
    config.sums.resources_servers.sums.port = 7000

    ports = GlobalConfigDictParser().validate_and_populate_defaults(
        instances(config), "h", 1, 2, skip_verification=True, skip_verification_reward=0.5, probe_ports=False
    )

    told = config.agent.responses_api_agents.simple_agent
    assert (told.skip_verification, told.skip_verification_reward, told.get("port")) == (True, 0.5, None)
    assert ports == [7000]
    assert "skip_verification" not in config.sums.resources_servers.sums


def test_almost_servers_are_told_with_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"bad": {"resources_servers": {"sums": {"entrypoint": "app.py"}}}, "sums": SUMS})

    with caplog.at_level(logging.WARNING):
        [(name, error)] = GlobalConfigDictParser().detect_and_report_almost_servers(config)

    warning = format_almost_server_warning(name, error)
    assert warning in caplog.text
    assert all(text in warning for text in ("Almost-Server Detected: 'bad'", "NOT be started", "A domain is required"))


def test_workers_know_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORKER_KEY_NAME", "ENTRYPOINT_KEY_NAME"):
        monkeypatch.delenv(getattr(server_utils, f"IS_NEMO_GYM_FASTAPI_{name}"), raising=False)
    monkeypatch.delenv(server_utils.NEMO_GYM_FASTAPI_NUM_WORKERS, raising=False)
    assert not server_utils.is_nemo_gym_fastapi_worker()
    assert server_utils.get_nemo_gym_fastapi_num_workers() == 1

    for name in ("WORKER_KEY_NAME", "ENTRYPOINT_KEY_NAME"):  # so that they are put back
        monkeypatch.setenv(getattr(server_utils, f"IS_NEMO_GYM_FASTAPI_{name}"), "")
    monkeypatch.setenv(server_utils.NEMO_GYM_FASTAPI_NUM_WORKERS, "1")
    server_utils.set_is_nemo_gym_fastapi_worker()
    server_utils.set_is_nemo_gym_fastapi_entrypoint("resources_servers/mine/app.py")
    server_utils.set_nemo_gym_fastapi_num_workers(4)

    assert server_utils.is_nemo_gym_fastapi_worker()
    assert server_utils.is_nemo_gym_fastapi_entrypoint("/x/resources_servers/mine/app.py")
    assert not server_utils.is_nemo_gym_fastapi_entrypoint("/x/resources_servers/other/app.py")
    assert server_utils.get_nemo_gym_fastapi_num_workers() == 4


def test_a_call_that_reaches_nobody_is_a_connection_error() -> None:
    assert issubclass(server_utils.ServerUnreachableError, server_utils.ConnectionError)
    assert server_utils.ConnectionError is ConnectionError
    assert server_utils.DEFAULT_HEAD_SERVER_PORT == 11_000


def test_ray_is_left_only_where_it_was_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        calls: list[str] = []  # noqa: RUF012

        @classmethod
        def is_initialized(cls) -> bool:
            return not cls.calls

        @classmethod
        def shutdown(cls) -> None:
            cls.calls.append("shutdown")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    server_utils.maybe_ray_cluster_exit()
    monkeypatch.setitem(sys.modules, "ray", Ray)
    server_utils.maybe_ray_cluster_exit()
    server_utils.maybe_ray_cluster_exit()
    assert Ray.calls == ["shutdown"]


def test_printing_flushes_and_leaves_pythons_own_alone() -> None:
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    stream = Stream()
    nemo_gym.print_always_flushes("a", "b", sep="-", file=stream)
    assert (stream.getvalue(), stream.flushed) == ("a-b\n", 1)
    assert nemo_gym.OLD_PRINT is print


def test_search_roots_may_take_in_a_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nemo_gym.NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, str(tmp_path / "extra"))
    monkeypatch.chdir(tmp_path)

    roots = nemo_gym.component_search_roots(sys_path=[tmp_path / "on_path", tmp_path])

    assert roots == [tmp_path / "extra", tmp_path / "on_path", tmp_path, nemo_gym.PARENT_DIR]


def test_prompts_are_forgotten_when_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "prompt.yaml"
    path.write_text("user: '{question}'\n")
    first = load_prompt_config(path)
    assert load_prompt_config(path) is first

    load_prompt_config.cache_clear()  # type: ignore[attr-defined]

    assert load_prompt_config(path) is not first


def test_what_is_experimental_says_so_at_every_call(caplog: pytest.LogCaptureFixture) -> None:
    @experimental
    def double(number: int) -> int:
        return 2 * number

    assert (double(2), double(number=3)) == (4, 6)
    assert [record.getMessage().count("double is experimental") for record in caplog.records] == [1, 1]


def test_secrets_of_a_config_are_hidden_in_place() -> None:
    config = OmegaConf.create({"policy_api_key": "s3cret", "list": [{"hf_token": "t"}], "name": "x"})

    recursively_hide_secrets(config)

    assert config == {"policy_api_key": "****", "list": [{"hf_token": "****"}], "name": "x"}
