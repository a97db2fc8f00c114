"""A run whose servers are gone says so at once, and ends by itself.

A server that is dead refuses connections, one that hangs or is busy accepts them and says nothing, and a model
server may be well while nobody listens at its endpoint. In each case rollouts fail or time out one after the other,
each after its own long wait, and a run of thousands of rows would take days to get through them. So whoever waits
for servers asks each of them every other second how it is. Refused connections count against `max_refused_s`, any
silence against `max_silence_s`, both only while the launcher is not starting that server; an endpoint that has
never answered against `model_endpoint_readiness_timeout_seconds`. A rollout that succeeds sets all these clocks
back, and an agent that has just finished one is not called silent, however long its answer to the question takes.

The head server is among those that are asked, and says whether the list of servers has changed: so it is here that a
running collector learns of hosts that were added, or started again at another address.
"""

import asyncio
import contextlib
import http.client
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

import orjson
from omegaconf import DictConfig, OmegaConf

from nemo_gym.collect.run_servers import edition_in, follow_replicas
from nemo_gym.collect.server_health import (
    READINESS,
    Condition,
    EndpointState,
    Limits,
    Look,
    RetryLedger,
    Trouble,
    endpoints_in,
    look_at,
    processes_in,
    starting_in,
)
from nemo_gym.config.instances import server_refs
from nemo_gym.errors import GymError, ServerRefNotFoundError
from nemo_gym.http.addresses import base_url, fetch, server_names
from nemo_gym.http.client import ServerClient
from nemo_gym.http.run_answers import IN_FLIGHT_PATH
from nemo_gym.http.settings import DEFAULT_READINESS_TIMEOUT_S, GlobalAIOHTTPAsyncClientConfig, settings_of_process
from nemo_gym.keys import HEAD_SERVER_KEY_NAME, MODEL_ENDPOINTS_PATH, MODELS_TYPE, SERVER_STATES_PATH
from nemo_gym.runs.options import DEFAULT_MAX_REFUSED_S
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_TICK_S = 1.5
_TICKS = 8
_ANSWERS_WITHIN_S = 2.5
_BUSY_FROM = 0.05
"""The part of a core that a process at work uses at least, however busy the machine; one that hangs uses none."""
_ASKED_AT_ONCE = 32


class ServerDownError(GymError):
    """A server that was needed has not answered for too long."""


def readiness_s(config: DictConfig) -> float | None:
    """How long an endpoint may take to answer for the first time: as this command says, else the servers' config."""
    own_s = settings_of_process().model_endpoint_readiness_timeout_seconds
    if own_s != DEFAULT_READINESS_TIMEOUT_S:
        return own_s or None
    return GlobalAIOHTTPAsyncClientConfig.from_config(config).model_endpoint_readiness_timeout_seconds or None


def servers_needed_by(config: DictConfig, agent: str) -> set[str]:
    """An agent and every server that it refers to, directly or through others."""
    known = set(server_names(config))
    tree: Any = OmegaConf.to_container(config, resolve=False)
    needed: set[str] = set()
    to_visit = [agent] if agent in known else []
    while to_visit:
        name = to_visit.pop()
        needed.add(name)
        to_visit += [ref.name for _, ref in server_refs(tree[name]) if ref.name in known and ref.name not in needed]
    return needed


