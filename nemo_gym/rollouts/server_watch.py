"""A run whose servers are gone ends by itself, and says which of them it was.

A server that is dead refuses connections, one that hangs accepts them and says nothing. Either way rollouts
fail or time out one after the other, each after its own long wait, and a run of thousands of rows would take
days to get through them. So whoever waits for servers asks each of them now and then whether it answers,
unless rollouts succeed, which is answer enough.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.trees import children
from nemo_gym.errors import GymError, ServerRefNotFoundError
from nemo_gym.http.addresses import server_names
from nemo_gym.http.server_client import ServerClient
from nemo_gym.schemas.server_config import is_server_ref
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_TICK_S = 30.0
_TICKS = 8
_TOLD_AFTER = 0.25
"""The part of the time after which people are told: a server under full load may be slow to answer."""
_WORDS = {"timeout": "it accepts connections and says nothing", "connection_error": "connections are refused"}


class ServerDownError(GymError):
    """A server that was needed has not answered for too long."""


class ServerWatch:
    """Asks the servers of a run whether they answer."""

    def __init__(self, client: ServerClient, max_silence_s: float | None) -> None:
        """`max_silence_s` is how long a server may be silent before it counts as down; None: for ever."""
        self._client = client
        self._max_silence_s = max_silence_s
        self._needed: dict[str, frozenset[str]] = {}
        self._silent_since_s: dict[str, float] = {}
        self._why: dict[str, str] = {}
        self._told: set[str] = set()

    def sign_of_life(self) -> None:
        """A rollout succeeded: whatever was silent before, the run gets on."""
        self._silent_since_s.clear()

    async def until_down(self, agents: Callable[[], Collection[str]]) -> str:
        """Wait until each of the agents that are waited for needs a server that is down; says which, and what to do.

        An agent that has all its servers may be busy with long rollouts, whatever became of those of others.
        """
        if self._max_silence_s is None:
            await asyncio.get_running_loop().create_future()
        assert self._max_silence_s is not None
        tick_s = min(self._max_silence_s / _TICKS, _LONGEST_TICK_S)
        while True:
            await asyncio.sleep(tick_s)
            waited_for = set(agents())
            needed = {agent: self._needed_by(agent) for agent in waited_for}
            await self._ask(set().union(*needed.values()), tick_s)
            down = self._down()
            if waited_for and all(servers & down for servers in needed.values()):
                return self._message(sorted(down & set().union(*needed.values())))

    async def guard(self, agent: str, work: Coroutine[Any, Any, T]) -> T:
        """What `work`, which waits for `agent`, returns.

        Raises:
            ServerDownError: a server that the agent needs is down.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self.until_down(lambda: (agent,)))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ServerDownError(watching.result())
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _ask(self, servers: Collection[str], tick_s: float) -> None:
        assert self._max_silence_s is not None
        answers = await asyncio.gather(*(asyncio.to_thread(self._status_of, name, tick_s) for name in servers))
        now_s = asyncio.get_running_loop().time()
        for name, status in zip(servers, answers, strict=True):
            if status == "success":
                self._silent_since_s.pop(name, None)
                self._told.discard(name)
                continue
            self._why[name] = _WORDS.get(status, status)
            since_s = self._silent_since_s.setdefault(name, now_s - tick_s)
            if name not in self._told and now_s - since_s >= self._max_silence_s * _TOLD_AFTER:
                self._told.add(name)
                logger.warning(
                    "Server %r does not answer: %s. The run is stopped if that lasts max_silence_s=%g",
                    shown(name),
                    self._why[name],
                    self._max_silence_s,
                )

    def _status_of(self, name: str, timeout_s: float) -> str:
        try:
            return self._client.poll_for_status(name, timeout_s=max(0.5, min(timeout_s, 5.0)))
        except ServerRefNotFoundError:  # it has no address, so nobody can ask it
            return "success"

    def _down(self) -> set[str]:
        assert self._max_silence_s is not None
        now_s = asyncio.get_running_loop().time()
        return {name for name, since_s in self._silent_since_s.items() if now_s - since_s >= self._max_silence_s}

    def _message(self, down: list[str]) -> str:
        named = "; ".join(f"server {shown(name)!r} ({self._why[name]})" for name in down)
        return (
            f"{named} has not answered for max_silence_s={self._max_silence_s:g} and nothing was finished meanwhile. "
            "`ng_status` says what runs; start the servers again, then go on"
        )

    def _needed_by(self, agent: str) -> frozenset[str]:
        if agent not in self._needed:
            self._needed[agent] = frozenset(servers_needed_by(self._client.global_config_dict, agent))
        return self._needed[agent]


def servers_needed_by(config: DictConfig, agent: str) -> set[str]:
    """An agent and every server that it refers to, directly or through others."""
    known = set(server_names(config))
    tree: Any = OmegaConf.to_container(config, resolve=False)
    needed: set[str] = set()
    to_visit = [agent] if agent in known else []
    while to_visit:
        name = to_visit.pop()
        needed.add(name)
        to_visit += [found for found in _referred_to(tree[name]) if found in known and found not in needed]
    return needed


def _referred_to(node: Any) -> Iterator[str]:
    if (ref := is_server_ref(node)) is not None:
        yield ref.name
    for _, child in children(node):
        yield from _referred_to(child)
