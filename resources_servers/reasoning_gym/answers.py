"""Where in a model's text the answer is."""

import re

_BEGIN, _END = "<answer>", "</answer>"
_TOKEN = re.compile(r"(?P<box>\\boxed\s*\{)|[{}]")


def extract_answer(text: str) -> str | None:
    r"""The last `<answer>...</answer>`, else the first `\boxed{...}`, else all of it; None when there is no text."""
    found = _last_tagged(text)
    if found is None:
        found = _first_box(text)
    return found.strip() if found is not None else text.strip() or None


def _last_tagged(text: str) -> str | None:
    tagged, position = None, 0
    while (begin := text.find(_BEGIN, position)) >= 0 and (end := text.find(_END, begin)) >= 0:
        tagged = text[begin + len(_BEGIN) : end]
        position = end + len(_END)
    return tagged


def _first_box(text: str) -> str | None:
    """The content of the box that begins first among those that are closed, in one pass."""
    still_open: list[int] = []  # where the content of a box begins; -1 for a brace that is no box
    first: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token[0] != "}":
            still_open.append(token.end() if token["box"] else -1)
        elif still_open and (begin := still_open.pop()) >= 0 and (first is None or begin < first[0]):
            first = begin, token.start()
    return None if first is None else text[slice(*first)]
