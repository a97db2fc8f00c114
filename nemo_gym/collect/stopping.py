"""When a run ends before all of its rollouts were tried, and what it says when nothing finishes.

One failure never ends a run. What ends it is the user, the clock, failures that show that going on would only waste
time, or servers that are gone; what was not finished is then left to be resumed. A run in which nothing finishes
names the rollouts that have been out longest and whether their agents live: a hanging verifier and a slow model
would look the same for hours.
"""

import asyncio
import logging
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, TypeAlias

from aiohttp import ClientTimeout

from nemo_gym.collect.failures import PendingAttempt, Verdict, rollout_name
from nemo_gym.http.client import ServerClient
from nemo_gym.runs.record import FailureClass, Outcome, RolloutKey
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

JUDGED_FROM = 20
"""Finished rollouts below which the fraction of failures says too little."""
DOOMED_AFTER = 3
"""Different rollouts of an agent that must fail for want of a key or a model."""
HOPELESS_AFTER = 5
"""Rollouts that failed for the same reason, and none that succeeded, that must be enough to know."""
_MAX_CAUSES = 100
_SETTING_AT_FAULT: dict[str, str] = {
    FailureClass.AUTH: "the key was refused",
    FailureClass.MODEL_NOT_FOUND: "the model was not found",
}
"""What dooms an agent, in words."""
_LEFT_OUT = tuple(kind for kind in FailureClass if not kind.tells_of_run)
_SHOWN_LENGTH = 1_000
STALLED_AFTER_S = 300.0
_NAMED = 5
_PROBE_TIMEOUT_S = 5.0
Probe: TypeAlias = Callable[[str], Awaitable[str]]
"""Says in a few words how the agent of that name is; what it raises, and that it takes long, is also a finding."""


class StopKind(StrEnum):
    """Why a run ended early."""

    INTERRUPTED = "interrupted"
    RUN_TIMEOUT = "run_timeout"
    DOOMED_AGENT = "doomed_agent"
    HOPELESS = "hopeless"
    FAIL_FAST = "fail_fast"
    TOO_MANY_FAILURES = "too_many_failures"
    SERVER_DOWN = "server_down"
    BUDGET = "budget"
    PILOT = "pilot"
    TOO_MANY_MASKED = "too_many_masked"


class Stop(NamedTuple):
    """A reason to end the run, and the same in words."""

    kind: StopKind
    message: str


@dataclass
class StopRules:
    """Says after each attempt of one run whether the run should stop, and why."""

    fail_fast: bool = False
    max_failure_fraction: float | None = None
    finished: int = 0
    """Rollouts that succeeded, or failed for good."""
    failed: int = 0
    has_succeeded: bool = False
    """Whether any rollout has, also in an earlier run."""
    _proven: set[str] = field(default_factory=set)
    _doomed: dict[str, list[RolloutKey | None]] = field(default_factory=dict)
    _refused: dict[str, list[int]] = field(default_factory=dict)
    """By cause the first that were started, as `Verdict.order` says."""
    _last_failure: str = ""

    def after(self, verdict: Verdict, oldest: float = math.inf) -> Stop | None:
        """Count one attempt; the reason to stop now, if there is one.

        `oldest` is the order of the attempt that has been in flight longest.
        """
        if verdict.outcome is Outcome.SUCCESS:
            return self.after_success(verdict.agent, is_final=verdict.is_final)
        if verdict.outcome is Outcome.DISCARDED or verdict.failure_class in _LEFT_OUT:
            return None
        self.finished += verdict.is_final
        self.failed += verdict.is_final
        self._last_failure = verdict.message
        return (
            self._if_doomed(verdict)
            or self._if_hopeless(verdict, oldest)
            or self._if_failing_fast(verdict)
            or self._if_too_many_failed()
        )

    def after_success(self, agent: str, *, is_final: bool) -> Stop | None:
        """The same of an attempt that succeeded."""
        self.finished += is_final
        self._proven.add(agent)
        self.has_succeeded = True
        return None if self.max_failure_fraction is None else self._if_too_many_failed()

    def _if_doomed(self, verdict: Verdict) -> Stop | None:
        found = verdict.failure_class
        what = _SETTING_AT_FAULT.get(found) if isinstance(found, str) else None
        if what is None or verdict.agent in self._proven:
            return None
        keys = self._doomed.setdefault(verdict.agent, [])
        if verdict.key is None or verdict.key not in keys:
            keys.append(verdict.key)
        if len(keys) < DOOMED_AFTER:
            return None
        return Stop(
            StopKind.DOOMED_AGENT,
            f"{what} in {len(keys)} rollouts of agent {shown(verdict.agent)!r} and none succeeded, so none will: "
            f"{shown(verdict.message, _SHOWN_LENGTH)}",
        )

    def _if_hopeless(self, verdict: Verdict, oldest: float) -> Stop | None:
        """Failures may come at once and answers take time: whatever was started before them may still succeed."""
        cause, known = verdict.cause, self._refused
        if self.has_succeeded or not cause or (len(known) >= _MAX_CAUSES and cause not in known):
            return None
        orders = known.setdefault(cause, [])
        insort(orders, verdict.order)
        del orders[HOPELESS_AFTER:]
        if len(orders) < HOPELESS_AFTER or oldest < orders[-1]:
            return None
        return Stop(
            StopKind.HOPELESS,
            f"{HOPELESS_AFTER} rollouts failed for the same reason and none succeeded, so the others would, too: "
            f"{shown(verdict.message, _SHOWN_LENGTH)}",
        )

    def _if_failing_fast(self, verdict: Verdict) -> Stop | None:
        if not (self.fail_fast and verdict.is_final):
            return None
        return Stop(
            StopKind.FAIL_FAST, f"a rollout failed and fail_fast is on: {shown(verdict.message, _SHOWN_LENGTH)}"
        )

    def _if_too_many_failed(self) -> Stop | None:
        allowed = self.max_failure_fraction
        if allowed is None or self.finished < JUDGED_FROM or self.failed <= allowed * self.finished:
            return None
        return Stop(
            StopKind.TOO_MANY_FAILURES,
            f"{self.failed} of {self.finished} finished rollouts failed, more than max_failure_fraction={allowed:g} "
            f"allows; the last failure: {shown(self._last_failure, _SHOWN_LENGTH)}",
        )


