r"""Which option a text chooses.

Models answer multiple-choice questions in many forms. Each grading mode accepts some of them, from
`\boxed{C}` and nothing else to `**Answer:** (C), because ...`; a pattern of the row's own replaces them.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from resources_servers.mcqa.boxes import last_box, without_text_wrappers

logger = logging.getLogger(__name__)

Options: TypeAlias = Mapping[str, str]
"""Upper-case letter → text."""
RowGradingMode: TypeAlias = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon"]
GradingMode: TypeAlias = Literal[
    "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"
]

_LEADING_LETTER = re.compile(r"([A-Z])\s*[:).\-]")
_ANSWER_COLON = re.compile(r"answer\s*:\s*(.*)", re.IGNORECASE)
_MARKDOWN_ANSWER = re.compile(r"answer[\s*_`#]*[::][\s*_`]*(.*)", re.IGNORECASE)
_MARKDOWN = re.compile(r"[*_`~$]|\\[()\[\]]")
_LONE_CAPITAL = re.compile(r"(?<![^\W_])[A-Z](?![^\W_]|['’])")
_LISTED_CAPITAL = re.compile(r"\s*\)?\s*(?:,|/|&|\+|\bor\b|\band\b)\s*(?:\bor\b|\band\b)?\s*\(?([A-Z])(?![^\W_]|['’])")
_ARABIC_LETTERS = dict(zip("أابجدهوزحط", "AABCDEFGHI", strict=True))
_BENGALI_LETTERS = dict(zip("কখগঘঙচছজঝঞ", "ABCDEFGHIJ", strict=True))
_FOLDED = str.maketrans(_ARABIC_LETTERS | _BENGALI_LETTERS)


def extract_answer(text: str, options: Options, mode: GradingMode) -> str | None:
    """The letter that `text` chooses among `options`, read as `mode` says; None when it chooses none."""
    return _READERS[mode](text, options)


def extract_by_patterns(text: str, options: Options, patterns: Sequence[re.Pattern[str]]) -> str | None:
    """The letter found by the first pattern that finds one, in its last match.

    A single letter is taken even when no option has it; anything else must be the text of an option.
    """
    for pattern in patterns:
        matches = list(pattern.finditer(text))
        if not matches:
            continue
        found = _captured(matches[-1])
        letter = fold_letter(found)
        if letter is not None:
            return letter
        chosen = _option_with_text(found, options)
        if chosen is not None:
            return chosen
    return None


def compiled(patterns: str | Sequence[str] | None) -> list[re.Pattern[str]]:
    """The patterns that are regular expressions; the others are logged and left out."""
    given = [patterns] if isinstance(patterns, str) else patterns or []
    usable = []
    for pattern in given:
        try:
            usable.append(re.compile(pattern, re.IGNORECASE))
        except re.error as error:
            logger.warning("output_regex %r is ignored: %s", pattern, error)
    return usable


def fold_letter(text: str) -> str | None:
    """The Latin capital that `text` is, also when written full-width, in Arabic or in Bengali; else None."""
    letter = unicodedata.normalize("NFKC", text.strip()).translate(_FOLDED).upper()
    return letter if len(letter) == 1 and "A" <= letter <= "Z" else None


def normalized(text: str) -> str:
    """Lower case, white space collapsed."""
    return " ".join(text.lower().split())


def _strict_boxed(text: str, options: Options) -> str | None:
    box = last_box(text)
    if box is None:
        return None
    content = without_text_wrappers(box).strip()
    letters = [character for character in content if character.isalpha()]
    if len(letters) == 1:
        return letters[0] if letters[0] in options else None
    leading = _LEADING_LETTER.match(content)
    return leading[1] if leading and leading[1] in options else None


def _lenient_boxed(text: str, options: Options) -> str | None:
    chosen = _strict_boxed(text, options)
    box = last_box(text)
    if chosen is not None or box is None:
        return chosen
    content = normalized(without_text_wrappers(box))
    named = [letter for letter, option in options.items() if normalized(option) and normalized(option) in content]
    return named[0] if len(named) == 1 else None


def _answer_colon(text: str, options: Options) -> str | None:
    match = _ANSWER_COLON.search(text)
    if match is None:
        return None
    given = match[1].strip()
    letter = given.upper()
    return letter if letter in options else _option_with_text(given, options)


def _markdown_answer_colon(text: str, options: Options) -> str | None:
    for payload in _payloads_from_the_end(text):
        leading = re.match(r"\(?([A-Z])(?![^\W_]|['’])", payload)
        if leading and (others := _listed_after(payload, leading.end())) and {leading[1], *others} != {leading[1]}:
            return None
        chosen = _choice_in(payload, options)
        if chosen is not None:
            return chosen
    return None


def _payloads_from_the_end(text: str) -> Iterator[str]:
    for match in reversed(list(_MARKDOWN_ANSWER.finditer(text))):
        payload = without_text_wrappers(last_box(match[1]) or match[1])
        yield _MARKDOWN.sub("", payload).strip()


def _choice_in(payload: str, options: Options) -> str | None:
    if payload.strip(" .()[]").upper() in options:
        return payload.strip(" .()[]").upper()
    leading = re.match(r"[(\[]?([A-Z])(?:[)\]:.,;\-–—]|\s+[^a-z\s]|$)", payload)
    if leading and leading[1] in options:
        return leading[1]
    by_text = _option_with_text(payload, options)
    if by_text is not None:
        return by_text
    capitals = [letter for letter in _LONE_CAPITAL.findall(payload) if letter in options]
    return capitals[-1] if capitals else None


def _listed_after(payload: str, start: int) -> list[str]:
    """The further letters of a list such as `A, B or C`, whose first ends at `start`."""
    letters = []
    while match := _LISTED_CAPITAL.match(payload, start):
        letters.append(match[1])
        start = match.end()
    return letters


def _captured(match: re.Match[str]) -> str:
    groups = [group for group in match.groups() if group]
    return groups[0] if groups else match[0]


def _option_with_text(text: str, options: Options) -> str | None:
    wanted = normalized(text)
    return next((letter for letter, option in options.items() if wanted and normalized(option) == wanted), None)


_READERS: dict[str, Callable[[str, Options], str | None]] = {
    "strict_single_letter_boxed": _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
    "lenient_answer_colon_md": _markdown_answer_colon,
}
