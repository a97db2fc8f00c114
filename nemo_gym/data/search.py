"""Loose matching for people who half remember a name."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_CUTOFF = 0.7


def matches(query: str, fields: Iterable[str]) -> bool:
    """Whether some field contains the query, or it or one of its words is spelled almost like it; case is ignored."""
    wanted = query.strip().lower()
    for text in fields:
        known = text.lower()
        if not known:
            continue
        words = [known, *re.split(r"[\s_\-]+", known)]
        if wanted in known or any(_is_close(wanted, word) for word in words):
            return True
    return False


def _is_close(wanted: str, word: str) -> bool:
    return bool(word) and SequenceMatcher(None, wanted, word).ratio() >= _CUTOFF