def health_probe(server_client: ServerClient) -> Probe:
    """Asks agents for their `/health`."""

    async def probe(agent: str) -> str:
        answer = await server_client.get(
            server_name=agent, url_path="/health", timeout=ClientTimeout(total=_PROBE_TIMEOUT_S)
        )
        return "answers /health" if answer.ok else f"answers /health with status {answer.status}"

    return probe


class StallWatch:
    """Logs a line whenever nothing has finished for a while."""

    def __init__(self, after_s: float = STALLED_AFTER_S, probe: Probe | None = None) -> None:
        self._after_s = after_s
        self._probe = probe
        self._last_sign_s = 0.0

    def sign_of_life(self, now_s: float) -> None:
        """A rollout finished."""
        self._last_sign_s = now_s

    async def watch(self, in_flight: Callable[[], Sequence[PendingAttempt]]) -> None:
        """Watch until cancelled; `in_flight` gives what is out, the oldest first."""
        loop = asyncio.get_running_loop()
        self._last_sign_s = reported_s = loop.time()
        while True:
            await asyncio.sleep(max(self._last_sign_s, reported_s) + self._after_s - loop.time())
            now_s = loop.time()
            if now_s - max(self._last_sign_s, reported_s) < self._after_s:
                continue
            reported_s = now_s
            oldest = list(islice(in_flight(), _NAMED))
            if oldest:
                await self._report(oldest, len(in_flight()), now_s)

    async def _report(self, oldest: list[PendingAttempt], count: int, now_s: float) -> None:
        agents = dict.fromkeys(pending.agent for pending in oldest)
        findings = await asyncio.gather(*(self._ask(agent) for agent in agents))
        rollouts = "; ".join(f"{rollout_name(pending.row)} for {now_s - pending.started_s:.0f} s" for pending in oldest)
        health = "; ".join(f"{shown(agent)} {finding}" for agent, finding in zip(agents, findings, strict=True))
        logger.warning(
            "No rollout finished for %.0f s. %d in flight, the oldest: %s. Their agents: %s",
            now_s - self._last_sign_s,
            count,
            rollouts,
            health,
        )

    async def _ask(self, agent: str) -> str:
        if self._probe is None:
            return "was not asked"
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return shown(await self._probe(agent))
        except TimeoutError:
            return f"does not answer /health within {_PROBE_TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001 - whatever the probe meets is its finding
            return f"does not answer /health ({type(error).__name__})"
