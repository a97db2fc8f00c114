"""What goes to `/verify`, and what comes back: JSON that an agent passes on without taking it apart."""

import orjson
from pydantic import BaseModel

from nemo_gym.http.request import json_bytes


def with_response(row: BaseModel, response: BaseModel) -> bytes:
    """The body of `/verify`: a row, which is never empty, with `response` as its last and so decisive field."""
    return b"".join((json_bytes(row)[:-1], b',"response":', json_bytes(response), b"}"))


def is_scored(verdict: bytes) -> bool:
    """Whether this is a whole rollout with a number for its reward, and so can be passed on as it is.

    Environments of this toolkit write nothing else, but for the `"NaN"` of a judge that failed.
    """
    try:
        content = orjson.loads(verdict)
        reward = content["reward"]
        parts = content["responses_create_params"], content["response"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(reward, int | float) and not isinstance(reward, bool) and all(isinstance(p, dict) for p in parts)
