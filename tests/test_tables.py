import os
import pty
import sys

import pytest

from nemo_gym.tables import new_table, print_table


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


def test_a_table_on_a_terminal_is_folded_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    monkeypatch.setenv("COLUMNS", "60")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        print_an_example()
        terminal.flush()
        lines = os.read(reader, 65_536).decode().splitlines()
    os.close(reader)

    assert len(lines) > 3


def test_a_list_that_is_too_wide_for_a_terminal_keeps_its_names_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_folder_with_a_long_name/and_a_longer_one_in_it"
    reader, writer = pty.openpty()
    monkeypatch.setenv("COLUMNS", "60")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        table = new_table("Name", "Domain", "Description", "Needs")
        table.add_row(name, "math", "a sentence that goes on and on " * 4, "a key")
        table.add_row("short", "", "brief", "")
        print_table(table, described_by="Description")
        terminal.flush()
        lines = os.read(reader, 65_536).decode().splitlines()
    os.close(reader)

    assert lines[0] == name
    assert lines[1].startswith("    a sentence that")
    assert "    domain: math; needs: a key" in lines
    assert lines[-2:] == ["short", "    brief"]
    assert max(map(len, lines)) <= 60
