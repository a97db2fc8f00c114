"""Steering a run in shards: the driver is asked and told, and passes it on to those who make the rollouts.

What holds for the run (paused, changed options) is repeated to all shards with every look, so that those learn of it,
too, that begin later or again. What is done once (cancel, try again, list what is in flight) is numbered, and each
running shard answers it.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.collect.budget import check_not_lifted
from nemo_gym.collect.control import SETTABLE, RunControl, checked_values, line_of, status_of
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.progress import Progress
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.executors.caps import Caps, caps_of
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.sockets import Answer, Request, attend
from nemo_gym.runs.spending import BUDGETS
from nemo_gym.terminal import shown

if TYPE_CHECKING:
    from nemo_gym.executors.driver import Driver

logger = logging.getLogger(__name__)

_ANSWERED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.1
_ENDS_WITHIN_S = 5.0
_CAPS = "num_samples_in_parallel"
_TIMEOUT = "run_timeout_s"
_OF_THE_DRIVER = frozenset({_TIMEOUT, *BUDGETS})
"""Options that hold for all shards together: of them the driver tells each what is left."""
_SAME_END_S = 2.0
"""Ends of the run that differ by less are the same: what is left is told again and again, and takes a while to come."""
_PASSED_ON = ("cancel", "retry", "in_flight")


@dataclass
class Orders:
    """What a person wants of all shards, and what these answered."""

    is_paused: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    """Options that were changed."""
    caps: Caps | None = None
    """Those that were changed, for all shards together."""
    limits: dict[str, float] = field(default_factory=dict)
    """Budgets that were changed, for all shards together."""
    ends: Callable[[], float | None] | None = None
    """In how many seconds the run is to end, None for never; unset as long as nobody has changed that."""
    asked: dict[int, Request] = field(default_factory=dict)
    answers: dict[int, dict[Shard, Answer]] = field(default_factory=dict)
    count: int = 0

    def to_pass_on(self) -> dict[str, Any] | None:
        """What shards are to know, as JSON; None as long as nobody has wanted anything."""
        if not (self.count or self.is_paused or self.values):
            return None
        asked = [[number, dict(request)] for number, request in list(self.asked.items())]
        orders = {"paused": self.is_paused, "values": dict(self.values), "asked": asked, "limits": dict(self.limits)}
        if self.caps is not None:
            orders["caps"] = dict(self.caps)
        return orders if self.ends is None else {**orders, "ends_in_s": self.ends()}

    def ask(self, request: Request) -> int:
        """Have a request passed on; the number under which shards answer."""
        self.count += 1
        self.answers[self.count] = {}
        self.asked[self.count] = request
        return self.count

    def take(self, shard: Shard, answers: Mapping[str, Answer]) -> None:
        """Take what a shard answered."""
        for number, answer in answers.items():
            if int(number) in self.answers:
                self.answers[int(number)][shard] = answer

    def settle(self, number: int) -> dict[Shard, Answer]:
        """The answers to a request that is over."""
        self.asked.pop(number, None)
        return self.answers.pop(number, {})


class DriverControl:
    """A person, by way of the driver's socket."""

    def __init__(
        self, driver: "Driver", progress: Progress, config: RolloutCollectionConfig, started_s: float | None = None
    ) -> None:
        """`started_s` is when the run began, by `time.monotonic`."""
        self._driver, self._progress, self._config = driver, progress, config
        self._started_s = time.monotonic() if started_s is None else started_s

    @contextmanager
    def attended(self, announce: Callable[[Path], object]) -> Iterator[None]:
        """Answer whoever asks while inside, in a thread of its own."""
        loop = asyncio.new_event_loop()
        output = Path(self._config.output_jsonl_fpath)
        task = loop.create_task(attend(output, self.answer, announce))

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(_until_cancelled(task))

        thread = threading.Thread(target=run, name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(_ENDS_WITHIN_S)

    async def answer(self, request: Request) -> Answer:
        """Do what is asked, and say what came of it.

        Raises:
            ConfigError: it cannot be done.
        """
        driver, what = self._driver, request.get("do")
        if what == "status":
            return {**self._status(), "shards": len(driver.records), "options": self._options()}
        if what == "line":
            return line_of(self._progress)
        if what in ("pause", "resume"):
            changed = driver.orders.is_paused != (what == "pause")
            driver.orders.is_paused = what == "pause"
            driver.orders.count += changed
            return {"changed": changed, "state": self._status()["state"], "in_flight": driver.in_flight()}
        if what == "stop":
            at_once = bool(request.get("at_once")) or driver.stopped is not None
            driver.request_stop(at_once=at_once, why="stopped by ng_control")
            return {"at_once": at_once, "in_flight": driver.in_flight()}
        if what == "set":
            return self._set(request)
        if what in _PASSED_ON:
            return _merged(what, await self._pass_on(request))
        known = ["status", "line", "pause", "resume", "stop", "set", *_PASSED_ON]
        raise ConfigError(f"this driver cannot {shown(str(what))!r}; it can {listed(sorted(known))}")

    def _status(self) -> Answer:
        driver = self._driver
        output = Path(self._config.output_jsonl_fpath)
        return status_of(output, self._progress, is_paused=driver.orders.is_paused, stopped=driver.stopped)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self._config, name) for name in sorted(SETTABLE | self._config.budgets.keys())}

    def _set(self, request: Request) -> Answer:
        values = request.get("values")
        new = checked_values(values, SETTABLE | self._config.budgets.keys(), self._config)
        assert isinstance(values, dict)
        changed = {name: getattr(new, name) for name in values}
        config = self._config.model_copy(update=changed)
        check_not_lifted(self._config.budgets, config.budgets)
        if _CAPS in changed and (config.adaptive or self._config.adaptive):
            raise ConfigError(
                f"+set: in a run with shards {_CAPS}=auto stays as it is; stop it, and resume it with others"
            )
        self._config = config
        self._obey(config, changed)
        logger.info("ng_control: set %s", shown(str(changed), 500))
        return {"set": changed}

    def _obey(self, config: RolloutCollectionConfig, changed: Mapping[str, Any]) -> None:
        """What concerns the whole is divided by the driver; the rest is the same for every shard."""
        orders, timeout_s = self._driver.orders, config.run_timeout_s
        orders.count += 1
        orders.values.update({name: value for name, value in changed.items() if name not in _OF_THE_DRIVER})
        if _CAPS in changed:
            orders.caps = caps_of(config.concurrency)
        if _TIMEOUT in changed:
            ends_s = None if timeout_s is None else self._started_s + timeout_s
            orders.ends = lambda: None if ends_s is None else ends_s - time.monotonic()
        if changed.keys() & BUDGETS.keys():
            orders.limits.update(config.budgets)
            self._driver.budget = replace(self._driver.budget, limits=config.budgets)

    async def _pass_on(self, request: Request) -> dict[Shard, Answer]:
        """Ask all shards that run; their answers, as far as they come in time."""
        orders = self._driver.orders
        number = orders.ask(request)
        by_s = time.monotonic() + _ANSWERED_WITHIN_S
        while time.monotonic() < by_s and self._driver.shards_running() - orders.answers[number].keys():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)  # the driver, in its own thread, takes the answers
        return orders.settle(number)


