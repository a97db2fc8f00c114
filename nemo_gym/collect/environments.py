"""Asking environments for verdicts directly: which one scores the rollouts of an agent, and whether it can without one.

The agents and models that made the rollouts need not run. Which environment scores is what the agent's block in the
configuration says; where the run that answers has no such agent, it is the only environment there is.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import ClientTimeout
from omegaconf import OmegaConf

from nemo_gym.collect.dispatch import Post
from nemo_gym.collect.failures import TimesOfBefore
from nemo_gym.collect.stored import Stored, StoredResponses
from nemo_gym.config.instances import server_refs
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.http.addresses import server_names
from nemo_gym.http.client import ServerClient
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.keys import (
    AGENTS_TYPE,
    ATTEMPT_INDEX_KEY_NAME,
    END_SESSION_HEADER,
    RESOURCES_TYPE,
    RESPONSE_KEY_NAME,
    TIMING_KEY_NAME,
)
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import KeySet, Row, agent_name_of, key_or_none
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

VERIFY_PATH = "/verify"
_ASK_TIMEOUT = ClientTimeout(total=60.0)
_SAYS_IT_IS_OVER = {END_SESSION_HEADER: "true"}


class Mode(StrEnum):
    """Whether an environment can score without the session of the rollout, as `ReverifyMode` has it."""

    STATELESS = "stateless"
    SEEDED = "seeded"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"

    @property
    def is_safe(self) -> bool:
        """Whether its author says that the verdict will be the right one."""
        return self in (Mode.STATELESS, Mode.SEEDED)


@dataclass(frozen=True)
class Environment:
    """One resources server, and what it says about scoring again."""

    server: str
    mode: Mode
    reason: str = ""

    def __str__(self) -> str:
        if self.mode is Mode.UNSUPPORTED:
            why = self.reason or "its verdict depends on what happened in the session of the rollout, which is gone"
            return f"{shown(self.server)} cannot score without the live session: {shown(why, 500)}"
        return f"{shown(self.server)} does not say whether it can score without the live session"


def environments_of_agents(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The resources server of each agent among the servers of a configuration, where it is clear which one that is."""
    found = {}
    for name in names:
        if AGENTS_TYPE in tree[name]:
            refs = [(place, ref) for place, ref in server_refs(tree[name]) if ref.type == RESOURCES_TYPE]
            own = [ref.name for place, ref in refs if place.keys and place.keys[-1] == "resources_server"]
            named = set(own or [ref.name for _, ref in refs])
            if len(named) == 1:
                found[name] = named.pop()
    return found