class ServerWatch:
    """Asks the servers of a run how they are."""

    def __init__(
        self,
        client: ServerClient,
        max_silence_s: float | None,
        max_refused_s: float | None = DEFAULT_MAX_REFUSED_S,
        *,
        asked_for: Callable[[str], str] = lambda agent: agent,
    ) -> None:
        """How long a server may be silent, and refuse connections, before it counts as down; None: for ever.

        `asked_for` names the server that is asked in place of an agent, where that is another.
        """
        self._asked_for = asked_for
        self._client = client
        self._limits = limits = Limits(max_silence_s, max_refused_s, readiness_s(client.global_config_dict))
        self._tick_s = min(_LONGEST_TICK_S, limits.shortest_s / _TICKS)
        self._patience_s = max(0.5, min(_ANSWERS_WITHIN_S, 2 * self._tick_s))
        self._longest_gap_s = self._tick_s + 2 * self._patience_s
        self._models = _model_servers(client.global_config_dict)
        self._needed: dict[str, frozenset[str]] = {}
        self._troubles: dict[str, Trouble] = {}
        self._endpoints: dict[str, dict[str, EndpointState]] = {}
        self._cpu: dict[str, tuple[float, float]] = {}
        self._worked: set[tuple[str, str]] = set()
        self._looked_s: dict[str, float] = {}
        self.retries = RetryLedger()
        self._began_s = time.monotonic()
        self._succeeded_s = -math.inf
        self._finished_s: dict[str, float] = {}
        self._ends_at_s: float | None = None
        self._edition: int | None = None

    def sign_of_life(self, agent: str) -> None:
        """A rollout of `agent` succeeded: whatever was silent before, the run gets on."""
        self._succeeded_s = self._finished_s[agent] = time.monotonic()
        for trouble in self._troubles.values():
            trouble.refused_s = trouble.silent_s = 0.0

    def notice(self) -> str:
        """What is wrong right now and when that ends the run, in a few words for a line that changes; or nothing."""
        now_s = time.monotonic()
        looked_at = [name for name, looked_s in self._looked_s.items() if now_s - looked_s < self._longest_gap_s]
        names = sorted(looked_at, key=lambda name: name == HEAD_SERVER_KEY_NAME)
        said = [self._troubles[name].notice(self._in_short(name), now_s) for name in names if name in self._troubles]
        said += [state.notice(now_s) for name in names for state in self._endpoints.get(name, {}).values()]
        said = [words for words in said if words]
        if not said:
            return ""
        words = said[0] if len(said) == 1 else f"{said[0]}, and {len(said) - 1} more like it"
        if self._ends_at_s is None:
            return words
        return f"{words}; the run ends in {max(0.0, self._ends_at_s - now_s):.0f} s"

    async def until_down(self, agents: Callable[[], Collection[str]], *, with_endpoints: bool = True) -> str:
        """Wait until each of the agents that are waited for needs a server that is down; says which, and what to do.

        An agent that has all its servers may be busy with long rollouts, whatever became of those of others. A model
        server whose endpoint is not there counts as down, too, `with_endpoints`.
        """
        pool = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="server-watch")
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                needed = [self._needed_by(agent) for agent in set(agents())]
                servers = sorted(set().union(*needed))
                await self._look(pool, servers, with_endpoints)
                left_s = max((min(map(self._left_s, names), default=math.inf) for names in needed), default=math.inf)
                self._ends_at_s = None if left_s == math.inf else time.monotonic() + left_s
                if left_s <= 0:
                    return self._message([name for name in servers if self._left_s(name) <= 0])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def guard(self, agent: str, work: Coroutine[Any, Any, T]) -> T:
        """What `work`, which waits for `agent` and its servers but for no endpoint, returns.

        Raises:
            ServerDownError: a server that the agent needs is down.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self.until_down(lambda: (agent,), with_endpoints=False))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ServerDownError(watching.result())
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _look(self, pool: ThreadPoolExecutor, servers: list[str], with_endpoints: bool) -> None:
        loop = asyncio.get_running_loop()
        names = [HEAD_SERVER_KEY_NAME, *servers]
        head, *looks = await asyncio.gather(*(loop.run_in_executor(pool, self._look_at, name) for name in names))
        edition = edition_in(head.content)
        if edition is not None and edition != self._edition:
            self._edition = edition
            await loop.run_in_executor(pool, follow_replicas, self._client)
        now_s = time.monotonic()
        starting = starting_in(head.content)
        self._note(HEAD_SERVER_KEY_NAME, head.condition, now_s, is_starting=False)
        for name, look in zip(servers, looks, strict=True):
            condition = look.condition
            if condition is Condition.SILENT:
                condition = self._why_silent(name, head, now_s)
                if self._gets_on(name, condition):
                    condition = Condition.WELL
            self._note(name, condition, now_s, is_starting=name in starting)
            is_known = with_endpoints and condition is Condition.WELL
            self._note_endpoints(name, endpoints_in(look.content, now_s) if is_known else {})
            self._note_retries(name, look)
        self._tell_of_troubles(now_s)

    def _note_retries(self, name: str, look: Look) -> None:
        for port, content in look.told if name in self._models else ():
            self.retries.note(name, port, content, time.monotonic() - self._began_s)

    async def count_retries(self, agents: Iterable[str]) -> None:
        """Ask the model servers of these agents what they rode out: before a run, to leave that out, and at its end."""
        needed: set[str] = set().union(*map(self._needed_by, agents))
        names = sorted(needed & self._models)
        looks = await asyncio.gather(*(asyncio.to_thread(self._look_at, name) for name in names))
        for name, look in zip(names, looks, strict=True):
            self._note_retries(name, look)

    async def rollouts_in_flight(self, agents: Iterable[str]) -> dict[str, Any]:
        """What these agents say of the rollouts that they work on, by the names by which those were asked for.

        Nothing of agents that do not say it, or not at once.
        """
        told: dict[str, Any] = {}
        for each in await asyncio.gather(*(asyncio.to_thread(self._rollouts_of, agent) for agent in agents)):
            told |= each
        return told

    def _rollouts_of(self, agent: str) -> dict[str, Any]:
        told: dict[str, Any] = {}
        by_s = time.monotonic() + 2 * self._patience_s
        with contextlib.suppress(GymError, OSError, http.client.HTTPException, ValueError, RecursionError):
            for address in self._client.addresses_of(agent):
                if time.monotonic() < by_s:
                    status, body = fetch(address, IN_FLIGHT_PATH, self._patience_s, self._client.auth_token)
                    found = orjson.loads(body) if status == HTTPStatus.OK else {}
                    told |= found if isinstance(found, dict) else {}
        return told

    def ridden_out_for(self, agent: str) -> Counter[str]:
        """The tries that failed and were made again by the model servers of an agent, by what was wrong."""
        found: Counter[str] = Counter()
        for name in self._needed_by(agent) & self._models:
            found.update(self.retries.by_server.get(name, {}))
        return found

    def pausing_for(self, agent: str, in_flight: Mapping[str, int], kinds: Collection[str]) -> float:
        """How many calls of an agent pause because of any of `kinds`, as far as it can be told.

        Those of a model server that several agents use are divided among them by what each has `in_flight`.
        """
        found = 0.0
        for name in self._needed_by(agent) & self._models:
            pausing = self.retries.pausing_in(name)
            together = sum(count for other, count in in_flight.items() if name in self._needed_by(other))
            if together:
                found += sum(pausing[kind] for kind in kinds) * in_flight.get(agent, 0) / together
        return found

    def _look_at(self, name: str) -> Look:
        try:
            addresses = self._client.addresses_of(name)
        except ServerRefNotFoundError:  # it has no address, so nobody can ask it
            return Look(Condition.WELL)
        best, well, told = Look(Condition.REFUSES), None, []
        path = self._path(name)
        token = None if path == "/" else self._client.auth_token  # which who took a dead server's port need not see
        for address in addresses:
            look = look_at(address, path, self._patience_s, token)
            if look.condition is Condition.WELL:
                well = well or look
                told.append((address.port, look.content))
                if name not in self._models:
                    break
            elif well is not None:
                break  # the others are asked only for what they rode out
            best = min(best, look, key=lambda each: list(Condition).index(each.condition))
        return best if well is None else well._replace(told=tuple(told))

    def _path(self, name: str) -> str:
        if name != HEAD_SERVER_KEY_NAME:
            return MODEL_ENDPOINTS_PATH if name in self._models else "/"
        is_of_use = any(trouble.is_silent for trouble in self._troubles.values())
        return f"{SERVER_STATES_PATH}?cpu=true" if is_of_use else SERVER_STATES_PATH

    def _gets_on(self, name: str, condition: Condition) -> bool:
        """Whether a server that did not answer in time has finished rollouts since the last look: it is busy, no more.

        An agent has had its hand in each of its rollouts; the servers that it needs count only while they use CPU.
        """
        finished = [
            finished_s
            for agent, finished_s in self._finished_s.items()
            if agent == name or (condition is Condition.BUSY and name in self._needed_by(agent))
        ]
        return max(finished, default=-math.inf) > self._looked_s.get(name, -math.inf)

    def _why_silent(self, name: str, head: Look, now_s: float) -> Condition:
        """As far as the launcher can tell from its process."""
        process = processes_in(head.content).get(name)
        if process is None:
            return Condition.SILENT
        if process.is_stopped:
            return Condition.STOPPED
        before_cpu_s, before_s = self._cpu.get(name, (process.cpu_s, -math.inf))
        self._cpu[name] = (process.cpu_s, now_s)
        is_busy = process.cpu_s - before_cpu_s >= _BUSY_FROM * min(now_s - before_s, 2 * _ANSWERS_WITHIN_S)
        return Condition.BUSY if is_busy else Condition.SILENT

    def _note(self, name: str, condition: Condition, now_s: float, *, is_starting: bool) -> None:
        # What passed while this process itself was stopped, or did not ask, is nobody's silence.
        passed_s = min(now_s - self._looked_s.get(name, now_s - self._tick_s), self._longest_gap_s)
        self._looked_s[name] = now_s
        if condition is Condition.WELL:
            self._cpu.pop(name, None)
            trouble = self._troubles.pop(name, None)
            if trouble is not None and trouble.is_told:
                logger.info("%s answers again, after %.0f s", self._called(name), now_s - trouble.since_s)
            return
        self._troubles.setdefault(name, Trouble(now_s)).note(condition, passed_s, is_starting=is_starting)

    def _tell_of_troubles(self, now_s: float) -> None:
        """One line for all that is in the same state; of a fleet that was killed each server tells the same."""
        new: dict[str, str] = {}
        for name, trouble in self._troubles.items():
            if trouble.is_worth_telling(now_s, self._limits):
                trouble.is_told = True
                new[name] = trouble.told(self._limits, is_head=name == HEAD_SERVER_KEY_NAME)
        for line in self._each_said_once(new):
            logger.warning("%s", line)

    def _each_said_once(self, said: dict[str, str]) -> list[str]:
        """Lines that say of servers what is true of them."""
        names: dict[str, list[str]] = {}
        for name, words in said.items():
            names.setdefault(words, []).append(self._called(name))
        return [f"{', '.join(of)} {'each ' if len(of) > 1 else ''}{words}" for words, of in names.items()]

    def _note_endpoints(self, name: str, states: dict[str, EndpointState]) -> None:
        known = self._endpoints.get(name, {})
        for url, state in states.items():
            if state.has_answered:
                self._worked.add((name, url))
            state.has_answered = (name, url) in self._worked  # a model server that was started again has forgotten it
            state.told = known[url].told if url in known else ""
            told = state.worth_telling(self._limits.readiness_s)
            if told:
                logger.log(logging.WARNING if state.problem else logging.INFO, "%s: %s", self._called(name), told)
        self._endpoints[name] = states

    def _left_s(self, name: str) -> float:
        """How much longer a server may go on like this."""
        trouble = self._troubles.get(name)
        if trouble is not None:
            return trouble.left_s(self._limits)
        endpoints, allowed_s = self._endpoints.get(name), self._limits.readiness_s
        if not endpoints or allowed_s is None:
            return math.inf
        # The last look before the time is over counts: calls give up when it is, and would use up attempts.
        return (
            max(state.left_s(allowed_s, self._succeeded_s, self._looked_s[name]) for state in endpoints.values())
            - self._tick_s
        )

    def _message(self, down: list[str]) -> str:
        gone = {name: self._troubles[name].too_long(self._limits) for name in down if name in self._troubles}
        if gone:
            return (
                f"{'; '.join(self._each_said_once(gone))}, and nothing was finished meanwhile. "
                "`ng_status` says what runs; start the servers again, then go on"
            )
        states = [state for name in down for state in self._endpoints[name].values()]
        waited = "; ".join(dict.fromkeys(state.too_long() for state in states))
        return f"{waited}. It has never answered, and {READINESS}={self._limits.readiness_s:g} is over"

    def _called(self, name: str) -> str:
        what = self._in_short(name) if name == HEAD_SERVER_KEY_NAME else f"server {shown(name)!r}"
        try:
            return f"{what} ({base_url(self._client.addresses_of(name)[0])})"
        except ServerRefNotFoundError:
            return what

    def _in_short(self, name: str) -> str:
        return "the head server" if name == HEAD_SERVER_KEY_NAME else shown(name)

    def _needed_by(self, agent: str) -> frozenset[str]:
        if agent not in self._needed:
            self._needed[agent] = frozenset(servers_needed_by(self._client.global_config_dict, self._asked_for(agent)))
        return self._needed[agent]


def _model_servers(config: DictConfig) -> set[str]:
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return {name for name in server_names(config) if MODELS_TYPE in tree[name]}
