r"""Which option a text chooses.

Models answer multiple-choice questions in many forms. Each grading mode accepts some of them, from
`\boxed{C}` and nothing else to `**Answer:** (C), because ...`; a pattern of the row's own replaces them.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from nemo_gym.workers import PatternMatcher, PatternTimeoutError, captured
from resources_servers.mcqa.boxes import last_box, without_text_wrappers

logger = logging.getLogger(__name__)

Options: TypeAlias = Mapping[str, str]
"""Upper-case letter → text."""
RowGradingMode: TypeAlias = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon"]
GradingMode: TypeAlias = Literal[
    "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"
]

_LEADING_IN_BOX = re.compile(r"([A-Z])\s*[:).\-]")
_ANSWER_COLON = re.compile(r"answer\s*:\s*(.*)", re.IGNORECASE)
_MARKDOWN_ANSWER = re.compile(r"answer[\s*_`#]*[:\uff1a][\s*_`#]*(.*)", re.IGNORECASE)
_MARKDOWN = re.compile(r"[*_`~$]|\\[()\[\]]")
_LEADING = re.compile(r"[(\[]?([A-Z])(?:[)\]:.,;/\-\u2013\u2014]|\s+[^a-z\s]|\s+(?:and|or)\b|$)")
_PRONOUN = r"(?!I\s+[a-z])"
_LONE_CAPITAL = re.compile(rf"(?<![^\W_]){_PRONOUN}([A-Z])(?![^\W_]|['\u2019])")
_LIST_GOES_ON = re.compile(
    r"\s*+(?:[)\]]\s*+)?(?:[,/&+;]\s*+(?:(?:and|or)\b\s*+)?|\b(?:and|or)\b\s*+)"
    rf"[(\[]?{_PRONOUN}([A-Z])(?![^\W_]|['\u2019])"
)
_LONGEST_LETTER = 8
"""Characters: normalising takes quadratic time on a letter with as many accents as a model likes."""
_LATIN = {
    **str.maketrans("\u0623\u0627\u0628\u062c\u062f", "AABCD"),  # Arabic
    **str.maketrans("\u0985\u09ac\u09a1\u09a2", "ABCD"),  # Bengali letters that sound alike
    **str.maketrans("\u0995\u0996\u0997\u0998", "ABCD"),  # Bengali letters by their order
}


def extract_answer(text: str, options: Options, mode: GradingMode) -> str | None:
    """The letter that `text` chooses among `options`, read as `mode` says; None when it chooses none."""
    return _READERS[mode](text, options)


async def extract_by_patterns(
    text: str, options: Options, patterns: Sequence[str], matcher: PatternMatcher
) -> str | None:
    """The letter found by the first pattern that finds one, in its last match.

    A single letter is taken even when no option has it; anything else must be the text of an option. A pattern that
    takes too long on the text finds nothing in it.
    """
    for pattern in patterns:
        try:
            found = await matcher.last_match(pattern, text, re.IGNORECASE)
        except PatternTimeoutError as error:
            logger.warning("nothing is found in an answer: %s", error.detail)
            continue
        if found is None:
            continue
        chosen = fold_letter(captured(found)) or _option_with_text(captured(found), options)
        if chosen is not None:
            return chosen
    return None


def usable(patterns: str | Sequence[str] | None) -> list[str]:
    """The patterns that are regular expressions; the others are logged and left out."""
    given = [patterns] if isinstance(patterns, str) else patterns or []
    regular = []
    for pattern in given:
        try:
            re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            logger.warning("output_regex %r is ignored: %s", pattern, error)
        else:
            regular.append(pattern)
    return regular


def fold_letter(text: str) -> str | None:
    """The Latin capital that `text` is, also when written full-width, in Arabic or in Bengali; else None."""
    stripped = text.strip()
    if len(stripped) > _LONGEST_LETTER:
        return None
    letter = unicodedata.normalize("NFKC", stripped).translate(_LATIN).upper()
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
    leading = _LEADING_IN_BOX.match(content)
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
    for match in reversed(list(_MARKDOWN_ANSWER.finditer(text))):
        box = last_box(match[1])
        payload = _MARKDOWN.sub("", without_text_wrappers(match[1] if box is None else box)).strip()
        letters = _choices_in(payload, options)
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def _choices_in(payload: str, options: Options) -> set[str]:
    """The option that the words after `Answer:` choose, or several when they leave it open."""
    alone = payload.strip(" .()[]").upper()
    by_text = alone if alone in options else _option_with_text(payload, options)
    if by_text is not None:
        return {by_text}
    leading = _LEADING.match(payload)
    if leading and leading[1] in options:
        return {leading[1], *_listed_after(payload, leading.end(1), options)[0]}
    lone = [match for match in _LONE_CAPITAL.finditer(payload) if match[1] in options]
    end = 0
    for match in lone:
        if match.start() < end:  # it is in the list of one before, which names no other letter
            continue
        others, end = _listed_after(payload, match.end(), options)
        if others - {match[1]}:
            return {match[1], *others}
    return {lone[-1][1]} if lone else set()


def _listed_after(payload: str, start: int, options: Options) -> tuple[set[str], int]:
    """The further letters of a list such as `A, B or C`, whose first ends at `start`, and where the list ends."""
    letters = set()
    while match := _LIST_GOES_ON.match(payload, start):
        letters.add(match[1])
        start = match.end()
    return letters & options.keys(), start


def _option_with_text(text: str, options: Options) -> str | None:
    wanted = normalized(text)
    return next((letter for letter, option in options.items() if wanted and normalized(option) == wanted), None)


_READERS: dict[str, Callable[[str, Options], str | None]] = {
    "strict_single_letter_boxed": _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
    "lenient_answer_colon_md": _markdown_answer_colon,
}
