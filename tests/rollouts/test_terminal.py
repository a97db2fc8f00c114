import pytest

from nemo_gym.rollouts.terminal import shown


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
