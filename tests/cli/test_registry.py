import inspect
import subprocess
import sys
import typing
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import BaseModel

from nemo_gym.cli import registry
from nemo_gym.cli.command import command_named
from nemo_gym.cli.pages import GROUPS, HELP, NO_CONFIG, CommandInfo
from nemo_gym.cli.registry import COMMANDS, config_class_of, find_command, loaded
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig, CompletionConfig, VersionConfig


def test_every_command_is_installed_twice_and_every_script_is_a_command_of_the_table() -> None:
    installed = {
        entry.name: entry.value for entry in entry_points(group="console_scripts") if entry.name.startswith("n")
    }
    for info in COMMANDS:
        for prefix in registry.PREFIXES:
            assert installed.get(f"{prefix}{info.name}") == f"nemo_gym.cli.entry:{info.name}"
    assert {registry.bare_name(script) for script in registry.installed_scripts()} == {info.name for info in COMMANDS}


@pytest.mark.parametrize("info", COMMANDS, ids=lambda info: info.name)
def test_a_line_of_the_table_is_complete(info: CommandInfo) -> None:
    config_class = config_class_of(info)
    assert config_class is not None
    assert issubclass(config_class, BaseModel)
    assert info.group in GROUPS
    assert info.summary
    assert "\n" not in info.summary
    assert info.words.strip()
    assert info.loading.further_checks is None or callable(loaded(info.loading.further_checks))


@pytest.mark.parametrize("info", COMMANDS, ids=lambda info: info.name)
def test_the_work_of_a_command_is_a_function_of_its_name_that_takes_its_options(info: CommandInfo) -> None:
    main = loaded(info.body)
    assert main.__name__ == info.name
    assert typing.get_type_hints(main)["config"] is config_class_of(info)
    assert list(inspect.signature(main).parameters) == ["config"]


@pytest.mark.parametrize("name", ["run", "view", "compare"])
def test_a_help_page_does_not_load_the_work(name: str) -> None:
    probe = (
        f"import sys\nfrom nemo_gym.cli.command import command_named\ncommand = command_named({name!r})\n"
        "try:\n    command.run(['--help'])\nexcept SystemExit as exit:\n    assert not exit.code\n"
        "assert not [each for each in sys.modules if each.startswith('nemo_gym.cli.commands')]"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_there_is_no_other_command() -> None:
    with pytest.raises(LookupError, match="no command 'nonsense'"):
        command_named("nonsense")


def test_the_options_of_all_commands_are_known_without_loading_anything_heavy() -> None:
    probe = (
        "import sys\nfrom nemo_gym.cli.registry import all_options\nassert list(all_options())\n"
        "heavy = {'omegaconf', 'hydra', 'yaml', 'numpy', 'aiohttp', 'fastapi', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_both_spellings_find_a_command() -> None:
    assert find_command("ng_version") is find_command("nemo_gym_version") is not None
    assert find_command("ng_nonsense") is None


def test_a_command_whose_module_does_not_exist_yet_counts_for_nothing() -> None:
    assert (
        config_class_of(
            CommandInfo("later", HELP, "", "nemo_gym.not_yet.config:LaterConfig", "nemo_gym.not_yet", NO_CONFIG, "")
        )
        is None
    )


def test_a_module_that_exists_but_cannot_be_imported_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ng_broken_options.py").write_text("import ng_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="ng_missing_dependency"):
        config_class_of(CommandInfo("broken", HELP, "", "ng_broken_options:Config", "ng_broken", NO_CONFIG, ""))


def test_options_of_every_command_and_of_the_own_one_are_known() -> None:
    class Own(BaseNeMoGymCLIConfig):
        mine: int = 0

    assert {"mine", "json", "shell", "h", "help"} <= registry.known_options(Own)


def test_text_options_are_those_of_all_commands_unless_the_own_one_disagrees() -> None:
    class Own(BaseNeMoGymCLIConfig):
        shell: int = 0
        json_text: str = ""

    assert {"shell", "policy_base_url"} <= registry.text_options(VersionConfig)
    assert "json" not in registry.text_options(CompletionConfig)
    own = registry.text_options(Own)
    assert "json_text" in own
    assert "shell" not in own
