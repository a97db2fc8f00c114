import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from pydantic import Field

from nemo_gym.cli.command import help_page, is_styled, page_width
from nemo_gym.cli.pages import CommandInfo
from nemo_gym.cli.registry import COMMANDS
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig, HelpConfig

DOC = """Roll out every row of a file, one by one, until all of them have been rolled out, and then stop.

    A second paragraph.

    - a list keeps
      its lines

    Examples:
        ng_roll +rows=in.jsonl
        ng_roll +rows=in.jsonl \\
            +limit=5
    """


class RollConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_roll`."""

    rows: str
    """The rows to roll out, one JSON object per line."""
    limit: int | None = Field(None, ge=1)
    """Use only so many rows, from the first one on, in the order of the file; all of them when unset."""


def test_the_page_has_usage_description_examples_and_options_each_once() -> None:
    page = help_page("ng_roll", DOC, RollConfig)
    assert page.startswith("Usage: ng_roll +rows=<text> [+option=value ...]\n\nRoll out every row")
    assert "- a list keeps\n  its lines" in page
    assert "Examples:\n  ng_roll +rows=in.jsonl\n  ng_roll +rows=in.jsonl \\\n      +limit=5\n" in page
    assert "  +rows=<text>  [required]\n      The rows to roll out, one JSON object per line.\n" in page
    assert "  +limit=<int, at least 1>  [default: null]\n      Use only so many rows" in page
    assert "config_paths" in page
    assert "ng_help lists every command" in page
    assert page.count("Roll out every row") == page.count("Options:") == page.count("one JSON object") == 1
    assert "\033" not in page


@pytest.mark.parametrize("width", [40, 60, 100])
def test_prose_is_wrapped_to_the_width(width: int) -> None:
    page = help_page("ng_roll", DOC, RollConfig, width=width)
    prose, _, options = page.partition("Examples:")
    assert max(map(len, prose.splitlines())) <= width
    assert max(map(len, options.partition("Options:")[2].splitlines())) <= max(width, 43)


def test_what_must_be_given_comes_first() -> None:
    class Config(BaseNeMoGymCLIConfig):
        limit: int = 5
        rows: str

    page = help_page("ng_roll", DOC, Config)
    assert page.index("+rows=<text>  [required]") < page.index("+limit=<int>  [default: 5]")


@pytest.mark.parametrize("info", COMMANDS, ids=lambda info: info.name)
def test_every_example_is_a_command_that_can_be_copied(info: CommandInfo) -> None:
    page = help_page(f"ng_{info.name}", info.words, HelpConfig)
    examples = page.partition("Examples:\n")[2].partition("\n\n")[0]
    typed = textwrap.dedent(examples).replace("\\\n", " ").splitlines()
    assert typed
    assert [line for line in typed if not shlex.split(line) or line.count(f"ng_{info.name}") != 1] == []


def test_examples_may_stand_in_the_docstring_of_the_config_class() -> None:
    class Config(BaseNeMoGymCLIConfig):
        """Arguments.

        Examples:
            ng_other +a=1
        """

    page = help_page("nemo_gym_other", "What it does.", Config)
    assert "Examples:\n  ng_other +a=1\n" in page
    assert "Arguments." not in page
    assert "no options of its own" in page
    assert "nemo_gym_help lists every command" in page


def test_a_command_that_reads_no_config_does_not_speak_of_config_files() -> None:
    page = help_page("ng_help", "List.", HelpConfig, reads_config=False)
    assert page.startswith("Usage: ng_help\n")
    assert "config_paths" not in page


def test_headings_are_bold_on_a_terminal_only() -> None:
    assert "\033[1mOptions:\033[0m" in help_page("ng_roll", DOC, RollConfig, styled=True)


def test_a_terminal_is_styled_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, terminal: TextIO) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert is_styled(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_styled(terminal)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not is_styled(terminal)


def test_a_file_is_never_styled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with (tmp_path / "out").open("w") as file:
        assert not is_styled(file)


@pytest.mark.parametrize(("columns", "width"), [("10", 40), ("77", 77), ("500", 120)])
def test_the_width_is_the_terminals_within_reason(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert page_width() == width


def test_a_help_page_loads_neither_configuration_nor_anything_for_show() -> None:
    probe = (
        "import sys\nfrom nemo_gym.cli.command import command_named\nmain = command_named('validate')\n"
        "try:\n    main.run(['--help'])\nexcept SystemExit as exit:\n    assert not exit.code\n"
        "heavy = {'omegaconf', 'hydra', 'rich', 'yaml', 'asyncio', 'aiohttp', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        yield stream
    os.close(controller)
