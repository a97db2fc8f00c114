"""What counts as a reward: one finite number. Anything else fails its group instead of being averaged away."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_gym.rl.failures import RolloutDataFailure
from nemo_gym.rl.tensors import as_list


def finite_reward(value: Any, whose: str) -> float:
    """The reward as a float.

    Raises:
        RolloutDataFailure: it is no finite number.
    """
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise RolloutDataFailure(
            f"{whose} has the reward {value!r}, which is no number to train on; "
            "a verifier that cannot judge must answer with an error, not with such a reward"
        )
    return float(value)


def reward_of_one(rewards: Any, whose: str) -> float:
    """The only reward in the answer to a batch of one: a tensor of shape [1], or a list with one number.

    Raises:
        AssertionError: there are several rewards for one conversation.
        RolloutDataFailure: it is no finite number.
    """
    values = [] if isinstance(rewards, Mapping) else as_list(rewards)
    is_one = len(values) == 1 and not isinstance(values[0], list)
    assert is_one, (
        f"{whose} has the rewards {rewards!r}; the native path takes one number per conversation: add them up "
        "in the environment"
    )
    return finite_reward(values[0], whose)
