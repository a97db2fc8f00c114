r"""Reading `\boxed{...}` and `\text{...}`, whose braces may nest.

One pass over the text each: a model that repeats itself may leave ten thousand boxes open.
"""

import re

_BOX_TOKEN = re.compile(r"\\[{}]|(?P<wanted>\\(?:boxed|fbox)\s*\{)|\{|\}")
_TEXT_TOKEN = re.compile(r"\\[{}]|(?P<wanted>\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf)\s*\{)|\{|\}")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}`; None when there is none."""
    found: tuple[int, int] | None = None
    for opening, closing in _pairs(_BOX_TOKEN, text):
        if closing is not None and (found is None or opening.end() > found[0]):
            found = opening.end(), closing.start()
    return None if found is None else text[found[0] : found[1]]


def without_text_wrappers(content: str) -> str:
    r"""`content` with every `\text{...}` and its like replaced by what is in it."""
    cuts = [token.span() for pair in _pairs(_TEXT_TOKEN, content) for token in pair if token is not None]
    kept, position = [], 0
    for start, end in sorted(cuts):
        kept.append(content[position:start])
        position = end
    return "".join([*kept, content[position:]])


def _pairs(token: re.Pattern[str], text: str) -> list[tuple[re.Match[str], re.Match[str] | None]]:
    """The wanted openings in `text`, each with the brace that closes it, if one does."""
    pairs: list[tuple[re.Match[str], re.Match[str] | None]] = []
    still_open: list[re.Match[str]] = []
    for match in token.finditer(text):
        if match[0] == "}":
            opening = still_open.pop() if still_open else None
            if opening is not None and opening["wanted"]:
                pairs.append((opening, match))
        elif match[0] == "{" or match["wanted"]:
            still_open.append(match)
    return pairs + [(opening, None) for opening in still_open if opening["wanted"]]
