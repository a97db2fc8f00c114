"""Why a group of rollouts could not be had, in two classes.

INFRA failures say nothing about the prompt: the same request may succeed later, elsewhere. DATA failures come
from the prompt, the policy's answer or a bug: trying the same again helps only by chance. The two are counted,
and tried again, separately.
"""

from collections.abc import Iterator
from enum import StrEnum

import aiohttp

from nemo_gym.errors import GymError
from nemo_gym.http.errors import ServerCallError, ServerResponseError

_MAX_CAUSES = 8
_RETRYABLE_STATUSES = (408, 429)
_RAY_INFRASTRUCTURE = frozenset(
    {
        "RayActorError",
        "ActorDiedError",
        "ActorUnavailableError",
        "WorkerCrashedError",
        "LocalRayletDiedError",
        "NodeDiedError",
        "ObjectLostError",
        "ObjectStoreFullError",
        "OutOfMemoryError",
        "OwnerDiedError",
        "GetTimeoutError",
        "RaySystemError",
    }
)


class RolloutFailure(GymError):  # noqa: N818
    """No group came about."""


class RolloutInfraFailure(RolloutFailure):
    """Something between the trainer and the completions failed; the prompt is not at fault."""


class RolloutTimeout(RolloutInfraFailure):
    """A generation or an environment step took longer than allowed."""


class GenerationUnavailable(RolloutInfraFailure):
    """The generator could not be reached, or broke."""


class GymTransportError(RolloutInfraFailure):
    """Rows were sent to the servers and never came back."""


class RolloutDataFailure(RolloutFailure):
    """This prompt, or what was generated for it, cannot be trained on."""


class NonContiguousTokensError(RolloutDataFailure, AssertionError):
    """The prompt of a turn does not begin with the tokens of the turns before it."""


class NoGenerationDataError(RolloutDataFailure, ValueError):
    """A result without a single token of the policy, as an over-long prompt gives."""


class IncompleteTokenDataError(RolloutDataFailure, KeyError):
    """An item has part of its token ids and log-probs only."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class FailureClass(StrEnum):
    """Which budget a failure uses up."""

    INFRA = "infra"
    DATA = "data"


def classify_rollout_failure(error: BaseException) -> FailureClass:
    """Whether `error`, or what caused it, is one of the infrastructure; whatever is unknown counts as DATA."""
    if isinstance(error, RolloutDataFailure):
        return FailureClass.DATA
    for link in _causes(error):
        if isinstance(link, aiohttp.ClientResponseError):
            return FailureClass.INFRA if is_retryable_status(innermost_status(link)) else FailureClass.DATA
        if _is_infrastructure(link):
            return FailureClass.INFRA
    return FailureClass.DATA


def innermost_status(error: aiohttp.ClientResponseError) -> int:
    """The status that the failure began with, however many servers passed it on."""
    return error.error_status if isinstance(error, ServerResponseError) else error.status


def is_retryable_status(status: int) -> bool:
    """Whether an answer with this status may turn out well another time."""
    return status >= 500 or status in _RETRYABLE_STATUSES


def is_ray_error(error: BaseException) -> bool:
    """Whether Ray itself raised it."""
    return any(kind.__module__.split(".")[0] == "ray" for kind in type(error).__mro__)


def _is_infrastructure(error: BaseException) -> bool:
    known = (
        RolloutInfraFailure,
        ServerCallError,
        TimeoutError,
        ConnectionError,
        aiohttp.ClientConnectionError,
        aiohttp.ClientPayloadError,
    )
    if isinstance(error, known):
        return True
    return is_ray_error(error) and any(kind.__name__ in _RAY_INFRASTRUCTURE for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MAX_CAUSES:
        seen.add(id(link))
        yield link
        link = link.__cause__
