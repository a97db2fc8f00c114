"""How many tokens a response cost, and how the costs of several calls add up."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

from nemo_gym.schemas.wire import WireModel


class NeMoGymResponseInputTokensDetails(WireModel):
    """Of the input tokens, those that came from the provider's cache."""

    cached_tokens: int


class NeMoGymResponseOutputTokensDetails(WireModel):
    """Of the output tokens, those spent on reasoning."""

    reasoning_tokens: int


class NeMoGymResponseUsage(WireModel):
    """Tokens read and written; details are None when the provider does not tell."""

    input_tokens: int
    input_tokens_details: NeMoGymResponseInputTokensDetails | None = None
    output_tokens: int
    output_tokens_details: NeMoGymResponseOutputTokensDetails | None = None
    total_tokens: int

    @classmethod
    def sum_from_list(cls, usages: Iterable["NeMoGymResponseUsage"]) -> "NeMoGymResponseUsage":
        """What all `usages` cost together; nothing costs nothing."""
        summands = list(usages)
        if summands:
            return reduce(_add_usages, summands)
        return cls(
            input_tokens=0,
            input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=0),
            output_tokens=0,
            output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=0),
            total_tokens=0,
        )


def _add_usages(left: NeMoGymResponseUsage, right: NeMoGymResponseUsage) -> NeMoGymResponseUsage:
    details = {
        "input_tokens_details": _added(left.input_tokens_details, right.input_tokens_details),
        "output_tokens_details": _added(left.output_tokens_details, right.output_tokens_details),
    }
    return type(left).model_validate({**(_added(left, right) or {}), **details})


def _added(left: WireModel | None, right: WireModel | None) -> dict[str, int] | None:
    """The sums of what both sides count; a count that one side lacks is unknown."""
    if left is None or right is None:
        return None
    ours, theirs = _fields(left), _fields(right)
    return {
        name: count + theirs[name]
        for name, count in ours.items()
        if isinstance(count, int) and isinstance(theirs.get(name), int)
    }


def _fields(counts: WireModel) -> dict[str, Any]:
    """`dict(counts)`, which costs ten times as much."""
    return {**counts.__dict__, **counts.__pydantic_extra__} if counts.__pydantic_extra__ else counts.__dict__


def accumulate_response_usage(
    total: NeMoGymResponseUsage | None, additional: NeMoGymResponseUsage | None
) -> NeMoGymResponseUsage | None:
    """Add one call's usage to a running total, which starts as None.

    A call without usage changes nothing. A detail that one of the two does not know is
    unknown in the sum: a number that covers only some calls would pass for the whole.
    """
    if total is None or additional is None:
        return additional if total is None else total
    return _add_usages(total, additional)
