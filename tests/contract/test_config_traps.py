"""The traps of the original's configuration language, one test for each, showing that it is none here."""

import subprocess
import sys
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.cli.config import safe_yaml
from nemo_gym.config.instances import find_instances
from nemo_gym.config.overrides import CommandLine, parse_overrides
from nemo_gym.errors import (
    ConfigError,
    ConfigInterpolationError,
    ConfigMissingValuesError,
    DuplicateInstanceError,
    InheritPathNotFoundError,
    ServerRefNotFoundError,
)
from nemo_gym.global_config import (
    GlobalConfigDictParser,
    GlobalConfigDictParserConfig,
    find_config_problems,
    get_first_server_config_dict,
)
from nemo_gym.keys import NEMO_GYM_RESERVED_TOP_LEVEL_KEYS
from nemo_gym.paths import PARENT_DIR


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)
    (tmp_path / "env.yaml").write_text("")


def settings(*arguments: str) -> GlobalConfigDictParserConfig:
    return GlobalConfigDictParserConfig(command_line=CommandLine(parse_overrides(arguments)), offline=True)


def parse(*arguments: str) -> DictConfig:
    return GlobalConfigDictParser().parse(settings(*arguments))


def parse_text(text: str, *arguments: str) -> DictConfig:
    Path("config.yaml").write_text(text)
    return parse("+config_paths=[config.yaml]", *arguments)


def problem(*arguments: str) -> ConfigError:
    (found,) = find_config_problems(settings(*arguments))
    return found


def test_an_inheriting_block_may_add_keys_its_source_lacks_from_the_command_line_too() -> None:
    config = parse_text("base: {x: 1}\nleaf: {_inherit_from: base, new: 2}\n", "+leaf.newer=3")

    assert config.leaf == {"x": 1, "new": 2, "newer": 3}


def test_inheritance_is_chained_and_circles_are_reported() -> None:
    config = parse_text("base: {x: 1}\nmid: {_inherit_from: base, y: 2}\nleaf: {_inherit_from: mid, z: 3}\n")

    assert config.leaf == {"x": 1, "y": 2, "z": 3}
    assert "mid" not in config
    with pytest.raises(InheritPathNotFoundError, match="circle: b -> a -> b"):
        parse_text("a: {_inherit_from: b}\nb: {_inherit_from: a}\n")


def test_the_result_does_not_depend_on_the_order_of_keys() -> None:
    blocks = ["base: {part: {x: 1}}", "mover: {_inherit_from: base}", "copier: '${copy:base.part}'"]

    for order in permutations(blocks):
        config = parse_text("\n".join(order))

        assert config.mover == {"part": {"x": 1}}
        assert config.copier == {"x": 1}
        assert "base" not in config


def test_copy_is_applied_to_elements_of_lists() -> None:
    assert parse_text("base: {x: 1}\nlist: [{_copy: base, y: 2}]\n")["list"] == [{"x": 1, "y": 2}]


def test_references_are_checked_also_in_lists() -> None:
    Path("config.yaml").write_text(
        "agent: {responses_api_agents: {a: {entrypoint: app.py, judges: [{type: responses_api_models, name: gone}]}}}\n"
    )

    found = problem("+config_paths=[config.yaml]")

    assert isinstance(found, ServerRefNotFoundError)
    assert "'gone'" in str(found)
    assert "judges[0]" in str(found)


def test_references_in_a_mapping_that_the_agent_may_never_look_at_are_no_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path("config.yaml").write_text(
        "agent: {responses_api_agents: {a: {entrypoint: app.py, "
        "judges: {strict: {model: {type: responses_api_models, name: gone}}}}}}\n"
    )

    assert find_config_problems(settings("+config_paths=[config.yaml]")) == []

    assert "'gone'" in caplog.text
    assert "judges.strict.model" in caplog.text


UNSET = "${oc.env:SURELY_NOT_SET}"
NEEDS_VARIABLE = f"theirs: {{responses_api_models: {{m: {{entrypoint: app.py, note: '{UNSET}'}}}}}}\n"


def test_an_unset_variable_of_a_server_matters_only_to_those_who_start_it() -> None:
    Path("config.yaml").write_text(NEEDS_VARIABLE)
    starting = settings("+config_paths=[config.yaml]")
    looking = starting.model_copy(update={"starts_servers": False})

    (found,) = find_config_problems(starting)
    config = GlobalConfigDictParser().parse(looking)

    assert "SURELY_NOT_SET" in str(found)
    assert [instance.name for instance in find_instances(config)[0]] == ["theirs"]
    assert f"note: {UNSET}" in safe_yaml(config)


