"""What came from elsewhere cannot act on the terminal it is shown on."""

import json

import pytest

from nemo_gym.terminal import harmless, harmless_json, new_table, print_table, print_traceback, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, große Worte, 日本", "plain, große Worte, 日本"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("two\nlines\tand a tab", "two lines and a tab"),
        ("right\u202eto left", "right\\u202eto left"),
        ("half \ud83d an emoji", "half \\ud83d an emoji"),
        ("\x9b31m\x07", "\\x9b31m\\x07"),
    ],
)
def test_what_is_not_printable_is_shown_as_its_escape(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_long_text_is_cut() -> None:
    assert shown("x" * 1_000, 10) == "xxxxxxxxx…"
    assert len(shown("\x1b" * 1_000, 100)) == 100


def test_anything_can_be_shown() -> None:
    assert shown(None) == "None"


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2066\u200f\r\x00\ud800z"


def test_text_of_several_lines_keeps_them_and_nothing_else_that_acts() -> None:
    text = harmless(f"first\n\tsecond große 日本 👩\u200d💻\xa0ok {HOSTILE}")

    assert text.startswith("first\n\tsecond große 日本 👩\u200d💻\xa0ok a\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\u202eevil")
    assert text.endswith("\\u2066\\u200f\\r\\x00\\ud800z")
    assert harmless(text) == text


def test_json_keeps_its_meaning() -> None:
    value = {"a\x9b": "\x7f\u202e\u2028 é 日本"}
    text = harmless_json(json.dumps(value, ensure_ascii=False))

    assert json.loads(text) == value
    assert harmless(text) == text


def test_a_table_shows_cells_as_they_are_and_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("name", "count")
    table.add_row(f"[bold]{HOSTILE}[/]", 3)
    table.add_row(None, "4")
    print_table(table)

    printed = capsys.readouterr().out
    assert "[bold]a\\x1b]0;title" in printed
    assert harmless(printed) == printed


def test_an_unexpected_exception_is_shown_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        print_traceback(type(error), error, error.__traceback__)

    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "ValueError: a\\x1b]0;title" in printed
    assert harmless(printed) == printed
