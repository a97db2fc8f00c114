"""A shard's line to the worker that started it: reports go out on stdout, caps come in on stdin, one JSON object each.

What the shard itself prints goes to its log. The line is also its lifeline: when it is cut, nobody waits for the
shard any more, and another one may be on its way to go on with the same files; so it ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from nemo_gym.distributed.shares import caps_of, in_flight_by_cap, with_caps
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.rollouts.config import Concurrency
from nemo_gym.rollouts.dispatch import Dispatch
from nemo_gym.rollouts.progress import Progress

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 0.5
_LETS_GO_AFTER_S = 0.5
_ENDS_WITHIN_S = 60.0


class Channel:
    """The shard's end of the line."""

    def __init__(self, incoming: int, outgoing: int, on_cut: Callable[[], None]) -> None:
        self._incoming, self._outgoing, self._on_cut = incoming, outgoing, on_cut
        self._sending = threading.Lock()
        self.caps: Mapping[str, int] = {}
        """The latest that came in."""
        self._on_caps: Callable[[], None] = lambda: None

    @classmethod
    def over_stdio(cls) -> "Channel":
        """Take stdin and stdout for the line; whatever is printed from now on goes where stderr goes."""
        channel = cls(os.dup(0), os.dup(1), end_this_process)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        threading.Thread(target=channel.listen, name="shard-channel", daemon=True).start()
        return channel

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something; when nobody listens any more, nothing happens here."""
        line = json.dumps(message, default=str).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._outgoing, line) :]

    def listen(self) -> None:
        """Take what comes in until the line is cut."""
        with contextlib.suppress(OSError), os.fdopen(self._incoming, "rb") as lines:
            for line in lines:
                self.caps = json.loads(line)["caps"]
                self._on_caps()
        self._on_cut()

    @contextlib.contextmanager
    def steering(self, concurrency: Concurrency, dispatch: Dispatch, progress: Progress) -> Iterator[None]:
        """Let the caps that come in hold for `dispatch` and report how it is doing.

        `concurrency` says which caps there are; until the first come in, nothing starts. What this machine can take is
        never exceeded.
        """
        loop = asyncio.get_running_loop()
        own = dispatch.concurrency
        timer: asyncio.TimerHandle | None = None
        in_force: Mapping[str, int] = {}

        def apply() -> None:
            nonlocal in_force
            in_force = self.caps or dict.fromkeys(caps_of(concurrency), 0)
            dispatch.set_concurrency(with_caps(own, in_force))
            tell()

        def tell() -> None:
            taken = in_flight_by_cap(concurrency, dispatch.in_flight, dispatch.in_flight_by_agent)
            state = asdict(progress.state())
            self.send({"state": state, "caps": in_force, "in_flight": taken, "is_draining": dispatch.is_draining})

        def tick() -> None:
            nonlocal timer
            tell()
            timer = loop.call_later(_TELL_EVERY_S, tick)

        def on_caps() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to steer
                loop.call_soon_threadsafe(apply)

        self._on_caps = on_caps
        apply()
        tick()
        try:
            yield
        finally:
            self._on_caps = lambda: None
            if timer is not None:
                timer.cancel()
            tell()


class SteeredCollector(RolloutCollectionHelper):
    """Collects rollouts under caps that come from elsewhere."""

    channel: Any
    concurrency: Any

    def _following(self, dispatch: Dispatch, progress: Progress) -> contextlib.AbstractContextManager[object]:
        steering: contextlib.AbstractContextManager[object]
        steering = self.channel.steering(self.concurrency, dispatch, progress)
        return steering


def end_this_process() -> None:
    """Stop in good order without waiting for what is in flight; if that fails, some other way."""
    logger.warning("The worker that started this shard is gone; stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LETS_GO_AFTER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ENDS_WITHIN_S)
    os._exit(1)
