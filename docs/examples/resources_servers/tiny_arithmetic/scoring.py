"""What an answer to `3+4=` is worth."""

CLOSE = 0.5


def score(question: str, answer: str) -> float:
    """1 for the right digit, up to half for one that is close, 0 for anything that is no digit."""
    if len(answer) != 1 or not answer.isdecimal():
        return 0.0
    distance = abs(int(answer) - sum(int(part) for part in question.rstrip("=").split("+")))
    return 1.0 if distance == 0 else CLOSE * (1 - min(distance, 9) / 9)
