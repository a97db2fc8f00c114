"""How a configuration comes about, and how the rest of a process gets at it."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym import global_config
from nemo_gym.config.overrides import CommandLine, parse_overrides
from nemo_gym.errors import (
    AlmostServerError,
    ConfigError,
    ConfigInterpolationError,
    ConfigMissingValuesError,
    ConfigPathNotFoundError,
    DuplicateInstanceError,
    NoServerInstancesError,
    ServerRefNotFoundError,
    UnknownOptionError,
)
from nemo_gym.global_config import (
    GlobalConfigDictParser,
    GlobalConfigDictParserConfig,
    find_config_problems,
    find_open_port,
    get_first_server_config_dict,
    get_global_config_dict,
    get_hf_token,
    get_wandb_run,
    maybe_get_global_config_dict,
    set_global_config_dict,
)

SERVERS = """
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${policy_base_url}
math_env:
  resources_servers:
    math:
      entrypoint: app.py
      domain: math
math_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: policy_model}
      resources_server: {type: resources_servers, name: math_env}
"""


@pytest.fixture(autouse=True)
def _empty_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.setattr(sys, "argv", ["prog", "+from_argv=1", "--hostile", "+config_paths=[argv.yaml]", "---"])
    for name in ("NEMO_GYM_EXTRA_ROOTS", "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_FILE", "NEMO_GYM_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logging.getLogger("nemo_gym"), "propagate", True)


def settings(*arguments: str, initial: dict[str, Any] | None = None, **more: Any) -> GlobalConfigDictParserConfig:
    more.setdefault("skip_load_from_dotenv", not Path("env.yaml").exists())
    return GlobalConfigDictParserConfig(
        command_line=CommandLine(parse_overrides(arguments), frozenset({"num_repeats"})),
        initial_global_config_dict=OmegaConf.create(initial) if initial is not None else None,
        **more,
    )


def parse(*arguments: str, **more: Any) -> DictConfig:
    return GlobalConfigDictParser().parse(settings(*arguments, **more))


def problems(*arguments: str, **more: Any) -> list[ConfigError]:
    return find_config_problems(settings(*arguments, **more))


def test_an_empty_config_is_complete() -> None:
    config = GlobalConfigDictParser().parse_no_environment()

    assert set(config) == {
        "use_absolute_ip",
        "head_server",
        "disallowed_ports",
        "port_range_low",
        "port_range_high",
        "head_server_deps",
        "python_version",
        "skip_venv_if_present",
        "dry_run",
        "uv_cache_dir",
        "uv_venv_dir",
        "allow_openai_version_skew",
        "model_endpoint_readiness_timeout_seconds",
        "results_dir",
        "cache_dir",
    }
    assert config.head_server == {"host": "127.0.0.1", "port": 11_000}
    assert config.disallowed_ports == [11_000]


def test_files_env_file_and_command_line_make_one_config() -> None:
    Path("servers.yaml").write_text(SERVERS)
    Path("env.yaml").write_text("config_paths: [servers.yaml]\npolicy_base_url: http://env\n")

    config = parse("+policy_base_url=http://cli", "math_agent.responses_api_agents.simple_agent.max_steps=3")

    model = config.policy_model.responses_api_models.vllm_model
    agent = config.math_agent.responses_api_agents.simple_agent
    assert model.base_url == "http://cli"
    assert agent.max_steps == 3
    assert config.config_paths == ["servers.yaml"]
    ports = [model.port, config.math_env.resources_servers.math.port, agent.port]
    assert len(set(ports)) == 3
    assert config.disallowed_ports == [11_000, *ports]
    assert "${policy_base_url}" in OmegaConf.to_yaml(config)


def test_the_result_can_be_extended() -> None:
    config = parse("+policy_model_name=m")

    config.anything = {"new": 1}

    assert config.anything.new == 1


def test_every_problem_is_found_at_once() -> None:
    Path("servers.yaml").write_text(
        SERVERS
        + textwrap.dedent(
            """
            judge_model: {responses_api_models: {m: {entrypoint: app.py, url: '???'}}}
            other_env: {resources_servers: {e: {entrypoint: app.py, domain: maths}}}
            other_agent:
              responses_api_agents:
                a:
                  entrypoint: app.py
                  judge: {type: responses_api_models, name: judge_model}
                  env: {type: resources_servers, name: other_env}
                  lost: [{type: resources_servers, name: math_enf}]
            """
        )
    )

    found = problems("+config_paths=[servers.yaml]", "+num_repeat=4", "+head_server.port=x")

    assert [type(problem) for problem in found] == [
        UnknownOptionError,
        ConfigMissingValuesError,
        ConfigInterpolationError,
        AlmostServerError,
        ServerRefNotFoundError,
        ConfigError,
    ]
    messages = "\n".join(map(str, found))
    assert "did you mean 'num_repeats'" in messages
    assert "judge_model.responses_api_models.m.url" in messages
    assert "'policy_base_url' is not set" in messages
    assert "'other_env'" in messages
    assert "Did you mean 'math_env'?" in messages
    assert "head_server.port is 'x'" in messages


def test_parsing_raises_all_problems_as_one_error_of_the_first_kind() -> None:
    Path("servers.yaml").write_text("a: ???\nb: ${c}\n")

    with pytest.raises(ConfigMissingValuesError, match=r"2 problems in the configuration:\n1\. .*unset") as failure:
        parse("+config_paths=[servers.yaml]")

    assert "\n2. 'c' is not set" in str(failure.value)


def test_a_single_problem_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigPathNotFoundError, match=r"^config_paths entry 'gone\.yaml'"):
        parse("+config_paths=[gone.yaml]")


@pytest.mark.parametrize(
    ("arguments", "initial"),
    [
        (["+config_paths=5"], None),
        (["~gone"], None),
        ([], {"a": {"_copy": "gone"}}),
        (["+policy_model_name='${b'"], None),
        ([], {"results_dir": ""}),
        ([], {"use_absolute_ip": "perhaps"}),
        ([], {"disallowed_ports": "x"}),
    ],
)
def test_whatever_is_wrong_is_one_error_of_ours(arguments: list[str], initial: dict[str, Any] | None) -> None:
    assert len(problems(*arguments, initial=initial)) == 1
    with pytest.raises(ConfigError):
        parse(*arguments, initial=initial)


def test_a_value_missing_from_a_branch_that_is_deleted_or_replaced_is_not_missed() -> None:
    config = parse(
        initial={
            "base": {"x": "???", "y": "???", "z": 1},
            "leaf": {"_inherit_from": "base", "_delete_key": "y", "x": 5},
        }
    )

    assert config.leaf == {"z": 1, "x": 5}


def test_two_files_that_disagree_are_both_named_and_nothing_else_is_said() -> None:
    Path("a.yaml").write_text("m: {responses_api_models: {vllm: {entrypoint: app.py}}}\n")
    Path("b.yaml").write_text("m: {responses_api_models: {openai: {entrypoint: app.py}}}\n")

    (problem,) = problems("+config_paths=[a.yaml,b.yaml]")

    assert isinstance(problem, DuplicateInstanceError)
    assert f"{Path.cwd() / 'a.yaml'} and responses_api_models/openai in {Path.cwd() / 'b.yaml'}" in str(problem)


def test_the_command_line_can_settle_a_disagreement_between_files() -> None:
    Path("a.yaml").write_text("m: {responses_api_models: {vllm: {entrypoint: app.py}}}\n")
    Path("b.yaml").write_text("m: {responses_api_models: {openai: {entrypoint: app.py}}}\n")

    config = parse("+config_paths=[a.yaml,b.yaml]", "~m.responses_api_models.vllm")

    assert list(config.m.responses_api_models) == ["openai"]


def test_a_reference_may_itself_be_an_interpolation() -> None:
    Path("servers.yaml").write_text(
        SERVERS + "the_model: {type: responses_api_models, name: '${name}'}\n"
        "other: {responses_api_agents: {a: {entrypoint: app.py, models: ['${the_model}']}}}\n"
    )
    arguments = ["+config_paths=[servers.yaml]", "+policy_base_url=u"]

    assert problems(*arguments, "+name=policy_model") == []
    (problem,) = problems(*arguments, "+name=policy_modle")
    assert "'other' refers to in `models[0]`" in str(problem)


def test_servers_without_a_name_of_their_own_cannot_share_an_address() -> None:
    Path("servers.yaml").write_text(SERVERS + "second_env: ${math_env}\n")

    config = parse("+config_paths=[servers.yaml]", "+policy_base_url=u")

    assert config.second_env.resources_servers.math.port != config.math_env.resources_servers.math.port


def test_instance_names_that_yaml_reads_as_numbers_are_names() -> None:
    Path("servers.yaml").write_text("7: {responses_api_models: {m: {entrypoint: app.py}}}\n")

    config = parse("+config_paths=[servers.yaml]")

    assert get_first_server_config_dict(config, "7").entrypoint == "app.py"


def test_commands_without_a_model_can_start_from_a_stand_in() -> None:
    Path("servers.yaml").write_text(SERVERS)
    stand_in = OmegaConf.to_container(GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT)
    arguments: dict[str, Any] = {"initial": stand_in}

    alone = parse(**arguments)
    with_model = parse("+config_paths=[servers.yaml]", **arguments)

    assert list(alone.policy_model.responses_api_models) == ["dummy_model"]
    assert list(with_model.policy_model.responses_api_models) == ["vllm_model"]
    assert with_model.policy_base_url == ""


def test_an_offline_parse_touches_neither_ports_nor_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("looked for a port")

    monkeypatch.setattr(global_config, "_find_open_port_using_range", never)
    Path("servers.yaml").write_text(SERVERS)

    config = parse("+config_paths=[servers.yaml]", "+policy_base_url=u", "+use_absolute_ip=true", offline=True)

    assert config.math_env.resources_servers.math == {
        "entrypoint": "app.py",
        "domain": "math",
        "host": "127.0.0.1",
        "port": -1,
    }
    assert config.disallowed_ports == [11_000]


def test_the_port_finder_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_config, "_find_open_port_using_range", lambda *_, **__: 12_345)
    Path("servers.yaml").write_text(SERVERS)

    config = parse("+config_paths=[servers.yaml]", "+policy_base_url=u")

    assert config.disallowed_ports == [11_000, 12_345, 12_345, 12_345]


def test_skipping_verification_is_handed_down_to_agents_that_do_not_decide_themselves() -> None:
    Path("servers.yaml").write_text(
        SERVERS + "strict: {responses_api_agents: {a: {entrypoint: app.py, skip_verification: false}}}\n"
    )

    config = parse(
        "+config_paths=[servers.yaml]",
        "+policy_base_url=u",
        "+skip_verification=true",
        "+skip_verification_reward=0.5",
    )

    agent = config.math_agent.responses_api_agents.simple_agent
    assert (agent.skip_verification, agent.skip_verification_reward) == (True, 0.5)
    assert config.strict.responses_api_agents.a.skip_verification is False
    assert "skip_verification" not in config.math_env.resources_servers.math


def test_secrets_can_be_hidden_in_the_result() -> None:
    assert parse("+policy_api_key=k", hide_secrets=True).policy_api_key == "****"
    assert parse("+policy_api_key=k").policy_api_key == "k"


def test_the_masking_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        GlobalConfigDictParser, "_recursively_hide_secrets", lambda self, config: config.update(hidden=True)
    )

    assert parse(hide_secrets=True).hidden


def test_the_instances_of_a_config_can_be_listed() -> None:
    Path("servers.yaml").write_text(SERVERS)
    config = parse("+config_paths=[servers.yaml]", "+policy_base_url=u")

    instances = GlobalConfigDictParser().filter_for_server_instance_configs(config)

    assert [instance.name for instance in instances] == ["policy_model", "math_env", "math_agent"]


def test_a_config_already_known_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = ["any value at all", {}, OmegaConf.create({"a": 1})]
    for known in values:
        monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", known)

        assert get_global_config_dict() is known
        assert maybe_get_global_config_dict() is known


def test_a_config_handed_over_is_neither_checked_nor_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"a": "${gone}", "b": "???", "env": {"resources_servers": {}}}')

    config = get_global_config_dict()

    assert list(config) == ["a", "b", "env"]
    assert get_global_config_dict() is config


def test_otherwise_the_config_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("env.yaml").write_text("mine: 1\n")

    assert maybe_get_global_config_dict() is None
    first = get_global_config_dict()
    Path("env.yaml").write_text("mine: 2\n")

    assert first.mine == 1
    assert get_global_config_dict() is first
    assert maybe_get_global_config_dict() is first


def test_setting_always_parses_and_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "from: launcher")
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"from": "before"}))

    set_global_config_dict(settings(initial={"from": "parsed"}))

    assert get_global_config_dict()["from"] == "parsed"


def test_a_parser_of_ones_own_is_used() -> None:
    class Parser(GlobalConfigDictParser):
        def parse(self, parser_config: GlobalConfigDictParserConfig | None = None) -> DictConfig:
            return OmegaConf.create({"from": "my parser"})

    assert get_global_config_dict(global_config_dict_parser_cls=Parser) == {"from": "my parser"}


def test_threads_that_ask_at_once_get_one_config() -> None:
    start = threading.Barrier(8)

    def ask(_: int) -> DictConfig:
        start.wait(timeout=30)
        return get_global_config_dict(settings(initial={"a": {"responses_api_models": {"m": {"entrypoint": "x"}}}}))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))

    assert all(config is found[0] for config in found)


def test_many_threads_can_parse_at_once_from_a_cold_start(tmp_path: Path) -> None:
    (tmp_path / "servers.yaml").write_text(SERVERS)
    program = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        sys.setswitchinterval(1e-5)
        from nemo_gym.config.overrides import CommandLine, parse_overrides
        from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig

        def parse(number):
            changes = parse_overrides(["+config_paths=[servers.yaml]", f"+policy_base_url='http://{number}'"])
            settings = GlobalConfigDictParserConfig(command_line=CommandLine(changes), skip_load_from_dotenv=True)
            return GlobalConfigDictParser().parse(settings).policy_model.responses_api_models.vllm_model.base_url

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(parse, range(24))) == [f"http://{number}" for number in range(24)]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: get_global_config_dict(),
        lambda: set_global_config_dict(),
        lambda: GlobalConfigDictParser().parse(),
        lambda: GlobalConfigDictParser().parse_no_environment(),
        lambda: get_hf_token(),
    ],
)
def test_nothing_here_reads_argv(ask: Callable[[], Any]) -> None:
    assert "from_argv" in sys.argv[1]

    result = ask()

    assert result is None or "from_argv" not in result


def test_importing_and_parsing_leave_no_trace(tmp_path: Path) -> None:
    before = dict(os.environ)

    parse("+policy_base_url=u", "+config_paths=[]")

    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


def test_the_block_of_a_server_is_found_beside_other_keys() -> None:
    config = OmegaConf.create({"x": {"note": {"a": 1}, "resources_servers": {"r": {"entrypoint": "app.py"}}}})

    assert get_first_server_config_dict(config, "x") == {"entrypoint": "app.py"}


def test_the_first_of_the_first_is_taken_from_any_other_block() -> None:
    config = OmegaConf.create({"a": {"b": {"c": {"x": 1}, "d": None}, "e": None}})

    assert get_first_server_config_dict(config, "a") == {"x": 1}


def test_the_hub_token_is_read_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"hf_token": "t"}))

    assert get_hf_token() == "t"


def test_there_is_no_tracker_run_in_a_process_that_never_loaded_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)

    assert get_wandb_run() is None
    assert "wandb" not in sys.modules


def test_a_free_port_is_looked_for_in_the_range_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_config, "_find_open_port_using_range", lambda *arguments: arguments)
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create({"port_range_low": 7}))
    asked: Any = find_open_port([9], max_retries=3)

    assert asked == ([9], 7, 20_000, 3)


def test_checks_can_be_made_one_by_one() -> None:
    parser = GlobalConfigDictParser()
    empty, server = OmegaConf.create({"a": {"b": "???"}}), {"resources_servers": {"x": {"entrypoint": "app.py"}}}
    assert parser.collect_missing_value_paths(empty) == ["a.b"]
    with pytest.raises(ConfigMissingValuesError, match=r"a\.b"):
        parser.raise_on_missing_values(empty)
    with pytest.raises(NoServerInstancesError, match="defines no server"):
        parser.raise_on_no_server_instances(empty)
    whole = OmegaConf.create({"mine": server})
    assert parser.collect_missing_value_paths(whole) == []
    parser.raise_on_missing_values(whole)
    parser.raise_on_no_server_instances(whole)
