"""Hostile texts, and how the time that something takes over them grows with their length.

Only growth is judged: four times the text may take eight times the processor time and a moment more, where quadratic
work takes sixteen times. Most is decided at the third length, where a square shows already. What looks worse is
measured again, the best of several tries counting, so that a busy machine is no fault.
"""

import gc
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as codes
from re import _parser as parser
from typing import Any, NamedTuple

SIZES = (4_096, 16_384, 65_536, 262_144, 1_048_576)
MOMENT_S = 0.005
MOST_TIMES = 8.0
TRIES = 4
NEGLIGIBLE_S = {16_384: 0.000_125, 65_536: 0.002, 262_144: 0.02}
"""What takes less at that length takes a fraction of a second at the full one, even if it grows with the square."""
PLAIN_S = 0.0004
"""What takes more at two lengths in a row, and has not grown too fast from one to the next, need not go on."""
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
ANYTHING = " a1x"

ENDINGS = ("", "x\x00\nx")
"""What a text ends with. After the second one, whatever must reach the end of the text or of a line does not."""

KINDS = (
    *"aA1 \n\t\\\"'{}[]()<>:;@=?!&#%^~|+/.,-_*`$\x00\x1b\u202e\ud800",
    *"\u0301\u200b\u200d\ufeff\u3000\u2026\u3002\u00e9\u0130\u00df\u65e5\u0663\U0001f600",
    *("://", "a:", "a://a:", "a://a:a@", "?a=", "&api_key=", "aA", "a b\n", "\r\n", "A, ", ". ", "a.", "{}", "<>"),
    *("\"'", '."', "!?", "[]", "()", "[{", "a\u0301", "1.", "1,", "1 ", "**", "\n- ", "\n\n", "$$", "\\(", "<<", ">>"),
    *(
        "${",
        "${oc.env:",
        "authorization: ",
        "model ",
        "<think>",
        "</think>",
        "\\boxed{",
        "\\boxed{}",
        "\\text{",
        "```",
        "```\n",
        "\\u001b[31m",
        "answer:",
        "<answer>",
        "A or ",
        "p.s.",
        "[[A",
        '"a":',
    ),
)
"""What is repeated in a hostile text; a pattern adds what it looks for itself."""


class Text(NamedTuple):
    """A text of any length: a beginning, something over and over, and an ending."""

    beginning: str
    repeated: str
    ending: str = ""

    def of(self, size: int) -> str:
        length = size - len(self.ending)
        return (self.beginning + self.repeated * (length // len(self.repeated) + 1))[:length] + self.ending


def of_all_kinds() -> Iterator[Text]:
    return (Text("", kind, ending) for kind in KINDS for ending in ENDINGS)


def growing_too_fast(use: Callable[[str], Any], texts: Iterable[Text], sizes: Iterable[int] = SIZES) -> str | None:
    """In words, the first text over which `use` takes more than linear time; None if there is none."""
    for text in texts:
        before_s: float | None = None
        for size in sizes:
            taken_s = _taken_s(use, text.of(size))
            has_grown = before_s is not None and taken_s > MOST_TIMES * before_s
            if before_s is not None and taken_s > MOST_TIMES * before_s + MOMENT_S:
                before_s = min(_taken_s(use, text.of(size // 4)) for _ in range(TRIES))
                taken_s = min(taken_s, *(_taken_s(use, text.of(size)) for _ in range(TRIES - 1)))
                if taken_s > MOST_TIMES * before_s + MOMENT_S:
                    return f"{text}: {before_s:.4f} s for {size // 4} characters, {taken_s:.4f} s for {size}"
            is_plain = before_s is not None and before_s > PLAIN_S and not has_grown
            if taken_s < NEGLIGIBLE_S.get(size, 0) or is_plain:
                break
            before_s = taken_s
    return None


def _taken_s(use: Callable[[str], Any], text: str) -> float:
    collects_garbage = gc.isenabled()
    gc.disable()  # it would go through everything that this process has loaded
    try:
        started_s = time.process_time()
        use(text)
        return time.process_time() - started_s
    finally:
        if collects_garbage:
            gc.enable()


def applied(pattern: "re.Pattern[Any]", method: str) -> Callable[[str], Any]:
    """One way to use a pattern, of text or of bytes, to its last match."""
    if isinstance(pattern.pattern, bytes):
        use = _applied(pattern, method)
        return lambda text: use(text.encode(errors="surrogatepass"))
    return _applied(pattern, method)


def _applied(pattern: "re.Pattern[Any]", method: str) -> Callable[[Any], Any]:
    if method == "finditer":
        return lambda text: deque(pattern.finditer(text), maxlen=0)
    if method in ("sub", "subn"):
        return lambda text: pattern.sub(text[:0], text)
    used: Callable[[Any], Any] = getattr(pattern, method)
    return used


def in_words_of(pattern: "re.Pattern[str]") -> list[Text]:
    """Texts made of what a pattern looks for: all that leads to one of its repetitions, and then only that."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    texts = set()
    for choice in range(3):
        before = ""
        for piece, is_repeated in _pieces(tree, choice):
            if is_repeated and piece:
                texts |= {Text(before, piece), Text(before, f"{piece} ")}
            before += piece
            if before:
                texts.add(Text("", before))
        if before:
            texts.add(Text("", before[:-1] or before))
    return sorted(Text(text.beginning, text.repeated, ending) for text in texts for ending in ENDINGS)


def _pieces(tree: Any, choice: int) -> Iterator[tuple[str, bool]]:
    """What matches a pattern, piece by piece, and whether a piece may be repeated; `choice` varies it."""
    for operation, argument in tree:
        if operation in REPEATS:
            least, most, inner = argument
            once = "".join(piece for piece, _ in _pieces(inner, choice))
            yield once * least, False
            yield once, most > 50
        elif operation is codes.SUBPATTERN:
            yield from _pieces(argument[3], choice)
        elif operation is codes.BRANCH:
            yield from _pieces(argument[1][choice % len(argument[1])], choice)
        elif operation is codes.ASSERT:
            yield from _pieces(argument[1], choice)
        elif operation is codes.ATOMIC_GROUP:
            yield from _pieces(argument, choice)
        else:
            yield _character(operation, argument, choice), False


def _character(operation: Any, argument: Any, choice: int) -> str:
    if operation is codes.LITERAL:
        return chr(argument)
    if operation is codes.ANY:
        return ANYTHING[choice]
    if operation is codes.NOT_LITERAL:
        return next(character for character in ANYTHING[choice] + "ab" if ord(character) != argument)
    return _one_of(tuple(argument), choice) if operation is codes.IN else ""


@lru_cache(None)
def _one_of(members: Any, choice: int) -> str:
    matches = compiler.compile(parser.SubPattern(parser.State(), [(codes.IN, list(members))]), 0).fullmatch
    named = [chr(argument) for operation, argument in members if operation is codes.LITERAL]
    ranges = [chr(argument[0]) for operation, argument in members if operation is codes.RANGE]
    found = [character for character in [*named, *ranges, *"a A1\n-\t"] if matches(character)]
    return found[choice % len(found)] if found else ""
