"""What one rollout contributes to pass@k and majority votes: named scores and an answer that can be compared."""

import math
from collections.abc import Callable, Hashable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import orjson

Rollout = dict[str, Any]
Scores = dict[str, float]
ScoreFn = Callable[[Any], Mapping[str, Any]]

NO_ANSWER = "no_answer"


def score_rollout(rollout: Rollout, score_fn: ScoreFn | None, answer_key: str | None) -> Scores:
    """The usable scores of one rollout, bools as 0 or 1, plus `no_answer` when there is an `answer_key`."""
    if not isinstance(rollout, dict):
        return {}
    scores: Scores = {}
    for name, value in _raw_scores(rollout, score_fn).items():
        number = usable_number(value)
        if number is not None:
            scores[name] = number
    if answer_key is not None:
        scores[NO_ANSWER] = int(rollout.get(answer_key) is None)
    return scores


def usable_number(value: object) -> float | None:
    """`value` as an int or float when it is a finite number, else None."""
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if not isinstance(value, (int, float)):
        if not isinstance(value, Real):
            return None
        value = float(value)
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def voting_key(rollout: Rollout, answer_key: str) -> Hashable:
    """The rollout's answer in a form that can be counted; None when it has none."""
    answer = rollout.get(answer_key) if isinstance(rollout, dict) else None
    return hashable(answer)


def hashable(value: Any) -> Hashable:
    """`value` itself when it can be hashed, else its compact JSON, marked so that no text equals it."""
    try:
        hash(value)
    except TypeError:
        return ("json", _compact_json(value))
    result: Hashable = value
    return result


def _raw_scores(rollout: Rollout, score_fn: ScoreFn | None) -> Mapping[str, Any]:
    if score_fn is None:
        return {"accuracy": rollout.get("reward")}
    try:
        return score_fn(rollout)
    except Exception:
        if usable_number(rollout.get("reward")) is None:
            return {}
        raise


def _compact_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return repr(value).encode()
