import subprocess
from collections.abc import Callable

from nemo_gym.cli.commands.about import command_list

Script = Callable[..., subprocess.CompletedProcess[str]]


def test_every_installed_command_is_listed_with_one_line_in_its_group(script: Script) -> None:
    done = script("ng_help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Available CLI scripts" in done.stdout
    assert "--help" in done.stdout
    configuration, _, help_group = done.stdout.partition("Configuration:\n")[2].partition("\n\nHelp:\n")
    assert [line.split()[0] for line in configuration.splitlines()] == ["ng_validate", "ng_dump_config"]
    lines = [line.split()[:5] for line in help_group.splitlines()]
    assert ["ng_version", "gym", "--version", "Print", "versions"] in lines


def test_a_script_the_table_does_not_know_is_listed_too() -> None:
    assert command_list(["ng_mystery", "ng_version"]).splitlines()[2:7] == [
        "Help:",
        "  ng_version  gym --version  Print versions and facts about this machine",
        "",
        "Other:",
        "  ng_mystery                 see its --help",
    ]


def test_the_command_itself_has_a_help_page_under_both_names(script: Script) -> None:
    assert script("ng_help", "--help").stdout.startswith("Usage: ng_help\n")
    assert script("nemo_gym_help", "+h=true").stdout.startswith("Usage: nemo_gym_help\n")
