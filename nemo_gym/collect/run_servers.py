"""The servers of the run the collector talks to: which they are, what can be wrong with them, and how to say it.

Model servers try calls again while an endpoint is busy, failing or away, so a run with thousands of 429s may look like
one with a slow model. They count what they ride out, and tell it together with the state of their endpoints; those that
do not tell are taken to have had no trouble.
"""

import http.client
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.http.addresses import Address, fetch
from nemo_gym.http.client import ServerClient
from nemo_gym.keys import AGENTS_TYPE, MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME, MODELS_TYPE
from nemo_gym.runs.manifest import RunFacts
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_MOST_ENDPOINTS = 50
_MOST_KINDS = 20
_WORTH_TELLING_S = 0.05
"""Of waiting for a pace: a call that need not wait waits microseconds."""
_KIND_LENGTH = 30

_TIMEOUT_S = 10.0
_MODEL_NAME_KEYS = ("openai_model", "model")
READINESS = MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME
_LONGEST_TEXT = 300
_SHOWN_AFTER_S = 5.0
_TOLD_AFTER_S = 30.0
"""Of silence: a server under full load may be slow to answer."""


def announce_head(client: ServerClient) -> None:
    """Say which run answers at the head server's address: there may be several on a machine."""
    health = _ask(client, "/health")
    if isinstance(health, dict) and health.get("run_id"):
        head = client.head_server_config
        logger.info("Run: %s at %s:%s, started in %s", health["run_id"], head.host, head.port, health.get("folder"))


def announce_servers(client: ServerClient, owed_by_agent: Mapping[str, int]) -> None:
    """Say which agents, and which models, will be at work."""
    agents = [agent for agent, owed in owed_by_agent.items() if owed]
    counted = agents if len(agents) == 1 else [f"{agent} ({owed_by_agent[agent]})" for agent in agents]
    logger.info("%s: %s", "Agent" if len(agents) == 1 else "Agents", listed(counted))
    models = model_names(client.global_config_dict)
    if models:
        logger.info("%s: %s", "Model" if len(models) == 1 else "Models", listed(models))


def replicas_of(client: ServerClient) -> dict[str, list[Address]]:
    """The addresses of every agent and model server that runs more than once."""
    addresses: dict[str, list[Address]] = {}
    instances = _ask(client, "/server_instances")
    for instance in instances if isinstance(instances, list) else ():
        if instance.get("server_type") in (AGENTS_TYPE, MODELS_TYPE) and instance.get("host") and instance.get("port"):
            name = instance.get("process_name")
            addresses.setdefault(name, []).append(Address(instance["host"], instance["port"]))
    return {name: found for name, found in addresses.items() if len(found) > 1}


def require_agents(client: ServerClient, agents: Iterable[str]) -> None:
    """Refuse rows for agents that the run does not have.

    Raises:
        ConfigError: names the agents that are missing and those that are there.
    """
    available = sorted(name for name, _ in _blocks_of(client.global_config_dict, AGENTS_TYPE))
    missing = sorted(set(agents) - set(available))
    if not missing:
        return
    head = client.head_server_config
    raise ConfigError(
        f"the run behind the head server at {head.host}:{head.port} has no agent called "
        f"{listed(map(repr, missing))}{did_you_mean(missing[0], available) or '.'} Its agents: {listed(available)}. "
        "Correct +agent_name or the agent_ref of the rows; if you meant another run, name its head server with "
        "+head_server.port=<port>"
    )


def facts_about(client: ServerClient, command: Sequence[str] = ()) -> RunFacts:
    """What the manifest should say about the servers of this run."""
    config: Any = OmegaConf.to_container(client.global_config_dict, resolve=False)
    return RunFacts(command, config, model_names(client.global_config_dict))


def model_names(config: DictConfig) -> list[str]:
    """The models that the servers of a config ask for."""
    return sorted(set(_model_names(config)))


