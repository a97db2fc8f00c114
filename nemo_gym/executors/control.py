"""Steering a run in shards: the driver is asked and told, and passes it on to those who make the rollouts.

What holds for the run (paused, changed options) is repeated to all shards with every look, so that those learn of it,
too, that begin later or again. What is done once (cancel, try again, list what is in flight) is numbered, and each
running shard answers it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.collect.control import SETTABLE, RunControl, checked_values, line_of, status_of
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.collect.progress import Progress
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.executors.caps import Caps, caps_of
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.sockets import Answer, Request, attend
from nemo_gym.terminal import shown

if TYPE_CHECKING:
    from nemo_gym.executors.driver import Driver

logger = logging.getLogger(__name__)

_ANSWERED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.1
_ENDS_WITHIN_S = 5.0
_CAPS = "num_samples_in_parallel"
_OF_THE_DRIVER = frozenset({"run_timeout_s"})
"""Options that shards were told at their start, each with what was left then."""
_PASSED_ON = ("cancel", "retry", "in_flight")


@dataclass
class Orders:
    """What a person wants of all shards, and what these answered."""

    is_paused: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    """Options that were changed."""
    caps: Caps | None = None
    """Those that were changed, for all shards together."""
    asked: dict[int, Request] = field(default_factory=dict)
    answers: dict[int, dict[Shard, Answer]] = field(default_factory=dict)
    count: int = 0

    def to_pass_on(self) -> dict[str, Any] | None:
        """What shards are to know, as JSON; None as long as nobody has wanted anything."""
        if not (self.count or self.is_paused or self.values):
            return None
        asked = [[number, dict(request)] for number, request in list(self.asked.items())]
        return {"paused": self.is_paused, "values": dict(self.values), "asked": asked}

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

    def __init__(self, driver: "Driver", progress: Progress, config: RolloutCollectionConfig) -> None:
        self._driver, self._progress, self._config = driver, progress, config

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
        return {name: getattr(self._config, name) for name in sorted(SETTABLE)}

    def _set(self, request: Request) -> Answer:
        values = request.get("values")
        new = checked_values(values, SETTABLE - _OF_THE_DRIVER, self._config)
        assert isinstance(values, dict)
        changed = {name: getattr(new, name) for name in values}
        config = self._config.model_copy(update=changed)
        if _CAPS in changed and (config.adaptive or self._config.adaptive):
            raise ConfigError(
                f"+set: in a run with shards {_CAPS}=auto stays as it is; stop it, and resume it with others"
            )
        if _CAPS in changed:
            before, after = caps_of(self._config.concurrency), caps_of(config.concurrency)
            if before.keys() != after.keys():
                raise ConfigError(
                    f"+set: in a run with shards {_CAPS} keeps its form, with other numbers; now it is "
                    f"{self._config.num_samples_in_parallel!r}"
                )
            self._driver.orders.caps = after
        self._config = config
        self._driver.orders.values.update(changed)
        logger.info("ng_control: set %s", shown(str(changed), 500))
        return {"set": changed}

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
        """Do no more."""
        for task in list(self._tasks):
            task.cancel()

    async def _obey(self, control: RunControl, orders: Mapping[str, Any]) -> None:
        new = {name: value for name, value in orders["values"].items() if self._values.get(name, ...) != value}
        if new:
            self._values.update(new)
            await _answered(control, {"do": "set", "values": new})
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
