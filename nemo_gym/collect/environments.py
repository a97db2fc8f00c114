"""Asking environments for verdicts directly: which one scores the rollouts of an agent, and whether it can without one.

The agents and models that made the rollouts need not run. Which environment scores is what the agent's block in the
configuration says; where the run that answers has no such agent, it is the only environment there is.

Responses that are on disk already are found again by their rollout: those of finished ones, and of those that failed
only when they were to be scored. Nothing of a response is kept in memory: a rollout costs some 70 bytes here, and is
read again when it is its turn.
"""

import logging
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import ClientTimeout
from omegaconf import DictConfig, OmegaConf

from nemo_gym.collect.dispatch import Post
from nemo_gym.collect.failures import TimesOfBefore, failure_of, fault_in
from nemo_gym.config.instances import server_refs
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.http.addresses import server_names
from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import ServerCallError
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.run_answers import whole_response_in
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    AGENTS_TYPE,
    ATTEMPT_INDEX_KEY_NAME,
    END_SESSION_HEADER,
    RESOURCES_TYPE,
    RESPONSE_KEY_NAME,
    TIMING_KEY_NAME,
    USAGE_KEY_NAME,
)
from nemo_gym.runs.facts import RolloutFilter, times_of
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import RecordIndex, RecordReader
from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.options.reverify import UNSAFE, RolloutReverificationConfig
from nemo_gym.runs.read import plain_records, records
from nemo_gym.runs.record import (
    FAILURE_MESSAGE_KEY,
    NG_FAILURE_CLASS_KEY,
    PREVIOUS_VERDICT_KEY,
    STARTED_AT_KEY,
    Failure,
    FailureClass,
    KeySet,
    Result,
    RolloutKey,
    Row,
    agent_name_of,
    failure_record,
    has_usable_reward,
    key_or_none,
    plain_key,
    unscored_response,
)
from nemo_gym.runs.rows import Repeats
from nemo_gym.runs.spending import COUNTED_BEFORE, used_by
from nemo_gym.terminal import shown

_ROLLOUT_BITS = 24
_NOT_OF_A_VERDICT = frozenset({RESPONSE_KEY_NAME, TIMING_KEY_NAME, AGENT_REF_KEY_NAME, PREVIOUS_VERDICT_KEY})
_OURS = ("_ng", "ng_")
_OF_FAILURES = (NG_FAILURE_CLASS_KEY, FAILURE_MESSAGE_KEY)
logger = logging.getLogger(__name__)

VERIFY_PATH = "/verify"
_ASK_TIMEOUT = ClientTimeout(total=60.0)
_SAYS_IT_IS_OVER = {END_SESSION_HEADER: "true"}


