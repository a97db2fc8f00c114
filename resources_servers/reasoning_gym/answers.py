"""Where in a model's text the answer is."""

import re
from collections.abc import Iterator

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{")


def extract_answer(text: str) -> str | None:
    r"""The last `<answer>...</answer>`, else the first `\boxed{...}`, else all of it; None when there is no text."""
    tagged = _TAG.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    for content in _boxes(text):
        return content.strip()
    return text.strip() or None


def _boxes(text: str) -> Iterator[str]:
    """The contents of the boxes that are closed."""
    for opening in _BOX.finditer(text):
        depth = 1
        for at in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                yield text[opening.end() : at]
                break
