"""Text that came from elsewhere (agents, models, data sets), made fit for a terminal.

Such text may hold escape sequences that move the cursor, recolour the screen or turn the direction of
writing. Whatever is not printable is shown as its escape instead, on one line.
"""

MAX_SHOWN_LENGTH = 200


def shown(text: object, limit: int = MAX_SHOWN_LENGTH) -> str:
    """`text` on one line of printable characters, cut after `limit` of them."""
    line = " ".join(str(text)[: 4 * limit].split())
    if not line.isprintable():
        line = "".join(character if character.isprintable() else _escape(character) for character in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