class Stored(NamedTuple):
    """One record with the response in it."""

    record: Result
    response: dict[str, Any]
    is_failure: bool

    def verdict(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the record says beside its row: the reward and what the environment had to say about it."""
        if self.is_failure:
            return {key: self.record[key] for key in _OF_FAILURES if key in self.record}
        told = self.record.items()
        return {key: value for key, value in told if not (key in row or key in _NOT_OF_A_VERDICT or key[:3] in _OURS)}

    def added(self) -> dict[str, Any]:
        """What agent and collector added to the verdict, and no environment repeats: observations, why it stopped."""
        return {key: value for key, value in self.record.items() if key.startswith("ng_")}

    def times(self) -> dict[str, Any]:
        """When the rollout was made, and how long that took; empty if nobody knows."""
        timing, took = self.record.get(TIMING_KEY_NAME), times_of(self.record)[0]
        if isinstance(timing, dict) and timing:
            return timing
        if not self.is_failure or took is None:
            return {}
        return {"started_at": self.record[STARTED_AT_KEY], "duration_s": round(took, 6)}


class StoredResponses(AbstractContextManager["StoredResponses"]):
    """The rollouts of one run that have a response: `with StoredResponses(paths) as stored:`."""

    def __init__(
        self,
        paths: RolloutPaths,
        *,
        finished: bool = True,
        classes: frozenset[str] | None = None,
        only_failures: bool = False,
    ) -> None:
        """Read the rollouts, if `finished`, and the failures, of these classes only where any are named.

        With `only_failures` the rollouts are not even looked at: whether there is a verdict by now is not known then.

        Raises:
            ConfigError: a line of the rollouts is no record.
        """
        self._index = RecordIndex([paths.rollouts, paths.failures])
        self._packed, self._numbers = array("q"), array("q")
        self._odd: dict[tuple[Any, Any], int] = {}
        self.done = KeySet()
        """The rollouts that have a verdict."""
        self.without_response = 0
        """Those among them that have no response beside it."""
        for key, line, record in () if only_failures else plain_records(paths.rollouts, "raise"):
            assert key is not None
            if self.done.add(key) and finished:
                if isinstance(record.get(RESPONSE_KEY_NAME), dict):
                    self._add(key, line, record, 0)
                else:
                    self.without_response += 1
        self.unscored = KeySet()
        """The rollouts that failed only when they were to be scored."""
        for key, line, record in plain_records(paths.failures, "skip"):
            assert key is not None
            is_wanted = classes is None or record.get(NG_FAILURE_CLASS_KEY) in classes
            if is_wanted and key not in self.done and unscored_response(record) is not None:
                self.unscored.add(key)
                self._add(key, line, record, 1)
        order = np.argsort(np.frombuffer(self._packed, np.int64), kind="stable") if self._packed else np.empty(0, int)
        self._sorted = np.frombuffer(self._packed, np.int64)[order] if self._packed else np.empty(0, np.int64)
        self._number_at = np.frombuffer(self._numbers, np.int64)[order] if self._packed else np.empty(0, np.int64)
        self._reader = RecordReader(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return self._number_of(row) is not None

    def agents(self) -> list[str]:
        """The names of the agents that made the rollouts."""
        return [agent for agent in self._index.agents if agent is not None]

    def find(self, row: Mapping[str, Any]) -> Stored | None:
        """What there is of the rollout of a row; of several failed attempts the last one."""
        number = self._number_of(row)
        if number is None:
            return None
        record = self._reader.record(number)
        is_failure = self._index.files[number] == 1
        response = unscored_response(record) if is_failure else record.get(RESPONSE_KEY_NAME)
        return Stored(record, response or {}, is_failure)

    def _number_of(self, row: Mapping[str, Any]) -> int | None:
        key = plain_key(row)
        packed = None if key is None else _packed(key)
        if packed is None:
            return None if key is None else self._odd.get(key)
        place = int(np.searchsorted(self._sorted, packed, side="right")) - 1
        return int(self._number_at[place]) if place >= 0 and self._sorted[place] == packed else None

    def _add(self, key: tuple[Any, Any], line: Any, record: Result, file: int) -> None:
        number = len(self._index)
        self._index.add(key, line, record, file)
        packed = _packed(key)
        if packed is None:
            self._odd[key] = number
        else:
            self._packed.append(packed)
            self._numbers.append(number)


def _packed(key: tuple[Any, Any]) -> int | None:
    task, rollout = key
    fits = type(task) is int and type(rollout) is int and 0 <= task < 2**38 and 0 <= rollout < 2**_ROLLOUT_BITS
    return task << _ROLLOUT_BITS | rollout if fits else None


class ChosenRows:
    """The rows of what a reverification is about, in file order; each iteration reads the files again."""

    def __init__(self, config: RolloutReverificationConfig, stored: StoredResponses) -> None:
        """What `where` and `limit` leave of them is to be scored; verdicts that are kept are in the output, too."""
        self._config, self.stored = config, stored
        self.to_score = KeySet()
        self.repeats: dict[str, int] = {}
        """The most rollouts of a task, by agent."""

    def choose(self) -> None:
        """Find out which rollouts are to be scored.

        Raises:
            ConfigError: a rollout that is to be scored has no row, or no row has what `where` asks about.
        """
        config, stored = self._config, self.stored
        where = None if config.where is None else RolloutFilter(config.where)
        matched = matched_failures = 0
        for key, _, row in records(config.materialized_inputs, "raise"):
            matched += key in stored.done
            matched_failures += key in stored.unscored
            if row not in stored:
                continue
            found = stored.find(row) if where is not None else None
            is_wanted = where is None or (found is not None and where.holds(found.record, row))
            if is_wanted and (config.limit is None or len(self.to_score) < config.limit):
                self.to_score.add(key)
        if where is not None:
            where.require_met()
        failures = RolloutPaths(config.rollouts).failures
        for count, of_file, path in (
            (matched, stored.done, config.rollouts),
            (matched_failures, stored.unscored, failures),
        ):
            if count < len(of_file):
                raise ConfigError(
                    f"{len(of_file) - count} of the {len(of_file)} rollouts of {path} have no row in "
                    f"{config.materialized_inputs}: name the rows of this run with +materialized_inputs_jsonl_fpath"
                )

    def __iter__(self) -> Iterator[Repeats]:
        """What will be in the output, as lines of its materialized file."""
        keeps = self._config.keeps_verdicts
        for key, line, row in records(self._config.materialized_inputs, "raise"):
            if key in self.to_score or (keeps and key in self.stored.done):
                agent = agent_name_of(row) or ""
                self.repeats[agent] = max(self.repeats.get(agent, 0), key.rollout_index + 1)
                yield Repeats(agent, key.rollout_index, [line.content + b"\n"])

    def agents(self) -> set[str]:
        """Whose rollouts are to be scored."""
        rows = records(self._config.materialized_inputs, "raise")
        return {agent_name_of(row) or "" for key, _, row in rows if key in self.to_score}


def classes_wanted(config: RolloutReverificationConfig) -> frozenset[str] | None:
    """The failures that are scored; None: all that have their response."""
    return frozenset({FailureClass.JUDGE_FAILED.value}) if config.judge_failed_only else None


def lines_to_keep(path: Path, present: KeySet) -> Iterator[bytes]:
    """The lines of finished rollouts as they are, once each, but for those that are `present` already."""
    for key, line, _ in plain_records(path, "raise"):
        if key is not None and present.add(key):
            yield line[3] + b"\n"


def scored_again(row: Row, stored: Stored, verdict: Result) -> Result:
    """A verdict as a record: what the agent had added stays, and what was said before stands beside it."""
    for key, value in stored.added().items():
        verdict.setdefault(key, value)
    verdict[PREVIOUS_VERDICT_KEY] = stored.verdict(row)
    return verdict


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


class EnvironmentNames:
    """Which resources server of a configuration scores the rollouts of which agent."""

    def __init__(self, config: DictConfig, of_agents: Mapping[str, str] | None = None) -> None:
        """`of_agents` names the environments of agents that the configuration itself may not have."""
        tree: Any = OmegaConf.to_container(config, resolve=False)
        self._tree = tree
        names = set(server_names(config))
        self.servers = sorted(name for name in names if RESOURCES_TYPE in tree[name])
        self._agents = {name for name in names if AGENTS_TYPE in tree[name]}
        self._of_agents = {**(of_agents or {}), **environments_of_agents(tree, names)}

    def find(self, agent: str) -> str | None:
        """Return the server that scores the rollouts of an agent; None where that cannot be told."""
        if agent in self._of_agents:
            return self._of_agents[agent]
        return self.servers[0] if len(self.servers) == 1 else None

    def made_by(self, agent: str) -> str | None:
        """Return the implementation of the environment in which an agent of this configuration made its rollouts."""
        if agent in self._agents and agent not in self._of_agents:
            return None
        return self.implementation_of(self.find(agent))

    def implementation_of(self, server: str | None) -> str | None:
        """Return what the folder of a resources server is called, such as `mcqa`."""
        block = self._tree.get(server) or {}
        return next(map(str, block.get(RESOURCES_TYPE, ())), None)


def foreign_rollouts(config: RolloutReverificationConfig, agents: Iterable[str], names: EnvironmentNames) -> str:
    """Return in words that stored rollouts were made in another environment than would score them; empty if not.

    The manifest beside the rollouts says in which. Nothing is known of rollouts without one.
    """
    manifest = read_manifest(RolloutPaths(config.rollouts).manifest)
    if manifest is None or not manifest.config:
        return ""
    before = EnvironmentNames(OmegaConf.create(manifest.config))
    for agent in sorted(agents):
        was, now = before.made_by(agent), names.implementation_of(names.find(agent))
        if was is not None and now is not None and was != now:
            return (
                f"the rollouts of {shown(agent)} in {config.rollouts} were made in the environment {shown(was)}, and "
                f"{shown(now)} would score them: configure {shown(was)}"
            )
    return ""


class Environments:
    """The resources servers of a run, which are asked for verdicts."""

    def __init__(self, client: ServerClient, of_agents: Mapping[str, str] | None = None) -> None:
        """`of_agents` names the environments of agents that the run itself may not have."""
        self._client = client
        self.names = EnvironmentNames(client.global_config_dict, of_agents)
        self._known: dict[str, Environment] = {}

    def server_of(self, agent: str) -> str:
        """The server that scores the rollouts of an agent.

        Raises:
            ConfigError: the run does not say which one that is.
        """
        found = self.names.find(agent)
        if found is not None:
            return found
        head, servers = self._client.head_server_config, self.names.servers
        raise ConfigError(
            f"it cannot be told which environment scores the rollouts of {agent!r}: the run that answers has no such "
            f"agent with one environment, and {len(servers)} resources servers "
            f"({listed(servers) or 'none'}; head server {head.host}:{head.port}). Start the servers with the "
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
        if USAGE_KEY_NAME in stored.record:
            result[USAGE_KEY_NAME] = stored.record[USAGE_KEY_NAME]
        return result

    async def _ask(self, server: str, path: str) -> object:
        answer = await self._client.get(server_name=server, url_path=path, timeout=_ASK_TIMEOUT)
        if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return None  # a server written before there was such a question
        await raise_for_status(answer)
        told: object = await get_response_json(answer)
        return told


@asynccontextmanager
async def scoring_first(
    paths: RolloutPaths, client: ServerClient, post: Post, *, is_resumed: bool
) -> AsyncIterator[Post]:
    """Yield a way to send rows that has a response scored if it was made before and only its verdict is missing.

    The attempt before left it, or an earlier run in its failures. What is of an earlier run is scored once; if that
    fails, too, or the environment needs the live session, the agent is asked as ever.
    """
    if not is_resumed:
        yield _ScoringFirst(client, post, None).post
        return
    with StoredResponses(paths, only_failures=True) as stored:
        sending = _ScoringFirst(client, post, stored)
        for agent in stored.agents() if len(stored.unscored) else ():
            await sending.is_usable(agent)
        yield sending.post


class _ScoringFirst:
    """Sends rows to their agents, or the responses that were made for them to be scored."""

    def __init__(self, client: ServerClient, post: Post, stored: StoredResponses | None) -> None:
        self._client, self._post, self._stored = client, post, stored
        self._tried = KeySet()
        """The rollouts of earlier runs that were sent to be scored."""
        self._unscored: dict[RolloutKey, Stored] = {}
        """Those of this run that are to be scored when they are tried again."""
        self._usable: dict[str, bool] = {}
        """By agent whether its environment can score without the live session."""

    @cached_property
    def _environments(self) -> Environments:
        return Environments(self._client)

    async def post(self, row: Row) -> Any:
        """The answer of the agent or, if it has a response of before, the verdict on that."""
        key = key_or_none(row)
        if key is None:
            return await self._post(row)
        found = self._unscored.get(key) or self._stored_for(row, key)
        if found is not None:
            verdict = await self._environments.verdict(row, found)
            if isinstance(verdict, dict) and has_usable_reward(verdict):
                self._unscored.pop(key, None)
                if used_by(found.record) is not None:
                    verdict[USAGE_KEY_NAME] = {**verdict.get(USAGE_KEY_NAME, {}), COUNTED_BEFORE: True}
            return verdict
        began, agent = datetime.now(UTC), agent_name_of(row) or ""
        try:
            result = await self._post(row)
        except Exception as error:
            await self._keep(row, key, whole_response_in(error), failure_of(error, agent), began)
            raise
        if isinstance(result, dict) and not has_usable_reward(result) and (fault := fault_in(result, agent)):
            await self._keep(row, key, result.get(RESPONSE_KEY_NAME), fault, began)
        return result

    async def _keep(self, row: Row, key: RolloutKey, response: object, failure: Failure, began: datetime) -> None:
        """Have a response scored when its rollout is tried again, if only the verdict on it is missing."""
        if (
            isinstance(response, dict)
            and not failure.is_final_in_run
            and await self.is_usable(agent_name_of(row) or "")
        ):
            record = failure_record(row, failure, began, datetime.now(UTC))
            self._unscored[key] = Stored(record, response, is_failure=True)

    async def is_usable(self, agent: str) -> bool:
        """Whether the environment of an agent can score without a session; one that cannot say so is not asked to."""
        if agent not in self._usable:
            try:
                found = await self._environments.ask_modes([agent])
            except (ConfigError, GymError, OSError, aiohttp.ClientError) as error:
                logger.info("Rollouts of %s are made again rather than scored: %s", shown(agent), shown(error, 500))
                if isinstance(error, ServerCallError):  # it may be back for the next rollout
                    return False
                found = []
            self._usable[agent] = bool(found) and all(environment.mode.is_safe for environment in found)
        return self._usable[agent]

    def _stored_for(self, row: Row, key: RolloutKey) -> Stored | None:
        stored = self._stored
        if stored is None or key not in stored.unscored or not self._usable.get(agent_name_of(row) or ""):
            return None
        if not self._tried.add(key):
            return None
        if len(self._tried) == 1:
            logger.info("What earlier runs failed to score is scored without asking the agent again")
        return stored.find(row)


def refusal(config: RolloutReverificationConfig, environments: Iterable[Environment], foreign: str) -> str:
    """Return why stored rollouts are not scored, and what to do about it; empty when they can be.

    Where only a judge had failed, an environment that says nothing of itself is asked all the same.
    """
    force = f"+force=true scores all the same, into a file whose name begins with {UNSAFE}"
    if foreign:
        return f"{foreign}; {force}"
    unsafe = [environment for environment in environments if not environment.mode.is_safe]
    if config.judge_failed_only:
        unsafe = [environment for environment in unsafe if environment.mode is not Mode.UNKNOWN]
    if not unsafe:
        return ""
    return (
        f"{'; '.join(map(str, unsafe))} (reverify_mode=UNSUPPORTED or UNKNOWN). Authors say it with REVERIFY_MODE = "
        f"ReverifyMode.STATELESS, or SEEDED if /seed_session is enough; {force}"
    )
