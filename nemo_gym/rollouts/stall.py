"""A run in which nothing finishes says so: which rollouts have been out longest, and whether their agents live.

Without it a hanging verifier and a slow model look the same for hours.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TypeAlias

from aiohttp import ClientTimeout

from nemo_gym.http.server_client import ServerClient
from nemo_gym.rollouts.failures import rollout_name
from nemo_gym.rollouts.limits import Trial
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

STALLED_AFTER_S = 300.0
_NAMED = 5
_PROBE_TIMEOUT_S = 5.0

Probe: TypeAlias = Callable[[str], Awaitable[str]]
"""Says in a few words how the agent of that name is; what it raises, and that it takes long, is also a finding."""


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

    async def watch(self, in_flight: Callable[[], Sequence[Trial]]) -> None:
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

    async def _report(self, oldest: list[Trial], count: int, now_s: float) -> None:
        agents = dict.fromkeys(trial.agent for trial in oldest)
        findings = await asyncio.gather(*(self._ask(agent) for agent in agents))
        rollouts = "; ".join(f"{rollout_name(trial.row)} for {now_s - trial.started_s:.0f} s" for trial in oldest)
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