async def _until_cancelled(task: "asyncio.Task[None]") -> None:
    await asyncio.wait([task])


def _merged(what: str, answers: Mapping[Shard, Answer]) -> Answer:
    """One answer of those of all shards; what none of them can do is refused in the words of one of them.

    Raises:
        ConfigError: none of them could.
    """
    done = {shard: answer for shard, answer in answers.items() if answer.get("ok") is True}
    if not done:
        refusals = [str(answer.get("error")) for answer in answers.values()]
        raise ConfigError(refusals[0] if refusals else "no shard makes rollouts now; ask again in a moment")
    if what == "retry":
        return {"retried": sum(answer["retried"] for answer in done.values())}
    if what == "cancel":
        return {"cancelled": [name for answer in done.values() for name in answer["cancelled"]]}
    in_flight = [
        {**each, "agent": f"{each['agent']} (shard {shard})"} for shard, answer in done.items() for each in answer[what]
    ]
    in_flight.sort(key=lambda each: -each["for_s"])
    return {"in_flight": in_flight, "left_out": sum(answer["left_out"] for answer in done.values())}


class LedControl:
    """The end in a shard: carries out what the driver passes on."""

    def __init__(self, dispatch: Dispatch, set_concurrency: Callable[[Concurrency], None]) -> None:
        """`set_concurrency` takes the caps of the whole run, of which the shard has a share."""
        self._dispatch = dispatch
        self._ends_s: float | None = None
        """When the run is to end, by the clock of the event loop, once a person has said so."""
        self._control = next((each for each in dispatch.policies if isinstance(each, RunControl)), None)
        if self._control is not None:
            self._control.has_socket = False
            self._control.set_concurrency = set_concurrency
        self._values: dict[str, Any] = {}
        self._begun: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers: dict[str, Answer] = {}
        """To what was asked and not taken back since, by number."""

    def heed(self, orders: Mapping[str, Any] | None) -> None:
        """Begin to do what is new in them."""
        if orders is not None and self._control is not None:
            task = asyncio.get_running_loop().create_task(self._obey(self._control, orders))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Carry out no more orders; what was begun is cancelled."""
        for task in list(self._tasks):
            task.cancel()

    def _end_in(self, left_s: float | None) -> None:
        """Have the run end in so many seconds, or never, unless that is how it is already."""
        now_s = asyncio.get_running_loop().time()
        ends_s = math.inf if left_s is None else now_s + left_s
        if self._ends_s is None or (ends_s != self._ends_s and abs(ends_s - self._ends_s) > _SAME_END_S):
            self._ends_s = ends_s
            self._dispatch.set_run_end(None if left_s is None else max(0.0, left_s))

    async def _obey(self, control: RunControl, orders: Mapping[str, Any]) -> None:
        new = {name: value for name, value in orders["values"].items() if self._values.get(name, ...) != value}
        if new:
            self._values.update(new)
            await _answered(control, {"do": "set", "values": new})
        if "ends_in_s" in orders:
            self._end_in(orders["ends_in_s"])
        if orders["paused"] != control.is_paused:
            await _answered(control, {"do": "pause" if orders["paused"] else "resume"})
        asked = {str(number): request for number, request in orders["asked"]}
        for number in self.answers.keys() - asked.keys():
            del self.answers[number]
        for number, request in asked.items():
            if number not in self._begun:
                self._begun.add(number)
                self.answers[number] = await _answered(control, request)


async def _answered(control: RunControl, request: Request) -> Answer:
    try:
        return {"ok": True, **await control.answer(request)}
    except GymError as error:
        logger.warning("%s", error)
        return {"ok": False, "error": str(error)}