class Environments:
    """The resources servers of a run."""

    def __init__(self, client: ServerClient, of_agents: Mapping[str, str] | None = None) -> None:
        """`of_agents` names the environments of agents that the run itself may not have."""
        self._client = client
        tree: Any = OmegaConf.to_container(client.global_config_dict, resolve=False)
        names = set(server_names(client.global_config_dict))
        self._servers = sorted(name for name in names if RESOURCES_TYPE in tree[name])
        self._of_agents = {**(of_agents or {}), **environments_of_agents(tree, names)}
        self._known: dict[str, Environment] = {}

    def server_of(self, agent: str) -> str:
        """The server that scores the rollouts of an agent.

        Raises:
            ConfigError: the run does not say which one that is.
        """
        named = self._of_agents.get(agent)
        if named is not None:
            return named
        if len(self._servers) == 1:
            return self._servers[0]
        head = self._client.head_server_config
        raise ConfigError(
            f"it cannot be told which environment scores the rollouts of {agent!r}: the run that answers has no such "
            f"agent with one environment, and {len(self._servers)} resources servers "
            f"({listed(self._servers) or 'none'}; head server {head.host}:{head.port}). Start the servers with the "
            "block of that agent among the configuration, or only the environment that is meant"
        )

    async def ask_modes(self, agents: Iterable[str]) -> list[Environment]:
        """What the environments of these agents say about themselves, each asked once."""
        for server in sorted({self.server_of(agent) for agent in agents} - set(self._known)):
            said = await self._ask(server, "/reverify_mode")
            mode = Mode(str(said)) if said in list(Mode) else Mode.UNKNOWN
            told = await self._ask(server, "/reverify_reason") if mode is Mode.UNSUPPORTED else ""
            self._known[server] = Environment(server, mode, told if isinstance(told, str) else "")
        return [self._known[server] for server in sorted({self.server_of(agent) for agent in agents})]

    async def verdict(self, row: Row, stored: Stored) -> dict[str, Any]:
        """What the environment says now about a stored response, with the times of the rollout.

        An environment that is not known to need no session gets one, seeded with the row.
        """
        agent = agent_name_of(row) or ""
        server = self.server_of(agent)
        sent = {key: value for key, value in row.items() if key != ATTEMPT_INDEX_KEY_NAME}
        cookies: Any = None
        known = self._known.get(server)
        if known is None or known.mode is not Mode.STATELESS:
            seeded = await self._client.post(server_name=server, url_path="/seed_session", json=sent)
            await raise_for_status(seeded)
            cookies = {name: getattr(value, "value", value) for name, value in seeded.cookies.items()}
        answer = await self._client.post(
            server_name=server,
            url_path=VERIFY_PATH,
            json={**sent, RESPONSE_KEY_NAME: stored.response},
            cookies=cookies,
            headers=_SAYS_IT_IS_OVER,
        )
        await raise_for_status(answer)
        result = await get_response_json(answer)
        if not isinstance(result, dict):
            return result  # type: ignore[no-any-return]  # the dispatcher says what is wrong with it
        result[TIMING_KEY_NAME] = TimesOfBefore(stored.times())
        return result

    async def _ask(self, server: str, path: str) -> object:
        answer = await self._client.get(server_name=server, url_path=path, timeout=_ASK_TIMEOUT)
        if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return None  # a server written before there was such a question
        await raise_for_status(answer)
        told: object = await get_response_json(answer)
        return told


@asynccontextmanager
async def scoring_first(paths: RolloutPaths, client: ServerClient, post: Post) -> AsyncIterator[Post]:
    """A way to send the rows of a resumed run: what earlier ones only failed to score goes straight to be scored.

    Once each; if that fails, too, or the environment needs the live session, the agent is asked as ever.
    """
    with StoredResponses(paths, only_failures=True) as stored:
        if not len(stored.unscored):
            yield post
            return
        environments = Environments(client)
        usable = await _usable(environments, stored.agents())
        tried = KeySet()

        async def score_or_send(row: Row) -> Any:
            key = key_or_none(row)
            if agent_name_of(row) not in usable or key is None or key not in stored.unscored or not tried.add(key):
                return await post(row)
            if len(tried) == 1:
                logger.info("What earlier runs failed to score is scored without asking the agent again")
            found = stored.find(row)
            assert found is not None
            return await environments.verdict(row, found)

        yield score_or_send


async def _usable(environments: Environments, agents: Iterable[str]) -> set[str]:
    """The agents whose environment can score without a session; one that cannot say so is not asked to."""
    usable = set()
    for agent in agents:
        try:
            found = await environments.ask_modes([agent])
        except (ConfigError, GymError, OSError, aiohttp.ClientError) as error:
            logger.info("Rollouts of %s are made again rather than scored: %s", shown(agent), shown(error, 500))
            continue
        if all(environment.mode.is_safe for environment in found):
            usable.add(agent)
    return usable


def refusal(environments: Iterable[Environment]) -> str:
    """Why environments are not asked, and what to do about it; empty when all of them can be."""
    unsafe = [environment for environment in environments if not environment.mode.is_safe]
    if not unsafe:
        return ""
    return (
        f"{'; '.join(map(str, unsafe))} (reverify_mode=UNSUPPORTED or UNKNOWN). Authors say it with REVERIFY_MODE = "
        "ReverifyMode.STATELESS, or SEEDED if /seed_session is enough; +force=true scores all the same, into a file "
        "whose name begins with unsafe_"
    )
