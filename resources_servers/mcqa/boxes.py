r"""Reading `\boxed{...}` and `\text{...}`, whose braces may nest."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bf|rm)\s*\{")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}`; None when there is none."""
    for opening in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, opening.end())
        if end is not None:
            return text[opening.end() : end]
    return None


def without_text_wrappers(content: str) -> str:
    r"""`content` with every `\text{...}` and its like replaced by what is in it."""
    while opening := _TEXT.search(content):
        end = _closing_brace(content, opening.end())
        inner, rest = (content[opening.end() :], "") if end is None else (content[opening.end() : end], content[end + 1 :])
        content = content[: opening.start()] + inner + rest
    return content


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened just before `start` is closed."""
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return None
