"""A million of every odd character, said to every bundled verifier: each is scored and keeps nobody waiting."""

import random
import time
from pathlib import Path

from tests.chaos.attacks import Tried, attack
from tests.hostile.answers import ROWS, Answer
from tests.hostile.verifiers import problem_with, verifiers
from tests.security.growth import ENDINGS, KINDS, Text

_SIZE = 1_000_000
_TIME_S = 240.0
_FORMATS = ("{}", r"\boxed{{{}}}", "Answer: {}", '"{}"', "<answer>{}</answer>", "```\n{}\n```")


@attack("verifiers: a million of every odd character")
def odd_characters(folder: Path) -> Tried:
    """As many texts, verifiers and characters in any order, as there is time for."""
    tried, dice = Tried(), random.Random(folder.name)
    pairs = [(row, kind) for row in ROWS for kind in KINDS if kind != "\ud800"]  # which no model server lets through
    dice.shuffle(pairs)
    ends_s = time.monotonic() + _TIME_S
    with verifiers() as client:
        for row, kind in pairs:
            if time.monotonic() > ends_s:
                break
            written, ending = dice.choice(_FORMATS), dice.choice(ENDINGS)
            says = written.format(Text("", kind, ending).of(_SIZE))
            problem = problem_with(client, Answer(row, says, None))
            tried.count(f"{row}: {written.format(kind)!r}", problem)
    return tried
