"""How texts are counted: sentences, words, paragraphs. Own rules, no models, no downloads."""

import re

_CLOSING = "\"')]\u2019\u201d*_"
_END = re.compile(
    rf"(?<![.!?\u2026])[.!?\u2026]++[{re.escape(_CLOSING)}]*+(?=\s|\Z)"
    r"|[\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964]+"
)
"""Where a sentence may end: with marks of Latin scripts only before white space, as in `3.14` there is no end.

A run of marks is looked at once, from its beginning: from each of its marks again takes quadratic time.
"""
_TITLES = frozenset(
    {
        "mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "gen", "col", "capt", "lt", "sgt", "gov", "sen", "mt",
    }
)  # fmt: skip
"""After these a sentence goes on, whatever follows."""
_BEFORE_NUMBERS = frozenset({"no", "nos", "fig", "figs", "eq", "vol", "p", "pp", "ch", "sec"})
"""After these a sentence goes on if a number follows."""
_ABBREVIATIONS = frozenset(
    {
        "e.g", "i.e", "etc", "vs", "cf", "al", "approx", "est", "dept", "inc", "ltd", "co", "corp", "bros", "u.s",
        "u.k", "u.n", "e.u", "a.m", "p.m", "ca", "ed", "eds", "ph.d", "b.a", "m.a", "b.c", "a.d", "sr", "jr", "jan",
        "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "mon", "tue", "wed", "thu", "fri",
        "sat", "sun", "ave", "blvd", "rd",
    }
)  # fmt: skip
"""After these a sentence goes on unless a capital letter follows."""
_LIST_MARKER = re.compile(r"(?:\A|\n)[ \t>*#-]*(?:\d{1,3}|[A-Za-z])\Z")
_LAST_WORD = re.compile(r"(?<![\w.])[\w.]++\Z")
_LOOK_BACK = 24
_LETTER = re.compile(r"[^\W_]")
_WORD = re.compile(r"\w+")
_WHOLE_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*")


def sentences(text: str) -> list[str]:
    """The sentences of `text`. Line breaks alone end none, so a heading belongs to the sentence after it."""
    found: list[str] = []
    start, letter = 0, _LETTER.search(text)
    for end in _END.finditer(text):
        if letter is not None and letter.start() < end.end():
            letter = _LETTER.search(text, end.end())
        if _ends_sentence(text, start, end, letter[0] if letter else ""):
            found.append(text[start : end.end()])
            start = end.end()
    found.append(text[start:])
    return [sentence.strip() for sentence in found if _WORD.search(sentence)]


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores: `don't` is two."""
    return _WORD.findall(text)


def whole_words(text: str) -> list[str]:
    """Words as one reads them: `don't` and `well-known` are one each."""
    return _WHOLE_WORD.findall(text)


def paragraphs(text: str, separator: str) -> list[str] | None:
    """What stands between separators (a pattern); None when something between two of them is empty."""
    parts = re.split(separator, text)
    inner = parts[1:-1]
    if any(not part.strip() for part in inner):
        return None
    return [part for part in parts if part.strip()]


def _ends_sentence(text: str, start: int, end: re.Match[str], following: str) -> bool:
    """`following` is the next letter or digit after the end; empty at the end of the text."""
    marks = end.group().rstrip(_CLOSING)
    if marks != ".":
        is_ellipsis = marks.startswith(("..", "\u2026"))
        return not (is_ellipsis and following.islower())
    if not following:
        return True
    at = end.start()
    since = max(start, at - _LOOK_BACK)
    if _LIST_MARKER.search(text, since, at):
        return False
    last_word = _LAST_WORD.search(text, since, at)
    word = last_word.group() if last_word else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    if is_initial or word.lower() in _TITLES:
        return False
    if word.lower() in _BEFORE_NUMBERS:
        return not following.isdecimal()
    return not (word.lower() in _ABBREVIATIONS and following.islower())
