"""Which source wins, and which options are known."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.overrides import CommandLine, parse_overrides
from nemo_gym.errors import ConfigError, MalformedConfigPathsError
from nemo_gym.global_config import GlobalConfigDictParserConfig, Sources, read_sources

Write = Callable[[dict[str, str]], None]


def sources(*arguments: str, initial: dict[str, Any] | None = None, known: Sequence[str] = (), **more: Any) -> Sources:
    return read_sources(
        GlobalConfigDictParserConfig(
            command_line=CommandLine(parse_overrides(arguments), frozenset(known)),
            initial_global_config_dict=OmegaConf.create(initial) if initial is not None else None,
            **more,
        )
    )


def test_each_source_overrides_the_ones_below_it(write: Write) -> None:
    write({"a.yaml": "a: file\nb: file\nc: file\nd: file\n", "env.yaml": "b: env\nc: env\nd: env\n"})

    found = sources("+config_paths=[a.yaml]", "+d=cli", initial={"c": "initial", "d": "initial"}).merged()

    assert {key: found[key] for key in "abcd"} == {"a": "file", "b": "env", "c": "initial", "d": "cli"}


def test_mappings_of_all_sources_merge_and_lists_replace(write: Write) -> None:
    write({"a.yaml": "m: {file: 1}\nl: [1, 2]\n", "env.yaml": "m: {env: 2}\n"})

    found = sources("+config_paths=[a.yaml]", "+m.cli=4", "+l=[3]", initial={"m": {"initial": 3}}).merged()

    assert found["m"] == {"file": 1, "env": 2, "initial": 3, "cli": 4}
    assert found["l"] == [3]


def test_config_paths_of_the_env_file_are_a_default_that_others_replace(write: Write) -> None:
    write({"env.yaml": "config_paths: [a.yaml]", "a.yaml": "k: a", "b.yaml": "k: b", "c.yaml": "k: c"})

    assert sources().merged()["k"] == "a"
    assert sources(initial={"config_paths": ["b.yaml"]}).merged()["k"] == "b"
    assert sources("+config_paths=[c.yaml]", initial={"config_paths": ["b.yaml"]}).merged()["k"] == "c"
    assert "k" not in sources("~config_paths").merged()


def test_config_paths_of_the_result_name_every_file(write: Write) -> None:
    write({"a.yaml": "config_paths: [b.yaml]", "b.yaml": "", "c.yaml": ""})

    assert sources("+config_paths=[a.yaml,c.yaml]").merged()["config_paths"] == ["a.yaml", "c.yaml", "b.yaml"]


def test_config_paths_may_use_values_of_the_command_line_and_of_the_env_file(write: Write) -> None:
    write({"env.yaml": "folder: sub\n", "sub/a.yaml": "k: a\n"})

    assert sources("+config_paths=['${folder}/${name}.yaml']", "+name=a").merged()["k"] == "a"


@pytest.mark.parametrize(
    ("arguments", "initial", "where"),
    [
        (["+config_paths=a.yaml"], None, "the command line"),
        ([], {"config_paths": "a.yaml"}, "the config passed in"),
        ([], None, "env.yaml"),
    ],
)
def test_malformed_config_paths_name_where_they_come_from(
    write: Write, arguments: list[str], initial: dict[str, Any] | None, where: str
) -> None:
    write({"env.yaml": "config_paths: a.yaml"})

    with pytest.raises(MalformedConfigPathsError, match=where):
        sources(*arguments, initial=initial)


def test_the_env_file_and_the_command_line_can_be_left_out(write: Write, tmp_path: Path) -> None:
    write({"env.yaml": "a: env\n", "named.yaml": "a: named\n"})

    assert sources(skip_load_from_dotenv=True).merged() == {}
    assert sources(dotenv_path=tmp_path / "named.yaml").merged() == {"a": "named"}
    assert sources("+a=cli", skip_load_from_cli=True).merged() == {"a": "env"}


def test_a_config_passed_in_is_left_alone() -> None:
    initial = OmegaConf.create({"a": {"b": 1}, "l": [1, 2]})
    OmegaConf.set_struct(initial, True)
    OmegaConf.set_readonly(initial, True)
    changes = CommandLine(parse_overrides(["+a.c=2", "+l[0]=9", "~a.b"]))

    merged = read_sources(
        GlobalConfigDictParserConfig(
            initial_global_config_dict=initial, command_line=changes, skip_load_from_dotenv=True
        )
    ).merged()

    assert merged == {"a": {"c": 2}, "l": [9, 2]}
    assert initial == {"a": {"b": 1}, "l": [1, 2]}


def test_a_key_that_a_file_defines_can_be_deleted(write: Write) -> None:
    write({"a.yaml": "server: {port: 1, host: h}\n"})

    assert sources("+config_paths=[a.yaml]", "~server.port").merged()["server"] == {"host": "h"}


def unknown(found: Sources) -> list[str]:
    return [str(problem).split(" (")[0] for problem in found.unknown_options(found.merged())]


def test_keys_of_files_of_the_env_file_and_of_the_program_are_known_options(write: Write) -> None:
    write({"a.yaml": "from_file: 1\n", "env.yaml": "from_env: 1\n"})

    found = sources(
        "+config_paths=[a.yaml]",
        "+from_file=2",
        "+from_env=2",
        "+from_program=2",
        "+from_command=2",
        "+xyzzy=2",
        initial={"from_program": 1},
        known=["from_command"],
    )

    assert unknown(found) == ["unknown option 'xyzzy'"]


@pytest.mark.parametrize("yes", ["true", "yes", "1"])
def test_unknown_options_can_be_allowed(yes: str) -> None:
    assert unknown(sources("+mine=1", f"+allow_unknown_keys={yes}")) == []
    assert unknown(sources("+mine=1", "+allow_unknown_keys=no")) == ["unknown option 'mine'"]


def test_configs_passed_in_from_python_are_never_checked() -> None:
    assert unknown(sources(initial={"anything": 1, "responses_create_params": {"temprature": 1}})) == []


def test_a_change_that_cannot_be_made_is_an_error_of_ours(write: Write) -> None:
    write({"a.yaml": "list: [1]\n"})

    with pytest.raises(ConfigError, match=r"\+list\[4\]=1"):
        sources("+config_paths=[a.yaml]", "+list[4]=1").merged()
