"""What goes to `/verify`, and what comes back: JSON that an agent passes on without taking it apart."""

import math
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from nemo_gym.base_resources_server import BaseVerifyResponse, NeMoGymResponse
from nemo_gym.openai_utils import ListsBeside, RowWithResponse, row_with_response, with_lists_beside
from nemo_gym.server_utils import json_bytes


def with_response(
    row: bytes | ListsBeside, response: NeMoGymResponse, *, to_hand_over: bool = False
) -> bytes | ListsBeside | RowWithResponse:
    """The body of `/verify`: a row, which is never empty, with `response` as its last and so decisive field.

    `to_hand_over` says that the response itself is offered to an environment in this process.
    """
    if isinstance(row, ListsBeside):
        beside = with_lists_beside(response, row._replace(envelope=_begun(row.envelope)))
        if beside is not None:
            return beside
        row = row.whole()
    before = _begun(row)
    in_parts = with_lists_beside(response, before) or (row_with_response(before, response) if to_hand_over else None)
    return in_parts or b"".join((before, b',"response":', json_bytes(response), b"}"))


def _begun(row: bytes) -> bytes:
    """A row, in which something follows."""
    return row.rstrip()[:-1]


class Verdict(NamedTuple):
    """The verdict as the environment wrote it."""

    json: bytes
    parsed: Any = None
    """The same, if the environment is in this process."""
    answer: Any = None
    """The environment's answer, if `json` is all of it and as it came."""
    account_bytes: int = 0
    """How long the agent's account at the end of `json` is."""

    def is_scored(self) -> bool:
        """Whether this is a whole rollout with a number for its reward, and so can be passed on as it is.

        Environments of this toolkit write nothing else, but for the `"NaN"` of a judge that failed.
        """
        parsed = self.parsed
        if isinstance(parsed, BaseVerifyResponse):
            is_whole = isinstance(parsed.responses_create_params, BaseModel) and isinstance(parsed.response, BaseModel)
            return is_whole and type(parsed.reward) is float and math.isfinite(parsed.reward)
        try:
            content = orjson.loads(self.json)
            reward = content["reward"]
            is_whole = type(content["responses_create_params"]) is type(content["response"]) is dict
        except (ValueError, KeyError, TypeError):
            return False
        return is_whole and isinstance(reward, int | float) and not isinstance(reward, bool)
