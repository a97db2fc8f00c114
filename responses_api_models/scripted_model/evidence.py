"""What a text offers as arguments of a tool: names, quotations, numbers, `key: value` pairs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_QUOTED = re.compile(
    r'"([^"\n]{1,200})"|\u201c([^\u201d\n]{1,200})\u201d|`([^`\n]{1,200})`|(?<!\w)\'([^\'\n]{1,200})\'(?!\w)'
)
_WORD = re.compile(r"\w[\w'\u2019-]*")
_NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]{0,18}(?:\.\d{1,15})?(?![\w-])")
_SENTENCE_ENDS = (".", "!", "?", ":", ";", '"', "\u201c", "(")
_POSSESSIVE = re.compile(r"['\u2019]s\Z")
_CAPITALISED = re.compile(r"(?<![\w'\u2019-])[^\W\d_a-z][\w'\u2019-]*")
_AFTER_PREPOSITION = re.compile(r"\b(?:in|at|for|of|to|from|near|about|on|with|into|over)\s+\Z", re.IGNORECASE)
_NO_NAMES = frozenset(
    _WORD.findall(
        """a about also am an and any are as ask at be because but by can check compute could count did do does
        explain find for from get give had has have he hello her here hey hi his how i i'd i'll i'm i've if in is it
        it's its just let let's list look make may me might my no not now of ok okay on or our please say set she
        should show so sum tell thank thanks that the their then there these they this those to today tomorrow use
        was we we're what what's when where which who whose why will with would yes you your"""
    )
)
_ENUMERATION = re.compile(
    r"\s*+(?:,\s*+(?:\b(?:and|or)\b\s*+)?|\b(?:and|or)\b\s*+)(?:(?:in|at|for|of|to|from|near)\s+)?"
)
_CONTENT_WORD_LENGTH = 4
_LOOK_BACK = 12


@dataclass(frozen=True)
class Evidence:
    """A text, and what can be read off it."""

    text: str

    @cached_property
    def quotations(self) -> list[str]:
        """What stands between quotation marks."""
        return _unique(next(group for group in match.groups() if group) for match in _QUOTED.finditer(self.text))

    @cached_property
    def numbers(self) -> list[int | float]:
        """Every number, in order."""
        return [_number(match.group()) for match in _NUMBER.finditer(self.text)]

    @cached_property
    def names(self) -> list[str]:
        """The likeliest names: those after a preposition, else any inside a sentence, else those that begin one."""
        by_rank: dict[int, list[str]] = {}
        for name, rank in self._ranked_names():
            by_rank.setdefault(rank, []).append(name)
        return _unique(by_rank[min(by_rank)]) if by_rank else []

    def mentions(self, value: Any) -> bool:
        """Whether the text has `value` as words of its own."""
        spelled = r"[ _-]".join(re.escape(word) for word in re.split(r"[ _-]", str(value)))
        return bool(re.search(rf"(?<!\w){spelled}(?!\w)", self.text, re.IGNORECASE))

    def stated(self, key: str) -> str | None:
        """What the text says `key` is: `city: Oslo`, `city = "Oslo"`, `count is 5`."""
        spelled = r"[ _-]".join(re.escape(word) for word in key.split("_"))
        match = re.search(
            rf"(?<!\w){spelled}\s*(?:=|:|\bis\b|\bto\b)\s*(?:[\"'`\u201c]([^\"'`\u201d\n]+)|(-?[\w][\w.,'\u2019-]*))",
            self.text,
            re.IGNORECASE,
        )
        return None if match is None else match[1] or match[2].rstrip(".,")

    def topic(self) -> str:
        """The longest telling word, for want of anything better; else the whole text."""
        words = [match.group() for match in _WORD.finditer(self.text)]
        telling = [word for word in words if len(word) >= _CONTENT_WORD_LENGTH and word.lower() not in _NO_NAMES]
        return max(telling, key=len) if telling else self.text.strip()[:200]

    def _ranked_names(self) -> Iterator[tuple[str, int]]:
        """Runs of capitalised words, and how unlikely each is to be a name."""
        start = end = -1
        enumerated_rank: int | None = None
        for match in _CAPITALISED.finditer(self.text):
            word = match.group()
            if not word[0].isupper() or _POSSESSIVE.sub("", word).lower() in _NO_NAMES:
                continue
            if match.start() == end + 1 and self.text[end] == " ":
                end = match.end()
                continue
            if start >= 0:
                rank = self._rank(start) if enumerated_rank is None else enumerated_rank
                yield self._name(start, end), rank
                enumerated_rank = rank if _ENUMERATION.fullmatch(self.text, end, match.start()) else None
            start, end = match.span()
        if start >= 0:
            yield self._name(start, end), self._rank(start) if enumerated_rank is None else enumerated_rank

    def _name(self, start: int, end: int) -> str:
        return _POSSESSIVE.sub("", self.text[start:end])

    def _rank(self, start: int) -> int:
        before = self.text[max(0, start - _LOOK_BACK) : start]
        said = before.rstrip()
        if not said or said.endswith(_SENTENCE_ENDS) or "\n" in before[len(said) :]:
            return 2
        return 0 if _AFTER_PREPOSITION.search(before) else 1


def _number(text: str) -> int | float:
    plain = text.replace(",", "")
    return float(plain) if "." in plain else int(plain)


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(value.strip() for value in values if value.strip()))