def _model_names(config: DictConfig) -> Iterator[str]:
    """What each model server asks for; the kind of server where it does not say."""
    for _, block in _blocks_of(config, MODELS_TYPE):
        for kind, settings in block[MODELS_TYPE].items_ex(resolve=False):
            names = (_text_at(settings, key) for key in _MODEL_NAME_KEYS)
            yield next((name for name in names if name), str(kind))


def _text_at(settings: Any, key: str) -> str | None:
    try:
        value = settings.get(key) if isinstance(settings, DictConfig) else None
    except OmegaConfBaseException:
        return None
    return value if isinstance(value, str) else None


def _blocks_of(config: DictConfig, server_type: str) -> Iterator[tuple[str, DictConfig]]:
    for name, block in config.items_ex(resolve=False):
        if isinstance(block, DictConfig) and isinstance(block.get(server_type), DictConfig):
            yield str(name), block


def _ask(client: ServerClient, path: str) -> Any:
    """What the head server answers, or None when it does not: these are questions one can do without."""
    try:
        head = client.head_server_config
        status, body = fetch(Address(head.host, head.port), path, _TIMEOUT_S, client.auth_token)
        return orjson.loads(body) if status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


class Condition(StrEnum):
    """How a server is, the better the earlier."""

    WELL = "answers"
    BUSY = "is busy with CPU and does not answer"
    SILENT = "accepts connections and says nothing"
    STOPPED = "is stopped by a signal and says nothing"
    UNREACHABLE = "cannot be reached"
    REFUSES = "refuses connections"


class Limits(NamedTuple):
    """How many seconds each kind of trouble may last; None: for ever."""

    max_silence_s: float | None
    max_refused_s: float | None
    readiness_s: float | None

    @property
    def shortest_s(self) -> float:
        """The shortest limit that is set; infinite when there is none."""
        return min((limit for limit in self if limit is not None), default=math.inf)


class Look(NamedTuple):
    """One look at one server."""

    condition: Condition
    content: Any = None
    """What it answered, if that is JSON."""
    told: tuple[tuple[int, Any], ...] = ()
    """The same of every process of it that answered, by port."""


def look_at(address: Address, path: str, timeout_s: float, token: str | None) -> Look:
    """Ask a server; any answer means that it is well."""
    try:
        status, body = fetch(address, path, timeout_s, token)
    except ConnectionRefusedError:
        return Look(Condition.REFUSES)
    except TimeoutError:
        return Look(Condition.SILENT)
    except (OSError, http.client.HTTPException, ValueError):
        return Look(Condition.UNREACHABLE)
    try:
        return Look(Condition.WELL, orjson.loads(body) if status == http.client.OK else None)
    except ValueError:
        return Look(Condition.WELL)


