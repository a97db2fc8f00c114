"""What goes to `/verify`, and what comes back."""

from typing import NamedTuple

import orjson

from nemo_gym.base_resources_server import NeMoGymResponse
from nemo_gym.server_utils import json_bytes


def with_response(row: bytes, response: NeMoGymResponse) -> bytes:
    """Return the body of `/verify`: a row, which is never empty, with `response` as its last and so decisive field."""
    return b"".join((row.rstrip()[:-1], b',"response":', json_bytes(response), b"}"))


class Verdict(NamedTuple):
    """The verdict as the environment wrote it."""

    json: bytes

    def is_scored(self) -> bool:
        """Return whether this is a whole rollout with a number for its reward, and so can be passed on as it is.

        Environments of this toolkit write nothing else, but for the `"NaN"` of a judge that failed.
        """
        try:
            content = orjson.loads(self.json)
            reward = content["reward"]
            is_whole = type(content["responses_create_params"]) is type(content["response"]) is dict
        except (ValueError, KeyError, TypeError):
            return False
        return is_whole and isinstance(reward, int | float) and not isinstance(reward, bool)
