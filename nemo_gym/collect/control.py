"""A run that can be steered while it is made: asked how it stands, paused, told other caps, relieved of a rollout.

The collector listens on a socket of its user's alone (`nemo_gym.runs.sockets`), attended beside the rollouts: whoever
asks much, slowly, or nothing at all takes nothing away from them. A collector without a socket says so once and goes
on. What people change is in the log and in the manifest.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.collect.admission import prepare_connections
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.failures import Attempt, PendingAttempt, attempt_name
from nemo_gym.collect.policies import Policy
from nemo_gym.collect.progress import Progress
from nemo_gym.collect.stopping import Stop
from nemo_gym.collect.summary import RunSummary
from nemo_gym.config.options import validate_options
from nemo_gym.errors import ConfigError, did_you_mean, listed
from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.keys import ATTEMPT_INDEX_KEY_NAME
from nemo_gym.runs.manifest import write_manifest
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig
from nemo_gym.runs.record import (
    NG_FAILURE_CLASS_KEY,
    Failure,
    FailureClass,
    Outcome,
    RolloutKey,
    Row,
    agent_name_of,
    key_or_none,
    outcome_of,
    utc_text,
)
from nemo_gym.runs.resume import Plan
from nemo_gym.runs.run import Run
from nemo_gym.runs.sockets import Answer, Request, attend, run_id
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_NEWS_EVERY_S = 0.2
_MOST_LISTED = 1_000
_MOST_AGENTS_ASKED = 32
_STOPPED_BY_HAND = "stopped by ng_control"
_CANCELLED_BY_HAND = "cancelled by ng_control"
_CAPS = "num_samples_in_parallel"


def status_of(output: Path, progress: Progress, *, is_paused: bool, stopped: Stop | None) -> Answer:
    """How a run stands, for whoever asks."""
    state, rate = progress.state(), progress.rate_per_s
    to_come = None if progress.total is None else max(0, progress.total - progress.done)
    return {
        "id": run_id(output),
        "output": str(output.absolute()),
        "pid": os.getpid(),
        "since": utc_text(datetime.fromtimestamp(datetime.now(UTC).timestamp() - progress.elapsed_s, UTC)),
        "elapsed_s": round(progress.elapsed_s, 3),
        "state": "stopping" if stopped is not None else "paused" if is_paused else "running",
        "stopped": None if stopped is None else {"kind": stopped.kind, "message": stopped.message},
        "done": progress.done,
        "total": progress.total,
        "finished": state.finished,
        "failed": state.failed + state.given_up_before,
        "retried": state.retries,
        "discarded": state.discarded,
        "in_flight": state.in_flight,
        "rate_per_s": rate,
        "cost_usd": state.cost_usd,
        "eta_s": None if to_come is None or not rate or is_paused else to_come / rate,
        "scores": {
            agent: {"mean": score.mean, "ci95": score.ci95, "rollouts": score.rollouts, "tasks": score.tasks}
            for agent, score in progress.means.estimates(_MOST_LISTED).items()
        },
    }


def line_of(progress: Progress) -> Answer:
    """The living line of a run, for whoever shows it elsewhere."""
    snapshot = progress.snapshot()
    return {"done": snapshot.done, "total": snapshot.total, "tail": snapshot.tail, "title": snapshot.title}


def checked_values(values: Any, settable: frozenset[str], config: RolloutCollectionConfig) -> RolloutCollectionConfig:
    """Options as the run of `config` would have had them from the beginning, had they been given like this.

    Raises:
        ConfigError: one of them cannot be changed, or not to that.
    """
    if not isinstance(values, dict) or not values:
        raise ConfigError("+set wants options and values, such as +set='{num_samples_in_parallel: 64}'")
    for name in values:
        if name not in settable:
            raise ConfigError(
                f"+set: {shown(name)!r} cannot be changed while a run goes on{did_you_mean(name, settable)}; what can "
                f"be: {listed(sorted(settable))}"
            )
    given = {"input_jsonl_fpath": "-", "output_jsonl_fpath": "-", "prices": config.prices, **values}
    return validate_options(RolloutCollectionConfig, given, "ng_control +set")


class _Failed(NamedTuple):
    """A rollout that failed for good in this run."""

    attempts: int
    """Made so far, over all runs."""
    failure_class: object


class RunControl(Policy):
    """A person, by way of the socket of the run."""

    def __init__(self, run: Run, plan: Plan, summary: RunSummary) -> None:
        self._run, self._plan, self._summary = run, plan, summary
        self._config = run.config
        self._failed: dict[RolloutKey, _Failed] = {}
        self._given_up = set(plan.given_up_keys)
        self._told: dict[str, tuple[float, Answer]] = {}
        self.is_paused = False
        self.set_concurrency: Callable[[Concurrency], None]
        self.has_socket = True
        """False for a part of a run, which is steered by whoever has the whole."""

    def follow(self, progress: Progress) -> None:
        """Keep the progress, of which `status` tells."""
        self._progress = progress

    def begin(self, dispatch: Dispatch) -> None:
        """Keep the dispatcher, which orders are carried out on."""
        self._dispatch = dispatch
        self.set_concurrency = dispatch.set_concurrency

    async def act(self) -> None:
        """Answer questions and orders on the socket of the run until cancelled."""
        await asyncio.sleep(0)
        if self.has_socket:
            await attend(self._output, self.answer, self._run.store.announce)

    def holds_back(self) -> bool:
        """Whether a person has paused the run: then nothing starts."""
        return self.is_paused

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """Keep in mind what failed, in case that it is to be tried again."""
        failure, result = attempt.failure, attempt.result or {}
        if failure is None and result.get(NG_FAILURE_CLASS_KEY) is None:
            return None
        if attempt.is_final and (failure is not None or outcome_of(result) is Outcome.FAILURE):
            key = key_or_none(attempt.row)
            if key is not None:
                found = result.get(NG_FAILURE_CLASS_KEY) if failure is None else failure.failure_class
                self._failed[key] = _Failed((attempt.row.get(ATTEMPT_INDEX_KEY_NAME) or 0) + 1, found)
        return None

    def notice(self) -> str:
        """Whether it is paused."""
        return "paused" if self.is_paused else ""

    @property
    def _output(self) -> Path:
        return self._run.config.paths.rollouts

    async def answer(self, request: Request) -> Answer:
        """Do what is asked, and say what came of it.

        Raises:
            ConfigError: it cannot be done.
        """
        does: dict[Any, Callable[[Request], Answer]] = {
            "status": lambda _: self.status(),
            "line": lambda _: line_of(self._progress),
            "pause": lambda _: self._pause(is_paused=True),
            "resume": lambda _: self._pause(is_paused=False),
            "stop": self._stop,
            "set": self._set,
            "cancel": self._cancel,
        }
        what = request.get("do")
        if what in ("status", "line"):
            return self._latest(what, does[what])
        if what == "retry":
            return await self._retry(request)
        if what == "in_flight":
            return await self.in_flight()
        if not isinstance(what, str) or what not in does:
            raise ConfigError(
                f"this collector cannot {shown(str(what))!r}; it can {listed(sorted([*does, 'retry', 'in_flight']))}"
            )
        return does[what](request)

    def _latest(self, what: str, tell: Callable[[Request], Answer]) -> Answer:
        """What is told often, counted together now and then and whenever a person has changed something."""
        now_s = asyncio.get_running_loop().time()
        told_s, answer = self._told.get(what, (-_NEWS_EVERY_S, {}))
        if now_s - told_s >= _NEWS_EVERY_S:
            told_s, answer = self._told[what] = now_s, tell({})
        return answer

    def status(self) -> Answer:
        """How the run stands."""
        dispatch = self._dispatch
        return {
            **status_of(self._output, self._progress, is_paused=self.is_paused, stopped=dispatch.stopped),
            "awaiting_retry": dispatch.awaiting_retry,
            "tokens": dict(self._summary.tokens),
            "options": {
                name: getattr(self._config, name) for name in sorted(self._settable) if hasattr(self._config, name)
            },
        }

    async def in_flight(self) -> Answer:
        """The rollouts that are with their agents, the oldest first, since when, and what these say of them."""
        attempts = self._dispatch.attempts_in_flight
        listed, servers = attempts[:_MOST_LISTED], self._dispatch.servers
        agents = sorted({pending.agent for pending in listed})[:_MOST_AGENTS_ASKED]
        told = {} if servers is None else await servers.rollouts_in_flight(agents)
        now_s, run = asyncio.get_running_loop().time(), run_id(self._output)
        return {
            "in_flight": [
                {**_shown_attempt(pending, now_s), **_told(told.get(f"{run}/{attempt_name(pending.row)}"))}
                for pending in listed
            ],
            "left_out": max(0, len(attempts) - _MOST_LISTED),
        }

    @property
    def _settable(self) -> frozenset[str]:
        return SETTABLE.union(*(policy.options for policy in self._dispatch.policies))

    def _pause(self, *, is_paused: bool) -> Answer:
        changed = is_paused != self.is_paused
        if changed:
            self.is_paused = is_paused
            self._note("pause" if is_paused else "resume")
            self._dispatch.look_again()
        return {"changed": changed, "state": self.status()["state"], "in_flight": self._dispatch.in_flight}

    def _stop(self, request: Request) -> Answer:
        """The second time at once, as with Ctrl-C."""
        at_once = bool(request.get("at_once")) or self._dispatch.stopped is not None
        self._note("stop")
        self._dispatch.request_stop(at_once=at_once, why=_STOPPED_BY_HAND)
        return {"at_once": at_once, "in_flight": self._dispatch.in_flight}

    def _set(self, request: Request) -> Answer:
        values = request.get("values")
        new = checked_values(values, self._settable, self._config)
        assert isinstance(values, dict)
        changed = {name: getattr(new, name) for name in values}
        if self._dispatch.settings.post_keeps_time and changed.keys() & {_CAPS, "rollout_timeout_s"}:
            raise ConfigError("+set: the program that collects limits its rollouts itself and takes no other limits")
        config = self._config.model_copy(update=changed)
        if _CAPS in changed and config.adaptive and not self._config.adaptive:
            raise ConfigError(f"+set: {_CAPS}=auto is for the start of a run; stop it, and resume it with that")
        for policy in self._dispatch.policies:
            if policy.options & changed.keys():
                policy.change(config, changed.keys())
        for name, obey in _OBEYED.items():
            if name in changed:
                obey(self, config)
        self._summary.budgets = config.budgets
        self._config = config
        self._note("set", changed)
        return {"set": changed}

    def _obey_caps(self, config: RolloutCollectionConfig) -> None:
        """Unless there is a policy for them, which has been told."""
        if not any(_CAPS in policy.options for policy in self._dispatch.policies):
            self.set_concurrency(prepare_connections(config, self._plan.owed_by_agent))

    def _obey_rollout_timeout(self, config: RolloutCollectionConfig) -> None:
        self._dispatch.set_rollout_timeout(config.rollout_timeout_s)

    def _obey_run_timeout(self, config: RolloutCollectionConfig) -> None:
        self._dispatch.set_run_timeout(config.run_timeout_s)

    def _obey_stop_rules(self, config: RolloutCollectionConfig) -> None:
        self._dispatch.set_stop_rules(fail_fast=config.fail_fast, max_failure_fraction=config.max_failure_fraction)

    def _cancel(self, request: Request) -> Answer:
        wanted = str(request.get("rollout"))
        found = [pending for pending in self._dispatch.attempts_in_flight if wanted in _names_of(pending.row)]
        if not found:
            raise ConfigError(
                f"+cancel={shown(wanted)} is not in flight; +in_flight=true lists what is, as <task>/<rollout>"
            )
        failure = Failure(FailureClass.CANCELLED, _CANCELLED_BY_HAND)
        for pending in found:
            self._dispatch.give_up(pending, failure)
        names = [_names_of(pending.row)[0] for pending in found]
        self._note("cancel", names)
        return {"cancelled": names}

    async def _retry(self, request: Request) -> Answer:
        """Have all that failed tried again: in this run, and given up by those that it resumes."""
        if request.get("what") != "failed":
            raise ConfigError(f"+retry={shown(str(request.get('what')))}: what can be tried again is what has failed")
        if self._dispatch.settings.post_keeps_time:
            raise ConfigError("+retry=failed: the program that collects sends its rows itself; resume it later instead")
        if self._dispatch.stopped is not None:
            raise ConfigError(f"+retry=failed: the run is being stopped ({self._dispatch.stopped.message})")
        failed, given_up = self._failed, self._given_up
        self._failed, self._given_up = {}, set()
        made = {key: attempts.made for key, attempts in self._plan.attempts.items() if key in given_up}
        made |= {key: of_key.attempts for key, of_key in failed.items()}
        places = await asyncio.to_thread(_find_rows, self._plan, made.keys())
        if self._dispatch.stopped is not None or not places:
            self._failed, self._given_up = {**failed, **self._failed}, given_up | self._given_up
            return {"retried": 0}
        for key, place in places.items():
            self._progress.reopen(place.agent, was_given_up_before=key in given_up)
            if key in given_up:
                self._summary.given_up_before -= 1
            else:
                self._summary.failures.reopen(failed[key].failure_class)
        self._dispatch.try_first(_rows_at(self._plan, places, made))
        self._note("retry", len(places))
        return {"retried": len(places)}

    def _note(self, did: str, value: Any = None) -> None:
        """Put on record what a person did."""
        self._told.clear()
        logger.info("ng_control: %s%s", did, "" if value is None else f" {shown(str(value), 500)}")
        manifest = self._run.manifest
        if manifest is None:
            return
        entry = {"at": utc_text(datetime.now(UTC)), "did": did}
        manifest.steered.append(entry if value is None else {**entry, "value": value})
        try:
            write_manifest(manifest, self._run.store.paths.manifest)
        except OSError as error:
            logger.warning("what was changed could not be recorded in %s: %s", self._run.store.paths.manifest, error)


_OBEYED: dict[str, Callable[[RunControl, RolloutCollectionConfig], None]] = {
    _CAPS: RunControl._obey_caps,
    "rollout_timeout_s": RunControl._obey_rollout_timeout,
    "run_timeout_s": RunControl._obey_run_timeout,
    "fail_fast": RunControl._obey_stop_rules,
    "max_failure_fraction": RunControl._obey_stop_rules,
}
SETTABLE = frozenset(_OBEYED)
"""Options that can be changed while a run goes on; those of policies come on top."""


def _shown_attempt(pending: PendingAttempt, now_s: float) -> dict[str, Any]:
    return {
        "rollout": _names_of(pending.row)[0],
        "agent": pending.agent,
        "attempt": pending.number,
        "since": utc_text(datetime.fromtimestamp(pending.started_at_s, UTC)),
        "for_s": round(max(0.0, now_s - pending.started_s), 3),
    }


def _told(doing: Any) -> dict[str, Any]:
    """What an agent says of a rollout, as far as that can be understood."""
    if not isinstance(doing, dict):
        return {}
    return {name: doing[name] for name in ("calls", "call") if name in doing}


def _names_of(row: Row) -> Sequence[str]:
    """What a rollout goes by: `<task>/<rollout>`, and its task, for all rollouts of it."""
    key = key_or_none(row)
    return ("?",) if key is None else (f"{key.task_index}/{key.rollout_index}", str(key.task_index))


class _Place(NamedTuple):
    """Where a row is."""

    offset: int
    length: int
    agent: str


def _find_rows(plan: Plan, keys: Any) -> dict[RolloutKey, _Place]:
    """Where the rows of rollouts are in the file of the run's rows."""
    found: dict[RolloutKey, _Place] = {}
    for line in iter_lines(plan.path):
        if len(found) == len(keys):
            break
        with suppress(ValueError):
            row = parse(line.content)
            key = key_or_none(row)
            if key is not None and key in keys:
                found[key] = _Place(line.offset, len(line.content), agent_name_of(row) or "")
    return found


def _rows_at(plan: Plan, places: Mapping[RolloutKey, _Place], made: Mapping[RolloutKey, int]) -> Iterator[Row]:
    """The rows at these places, read as they are needed; each says how often its rollout has failed."""
    with plan.path.open("rb") as file:
        for key, place in places.items():
            file.seek(place.offset)
            row = parse(file.read(place.length))
            row[ATTEMPT_INDEX_KEY_NAME] = made[key]
            yield row