@dataclass
class Trouble:
    """A server that did not answer when it was last looked at."""

    since_s: float
    condition: Condition = Condition.SILENT
    is_starting: bool = False
    """By the launcher, for the first time or again: that is its own business, and bounded there."""
    refused_s: float = 0.0
    silent_s: float = 0.0
    is_told: bool = False
    _since_at_s: float = field(default_factory=time.time)

    @property
    def is_silent(self) -> bool:
        """Whether it accepts connections and yet does not answer."""
        return self.condition in (Condition.BUSY, Condition.SILENT, Condition.STOPPED)

    def note(self, condition: Condition, passed_s: float, *, is_starting: bool) -> None:
        """Count `passed_s` more seconds, and remember in what condition it is now."""
        has_become_worse = self.is_silent and condition in (Condition.REFUSES, Condition.UNREACHABLE)
        if has_become_worse or self.is_starting is not is_starting:
            self.is_told = False
        self.condition, self.is_starting = condition, is_starting
        if condition is not Condition.REFUSES:
            self.refused_s = 0.0
        if not is_starting:
            self.silent_s += passed_s
            if condition is Condition.REFUSES:
                self.refused_s += passed_s

    def left_s(self, limits: Limits) -> float:
        """How much longer this may last."""
        if self.is_starting:
            return math.inf
        return min(
            math.inf if limits.max_silence_s is None else limits.max_silence_s - self.silent_s,
            math.inf
            if limits.max_refused_s is None or self.condition is not Condition.REFUSES
            else limits.max_refused_s - self.refused_s,
        )

    def notice(self, name: str, now_s: float) -> str:
        """The trouble in a few words; empty while it may pass by itself."""
        lasts_s = now_s - self.since_s
        if self.is_silent and lasts_s < _SHOWN_AFTER_S:
            return ""
        return (
            f"{shown(name)} {'is being started by ng_run' if self.is_starting else self.condition} for {lasts_s:.0f} s"
        )

    def is_worth_telling(self, now_s: float, limits: Limits) -> bool:
        """Whether a line should be logged now that was not before."""
        quiet_s = min(_TOLD_AFTER_S, math.inf if limits.max_silence_s is None else limits.max_silence_s / 4)
        return not self.is_told and (not self.is_silent or now_s - self.since_s >= quiet_s)

    def told(self, limits: Limits, *, is_head: bool) -> str:
        """The log line without its beginning, the names of the servers it is true of."""
        if self.is_starting:
            return f"{self.condition} since {self._since()}: `ng_run` is starting it, so the time does not count"
        words = f"{self.condition} since {self._since()}"
        if is_head:
            is_gone = self.condition is Condition.REFUSES
            return f"{words}: `ng_run` {'is gone, and the servers that it started end with it' if is_gone else 'hangs'}"
        if self.left_s(limits) == math.inf:
            return f"{words}. Nothing ends the run for that; stop it with Ctrl-C if this is not meant to pass"
        return f"{words}. The run ends if that lasts {self._limit(limits)} and no rollout succeeds meanwhile"

    def too_long(self, limits: Limits) -> str:
        """Why the run ends."""
        return f"{self.condition} since {self._since()}, longer than {self._limit(limits)} allows"

    def _limit(self, limits: Limits) -> str:
        is_refused = self.condition is Condition.REFUSES and limits.max_refused_s is not None
        if is_refused and self.left_s(limits._replace(max_silence_s=None)) <= self.left_s(limits):
            return f"max_refused_s={limits.max_refused_s:g}"
        return f"max_silence_s={limits.max_silence_s:g}"

    def _since(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._since_at_s))


@dataclass
class EndpointState:
    """What a model server says about an endpoint of its."""

    url: str
    set_with: str
    """The name of the setting that holds the address."""
    problem: str
    """Why it cannot be asked; empty when nothing is known to be wrong."""
    failing_since_s: float
    waiting_since_s: float | None
    """Since when its very first answer is waited for; None when it is not."""
    has_answered: bool
    told: str = ""

    def left_s(self, allowed_s: float, succeeded_s: float, now_s: float) -> float:
        """How much longer it may be missing; for ever if it has worked before."""
        if not self.problem or self.has_answered:
            return math.inf
        return allowed_s - (now_s - max(self.failing_since_s, succeeded_s))

    def notice(self, now_s: float) -> str:
        """The trouble in a few words; empty when there is none."""
        if self.problem:
            return f"no answer from {self.url}{self._yet} for {now_s - self.failing_since_s:.0f} s: {self.problem}"
        if self.waiting_since_s is not None and now_s - self.waiting_since_s >= _SHOWN_AFTER_S:
            return f"{self.url} is connected and at work on its first answer for {now_s - self.waiting_since_s:.0f} s"
        return ""

    def worth_telling(self, allowed_s: float | None) -> str:
        """A line to be logged now; empty if there is nothing new."""
        line, kind = "", ""
        waits_long = self.waiting_since_s is not None and time.monotonic() - self.waiting_since_s >= _TOLD_AFTER_S
        if self.problem:
            kind, line = "problem", self._missing(allowed_s)
        elif self.told == "problem":
            line = f"the endpoint {self.url} can be reached now"
        elif waits_long:
            kind = "busy"
            line = f"the endpoint {self.url} is connected and has not answered yet: it is loading, or busy"
        is_new, self.told = kind != self.told, kind
        return line if is_new else ""

    def too_long(self) -> str:
        """Why the run ends."""
        return f"no answer from {self.url}: {self.problem}; correct {self.set_with}, or start it"

    @property
    def _yet(self) -> str:
        return "" if self.has_answered else " yet"

    def _missing(self, allowed_s: float | None) -> str:
        if self.has_answered:
            return f"no answer from {self.url}, which worked before: {self.problem}. Calls are tried again for a while"
        end = "" if allowed_s is None else f". The run ends if that lasts {READINESS}={allowed_s:g}"
        return f"no answer from {self.url} yet: {self.problem}; correct {self.set_with}, or wait while it loads{end}"


