"""Telling a verdict that can be passed on as it is from one that has to be looked at."""

import orjson


def is_scored(verdict: bytes) -> bool:
    """Whether this is a whole rollout with a number for its reward.

    Environments of this toolkit write nothing else, but for the `"NaN"` of a judge that failed.
    """
    try:
        content = orjson.loads(verdict)
        reward = content["reward"]
        parts = content["responses_create_params"], content["response"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(reward, int | float) and not isinstance(reward, bool) and all(isinstance(p, dict) for p in parts)