@pytest.mark.parametrize("text", ["notes: {{a: '{}'}}\n", "theirs: {{responses_api_models: {{m: {{key: '{}'}}}}}}\n"])
def test_an_unset_variable_of_what_is_no_server_is_no_error_until_a_server_needs_it(text: str) -> None:
    Path("config.yaml").write_text(text.format(UNSET))
    Path("user.yaml").write_text(
        "mine: {responses_api_models: {m: {entrypoint: app.py, key: '${notes.a}'}}}\n"
        "notes: {a: '${oc.env:SURELY_NOT_SET}'}\n"
    )

    assert find_config_problems(settings("+config_paths=[config.yaml]")) == []
    (found,) = find_config_problems(settings("+config_paths=[user.yaml]"))

    assert "mine.responses_api_models.m.key" in str(found)


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_all_three_spellings_of_an_option_work_and_repeating_one_is_no_error(mark: str) -> None:
    config = parse_text("known: 1\n", f"{mark}known=2", f"{mark}policy_model_name=a", f"{mark}policy_model_name=b")

    assert (config.known, config.policy_model_name) == (2, "b")


def test_config_paths_of_the_command_line_replace_those_of_the_env_file_and_paths_are_compared_as_files() -> None:
    Path("env.yaml").write_text("config_paths: [a.yaml]\n")
    Path("a.yaml").write_text("from_a: 1\n")
    Path("b.yaml").write_text("config_paths: [c.yaml, ./c.yaml]\nfrom_b: 1\n")
    Path("c.yaml").write_text("from_c: 1\n")

    config = parse("+config_paths=[b.yaml,./b.yaml]")

    assert config.config_paths == ["b.yaml", "c.yaml"]
    assert "from_a" not in config


def test_two_files_that_define_one_instance_differently_are_both_named() -> None:
    Path("first.yaml").write_text("m: {responses_api_models: {vllm: {entrypoint: app.py}}}\n")
    Path("second.yaml").write_text("m: {responses_api_models: {openai: {entrypoint: app.py}}}\n")

    found = problem("+config_paths=[first.yaml,second.yaml]")

    assert isinstance(found, DuplicateInstanceError)
    assert "first.yaml" in str(found)
    assert "second.yaml" in str(found)


def test_a_server_is_found_by_its_type_not_by_its_position() -> None:
    config = parse_text("x: {notes: {a: {b: 1}}, responses_api_models: {m: {entrypoint: app.py}}}\n")

    assert get_first_server_config_dict(config, "x").entrypoint == "app.py"
    (instance,) = GlobalConfigDictParser().filter_for_server_instance_configs(config)
    assert (instance.name, instance.implementation) == ("x", "m")


def test_the_pinned_packages_and_the_python_version_of_the_user_are_respected() -> None:
    given = parse_text("head_server_deps: [openai==1.2.3]\npython_version: '3.12'\n")
    not_given = parse_text("")

    assert (given.head_server_deps, given.python_version) == (["openai==1.2.3"], "3.12")
    assert f"openai=={version('openai')}" in not_given.head_server_deps
    assert not_given.python_version == sys.version.split()[0]


def test_help_comes_first_and_once_even_when_the_config_is_broken() -> None:
    Path("env.yaml").write_text("broken: [\n")
    script = Path(sys.executable).parent / "ng_validate"

    done = subprocess.run(
        [script, "+config_paths=[gone.yaml]", "--help"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Check a configuration") == 1


def test_missing_values_and_interpolations_are_reported_together_and_by_name() -> None:
    Path("config.yaml").write_text("a:\n  b: ???\nc: ???\nd: '${gone.key}'\ne: '${oc.env:SURELY_NOT_SET}'\n")

    found = find_config_problems(settings("+config_paths=[config.yaml]"))

    assert [type(each) for each in found] == [ConfigMissingValuesError, *[ConfigInterpolationError] * 2]
    assert "2 required config value(s) are unset:\n  a.b\n  c\n" in str(found[0])
    assert "'gone.key' is not set, but d" in str(found[1])
    assert "'SURELY_NOT_SET' is not set, but e" in str(found[2])


def test_the_shared_name_space_is_documented_and_reserved_names_are_never_servers() -> None:
    page = (PARENT_DIR / "docs" / "configuration.md").read_text()
    server: dict[str, Any] = {"responses_api_models": {"m": {"entrypoint": "app.py"}}}
    config = OmegaConf.create(dict.fromkeys((*NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, "mine"), server))

    instances = GlobalConfigDictParser().filter_for_server_instance_configs(config)

    assert [instance.name for instance in instances] == ["mine"]
    assert [name for name in NEMO_GYM_RESERVED_TOP_LEVEL_KEYS if f"`{name}`" not in page] == []
    assert "`limit`" in page