class Process(NamedTuple):
    """What the launcher says about the processes of a server."""

    cpu_s: float
    is_stopped: bool


def starting_in(states: Any) -> set[str]:
    """The servers that the launcher is starting, from what the head server answered."""
    names = states.get("starting") if isinstance(states, Mapping) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def processes_in(states: Any) -> dict[str, Process]:
    """What the process of each server does, from what the head server answered."""
    try:
        return {name: Process(float(it["cpu_s"]), bool(it["is_stopped"])) for name, it in states["processes"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def endpoints_in(content: Any, now_s: float) -> dict[str, EndpointState]:
    """The endpoints of a model server, from its own answer; none if it says nothing that we understand."""
    try:
        return {state.url: state for state in (_endpoint(it, now_s) for it in content or ())}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}


def _endpoint(told: Mapping[str, Any], now_s: float) -> EndpointState:
    has_answered, asked_s_ago = bool(told["has_answered"]), told["asked_s_ago"]
    is_waiting = not has_answered and told["waiting"] and asked_s_ago is not None
    return EndpointState(
        url=shown(str(told["url"]), _LONGEST_TEXT),
        set_with=shown(str(told["set_with"]), _LONGEST_TEXT),
        problem=shown(str(told["problem"]), _LONGEST_TEXT),
        failing_since_s=now_s - float(told["failing_s"]),
        waiting_since_s=now_s - float(asked_s_ago) if is_waiting else None,
        has_answered=has_answered,
    )


@dataclass
class EndpointRetries:
    """The tries that an endpoint's troubles have cost since the run began, also of calls that failed in the end."""

    counts: Counter[str] = field(default_factory=Counter)
    """Tries that failed and were made again, by status, or `timeout` or `connection`."""
    cost_s: float = 0.0
    """Seconds that calls have spent on failed tries and on pauses after them, all calls together."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Calls that pause now, by what they wait for to pass."""
    paced_s: float = 0.0
    """Seconds that calls have waited for the pace that their model server keeps, all calls together."""

    def text(self) -> str:
        """For a line about the endpoint."""
        return f"tried again after {_listed(self.counts)}, at a cost of {_duration(self.cost_s)} over all calls"


class RetryLedger:
    """The retries of all model servers, from what they tell every now and then."""

    def __init__(self) -> None:
        self.by_endpoint: dict[str, EndpointRetries] = {}
        """By the endpoint's address."""
        self.by_server: dict[str, Counter[str]] = {}
        """Tries that failed and were made again, by the model server that made them."""
        self._pausing: dict[tuple[str, int, str], Counter[str]] = {}
        self._last: dict[tuple[str, int, str], tuple[Counter[str], float, float]] = {}
        self._pacing: dict[tuple[str, int, str], int] = {}

    def note(self, server: str, process: int, told: Any, run_for_s: float) -> None:
        """Take what one process of a model server told, `run_for_s` after the run began.

        What it had counted before that is not of this run, unless its first call was made since.
        """
        for state in told if isinstance(told, list) else ():
            try:
                self._note(server, process, state, run_for_s)
            except (TypeError, KeyError, ValueError, AttributeError):
                continue

    def _note(self, server: str, process: int, state: Mapping[str, Any], run_for_s: float) -> None:
        url = shown(state["url"], _LONGEST_TEXT)
        counts = _counter(state["ridden_out"])
        cost_s, asked_s_ago = float(state["ridden_out_cost_s"]), state["asked_s_ago"]
        paced_s, pacing = float(state.get("paced_s", 0.0)), int(state.get("pacing", 0))
        is_ours = asked_s_ago is None or float(asked_s_ago) <= run_for_s
        key = (server, process, url)
        before, before_s, before_paced_s = self._last.get(
            key, (Counter(), 0.0, 0.0) if is_ours else (counts, cost_s, paced_s)
        )
        if cost_s < before_s or paced_s < before_paced_s - _WORTH_TELLING_S:  # it was started again
            before, before_s, before_paced_s = Counter(), 0.0, 0.0
        self._last[key], self._pacing[key] = (counts, cost_s, paced_s), pacing
        self.by_server.setdefault(server, Counter()).update(counts - before)
        if url not in self.by_endpoint and len(self.by_endpoint) >= _MOST_ENDPOINTS:
            return
        endpoint = self.by_endpoint.setdefault(url, EndpointRetries())
        endpoint.counts.update(counts - before)
        endpoint.cost_s += cost_s - before_s
        endpoint.waiting = self._pausing[key] = _counter(state["pausing"])
        endpoint.paced_s += paced_s - before_paced_s

    def pausing_in(self, server: str) -> Counter[str]:
        """Calls of a model server that pause now before they are made again, by what was wrong."""
        found: Counter[str] = Counter()
        for (name, _, _), pausing in self._pausing.items():
            if name == server:
                found.update(pausing)
        return found

    def notice(self) -> str:
        """For a line that changes: what was ridden out and what waits now; empty when nothing was."""
        counts, waiting, cost_s, paced_s = Counter[str](), Counter[str](), 0.0, 0.0
        for endpoint in self.by_endpoint.values():
            counts.update(endpoint.counts)
            waiting.update(endpoint.waiting)
            cost_s += endpoint.cost_s
            paced_s += endpoint.paced_s
        said = [f"tried again after {_listed(counts)} in {_duration(cost_s)}"] if counts else []
        said += [f"calls waiting: {_listed(waiting)}"] if counts and waiting else []
        if paced_s >= _WORTH_TELLING_S:
            pacing = sum(self._pacing.values())
            now = f" ({pacing} waiting now)" if pacing else ""
            said.append(f"waited {_duration(paced_s)} for the pace over all calls{now}")
        return ", ".join(said)

    def lines(self) -> list[str]:
        """One for each endpoint that had trouble, and one for each that was waited for to keep a pace."""
        retried = [f"Retries: {url}: {it.text()}" for url, it in self.by_endpoint.items() if it.counts]
        return retried + [
            f"Pace: {url}: waited {_duration(it.paced_s)} for the pace over all calls"
            for url, it in self.by_endpoint.items()
            if it.paced_s >= _WORTH_TELLING_S
        ]

    def as_json(self) -> dict[str, Any]:
        """By endpoint how often calls were tried again, why, and the seconds that it cost."""
        return {
            url: {"tried_again": dict(it.counts), "cost_s": round(it.cost_s, 3)}
            | ({"paced_s": round(it.paced_s, 3)} if it.paced_s >= _WORTH_TELLING_S else {})
            for url, it in self.by_endpoint.items()
            if it.counts or it.paced_s >= _WORTH_TELLING_S
        }


def retried_text(ledger: RetryLedger, paused: Mapping[str, int]) -> str:
    """For a line that changes: what model servers rode out, and how many rollouts pause after which failure."""
    waiting = f"rollouts waiting to be tried again: {_listed(Counter(paused))}" if paused else ""
    return ", ".join(filter(None, (ledger.notice(), waiting)))


def _counter(told: Any) -> Counter[str]:
    return Counter({shown(kind, _KIND_LENGTH): int(count) for kind, count in list(told.items())[:_MOST_KINDS]})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} \N{MULTIPLICATION SIGN} {kind}" for kind, count in counts.most_common())


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"
