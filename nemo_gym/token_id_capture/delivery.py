"""Putting the tokens of a rollout onto its result, or saying on it why they cannot be trusted."""

import asyncio
import logging
import warnings
from collections import Counter
from typing import Any

from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.token_id_capture.config import TokenIdCaptureSettings
from nemo_gym.token_id_capture.consumer import SNAPSHOT_KEY, trajectories_from_source
from nemo_gym.token_id_capture.protocols import TokenSource

__all__ = [
    "MASK_SAMPLE_KEY",
    "TOKEN_CAPTURE_KEY",
    "MaskedFraction",
    "capture_build_can_retire",
    "finalize_rollout_token_capture",
    "mask_rollout",
    "retire_rollout_token_capture",
    "rollout_carries_token_ids",
]

logger = logging.getLogger(__name__)

TOKEN_CAPTURE_KEY = "_ng_token_capture"
MASK_SAMPLE_KEY = "mask_sample"
_PATIENCE_S = 60.0
"""What a source is given; one that does not answer masks the rollout."""


def rollout_carries_token_ids(result: dict[str, Any]) -> bool:
    """Whether some output item of a result has generated tokens on it."""
    response = result.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    return any(bool(item.get("generation_token_ids")) for item in output or () if isinstance(item, dict))


async def finalize_rollout_token_capture(result: dict[str, Any], source: TokenSource | None) -> dict[str, Any] | None:
    """Rebuild `response.output` of a result from what was kept of its calls; what was built, for retiring it later.

    A result that has token ids is left as it is. Where there is doubt, the result says `mask_sample: true`, with the
    reason under `_ng_token_capture`, and a warning is given. Nothing is raised.
    """
    if source is None:
        return None
    try:
        rollout_id = maybe_rollout_id_from_run_body(result)
    except ValueError:
        rollout_id = None
    if rollout_carries_token_ids(result):
        return await _frozen(rollout_id, source)
    if rollout_id is None:
        return _masked(result, {"rollout_id": None, "error": "no capture key: the result carries no id"})
    try:
        async with asyncio.timeout(_PATIENCE_S):
            built = await trajectories_from_source(rollout_id, source)
    except Exception as error:  # noqa: BLE001 - recorded on the result
        return _masked(result, {"rollout_id": rollout_id, "error": f"{type(error).__name__}: {error}"})
    assert built is not None
    _deliver(result, built)
    return _masked(result, built) if built[MASK_SAMPLE_KEY] else built


def mask_rollout(result: dict[str, Any], rollout_id: str | None, reason: str) -> dict[str, Any]:
    """Have a result say that its tokens cannot be trusted, with a warning; what counts as built then."""
    return _masked(result, {"rollout_id": rollout_id, "error": reason})


async def retire_rollout_token_capture(
    rollout_id: str, source: TokenSource | None, built: dict[str, Any] | None
) -> bool:
    """Forget what was kept of a rollout whose record is on the disk; whether that was done.

    Nothing is forgotten of a masked one, nor of a newer attempt under the same id.
    """
    if source is None or built is None or not capture_build_can_retire(built):
        return False
    return await source.drop(rollout_id, **built[SNAPSHOT_KEY])


def capture_build_can_retire(built: dict[str, Any] | None) -> bool:
    """Whether what was kept is needed no more: it is in the record, without doubt."""
    return built is not None and not built.get(MASK_SAMPLE_KEY) and bool(built.get(SNAPSHOT_KEY))


class MaskedFraction:
    """Ends a run most of whose rollouts cannot be trained on."""

    def __init__(self, settings: TokenIdCaptureSettings) -> None:
        self._settings = settings
        self._finalized = 0
        self._reasons: Counter[str] = Counter()

    def note(self, built: dict[str, Any] | None) -> None:
        """Count a rollout that was finalized.

        Raises:
            RuntimeError: too many were masked.
        """
        if built is None:
            return
        self._finalized += 1
        if built.get(MASK_SAMPLE_KEY):
            self._reasons[reason_of(built)] += 1
        limit, masked = self._settings.max_mask_fraction, self._reasons.total()
        if limit is None or self._finalized < self._settings.mask_fraction_min_samples:
            return
        if masked > limit * self._finalized:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common())
            raise RuntimeError(
                f"{masked} of {self._finalized} rollouts are masked for lack of trustworthy token ids, more than "
                f"token_id_capture.max_mask_fraction={limit:g}: {reasons}"
            )


def reason_of(built: dict[str, Any]) -> str:
    """Why a build is masked."""
    if built.get("error"):
        return str(built["error"])
    metrics = built.get("metrics") or {}
    if metrics.get("capture_incomplete"):
        return "a call of the rollout was not kept"
    if built.get("unresolved_retries"):
        return "calls were tried again, and it is not known which answer counted"
    if metrics.get("quarantined_calls") and (metrics.get("chains"), metrics.get("roots")) == (1, 1):
        return "a call could go on from several others, and is not in the conversation that was built"
    return f"the calls make {metrics.get('chains')} conversations with {metrics.get('roots')} beginnings, not one"


async def _frozen(rollout_id: str | None, source: TokenSource) -> dict[str, Any] | None:
    """What is needed to retire the entries of a result that does not need them."""
    if rollout_id is None:
        return None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            snapshot = await source.freeze(rollout_id)
    except Exception as error:  # noqa: BLE001 - the result is whole without them
        logger.warning("rollout %s: what was kept of its calls stays: %r", rollout_id, error)
        return None
    identity = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    return {"rollout_id": rollout_id, MASK_SAMPLE_KEY: False, SNAPSHOT_KEY: identity}


def _deliver(result: dict[str, Any], built: dict[str, Any]) -> None:
    response = result.get("response")
    if built["rebuilt_response"] is not None and isinstance(response, dict):
        response["output"] = built["rebuilt_response"]["output"]
    result[TOKEN_CAPTURE_KEY] = dict(built["metrics"])


def _masked(result: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
    built = {**built, MASK_SAMPLE_KEY: True}
    reason = reason_of(built)
    result[MASK_SAMPLE_KEY] = True
    result[TOKEN_CAPTURE_KEY] = {**result.get(TOKEN_CAPTURE_KEY, {}), "error": reason}
    warnings.warn(f"rollout {built['rollout_id']} is marked for masking: {reason}", UserWarning, stacklevel=3)
    return built
