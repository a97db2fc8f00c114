import os
import pty
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_gym.terminal import new_table, print_table


def print_an_example() -> None:
    table = new_table("name", "what it is")
    table.add_row("a", "short")
    table.add_row("b", "[not markup] and much longer " * 10)
    print_table(table)


def test_a_table_in_a_file_is_as_wide_as_it_needs_and_has_no_blanks_at_line_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_an_example()

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[1] == "a     short"
    assert lines[2].startswith("b     [not markup] and")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, print_it: Callable[[], None]) -> list[str]:
    """The lines that a terminal of 60 columns gets, however many pieces they arrive in."""
    reader, writer = pty.openpty()
    monkeypatch.setenv("COLUMNS", "60")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(until_marked, reader)
        with os.fdopen(writer, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            print_it()
            terminal.write("\x04end")
            terminal.flush()
            said = reading.result(60)
    os.close(reader)
    return said.splitlines()


def until_marked(reader: int) -> str:
    said = b""
    while not said.endswith(b"\x04end"):
        said += os.read(reader, 65_536)
    return said.removesuffix(b"\x04end").decode()


def test_a_table_on_a_terminal_is_folded_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(on_a_terminal(monkeypatch, print_an_example)) > 3


def test_a_list_that_is_too_wide_for_a_terminal_keeps_its_names_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_folder_with_a_long_name/and_a_longer_one_in_it"
    table = new_table("Name", "Domain", "Description", "Needs")
    table.add_row(name, "math", "a sentence that goes on and on " * 4, "a key")
    table.add_row("short", "", "brief", "")

    lines = on_a_terminal(monkeypatch, lambda: print_table(table, described_by="Description"))

    assert lines[0] == name
    assert lines[1].startswith("    a sentence that")
    assert "    domain: math; needs: a key" in lines
    assert lines[-2:] == ["short", "    brief"]
    assert max(map(len, lines)) <= 60
