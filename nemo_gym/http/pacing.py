"""The pace at which a model endpoint is asked: so many requests and tokens a minute, so many requests at once.

Every process that serves a model server has one `Pacer`. A call waits in it for its turn, before each of its tries.
Requests go out evenly, never in a burst to make up for a lull, so that the limit holds in every stretch of time and not
only from one minute to the next. Calls of different sessions take turns, however many one of them makes. What a call
will cost in tokens is estimated from calls before it, and put right by the usage that its answer reports. An endpoint
that says how much is left (`x-ratelimit-*`), or asks to be left alone (`Retry-After`), is heard by all calls.

The processes of a server keep books in common (`pace_books`): what one of them does not use is there for the others,
and a limit holds for all together.
"""

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from nemo_gym.http.pace_books import Books, Times

SESSION: ContextVar[str] = ContextVar("nemo_gym_paced_session", default="")
"""Whose turn the running code takes."""

_MINUTE_S = 60.0
_LEAST_SLACK_S, _MOST_SLACK_S = 0.05, 0.1
"""How much of being late is made up for: with 10 s as the shortest stretch of interest, a percent of it at most."""
_YIELD_S = 0.002
_BUSY_S = 0.001
_LOOK_AGAIN_S = 0.01
_NO_SHARE_S = 0.2
_LONGEST_HOLD_S = 600.0
"""After that the endpoint is asked again, whatever it said; it will repeat it."""
_SCARCE = 0.1
"""The part of an endpoint's limit that is spread over the time until the limit is reset."""
_OVERLOADED = (429, 503)
_TINY = 1e-6
_ABSURD = 1e8
"""Tokens of one call that nobody believes."""


@dataclass(frozen=True)
class Pace:
    """What a model server may ask of its endpoint, over all its processes; None: as much as it likes."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent_requests: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is any limit at all."""
        return any(limit is not None for limit in vars(self).values())


def free_again_s(free_s: float, now_s: float, takes_s: float) -> float:
    """When the next may go, after one that went at `now_s`, was free to since `free_s`, and takes up `takes_s`.

    Who comes late is allowed a little of it afterwards, or timers would cost a part of every rate.
    """
    slack_s = min(_MOST_SLACK_S, max(_LEAST_SLACK_S, takes_s / 2))
    return max(free_s, now_s - slack_s) + takes_s


class TokenEstimate:
    """How many tokens a call will take, from how many earlier ones took."""

    def __init__(self) -> None:
        self._per_byte, self._output, self.typical = 0.25, 256.0, 512.0
        self._calls = 0

    def of(self, size: int, most_output: float) -> float:
        """The tokens of a request of `size` bytes, of which an answer may have `most_output` at most."""
        return size * self._per_byte + min(self._output, most_output)

    def learn(self, size: int, input_tokens: float, output_tokens: float) -> None:
        """Take note of what a call really took."""
        self._calls = min(self._calls + 1, 50)
        self._per_byte += (input_tokens / max(size, 1) - self._per_byte) / self._calls
        self._output += (output_tokens - self._output) / self._calls
        self.typical += (input_tokens + output_tokens - self.typical) / self._calls


class FairQueue:
    """Calls that wait: those that are tried again first, then one of each session in turn."""

    def __init__(self) -> None:
        self._again: deque[Turn] = deque()
        self._of_session: dict[str, deque[Turn]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, turn: "Turn") -> None:
        """Put a call at the end of the queue of its session."""
        self._length += 1
        (self._again if turn.has_slot else self._of_session.setdefault(turn.session, deque())).append(turn)

    def first(self) -> "Turn":
        """The call whose turn it is; it stays in the queue."""
        return self._again[0] if self._again else next(iter(self._of_session.values()))[0]

    def pop(self) -> "Turn":
        """Take out whose turn it is; its session goes to the end."""
        self._length -= 1
        if self._again:
            return self._again.popleft()
        session = next(iter(self._of_session))
        turns = self._of_session.pop(session)
        turn = turns.popleft()
        if turns:
            self._of_session[session] = turns
        return turn

    def discard(self, turn: "Turn") -> None:
        """Forget a call that waits no longer."""
        turns = self._again if turn.has_slot else self._of_session.get(turn.session, deque())
        with suppress(ValueError):
            turns.remove(turn)
            self._length -= 1
            if not turns:
                self._of_session.pop(turn.session, None)


class Turn:
    """One call, from its first wait to its end."""

    def __init__(
        self, pacer: "Pacer", session: str, size: int = 0, most_output: float = math.inf, *, asks: bool = True
    ):
        """`asks` says that the model is asked, so that tokens are used; `size` is that of the request, in bytes."""
        self._pacer = pacer
        self.session = session
        self.size, self.most_output, self.asks = size, most_output, asks
        self.has_slot = False
        self.charged = 0.0
        """Tokens that its try was counted with."""
        self.admitted: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the call may be tried; again before it is tried again, when it goes before calls that are new."""
        await self._pacer.admit(self)

    def answered(self, answer: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """The try was answered: what it says about tokens, and about what is left."""
        self._pacer.settle(self, answer.get("usage") if isinstance(answer, Mapping) else None)
        self._pacer.hear(headers)

    def refused(self, status: int, headers: Mapping[str, str], retry_after_s: float) -> None:
        """The try was answered with an error, which costs no tokens, and maybe the wish to be left alone."""
        self._pacer.correct(-self.charged)
        self.charged = 0.0
        self._pacer.hear(headers, retry_after_s if status in _OVERLOADED else 0.0)

    def close(self) -> None:
        """The call is over."""
        if self.has_slot:
            self.has_slot = False
            self._pacer.release()


class Pacer:
    """Lets calls go at a pace; one for each model server and process."""

    def __init__(
        self,
        pace: Pace,
        books: Books,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes` is the number among which the limits are divided, unless they keep books in common."""
        part = 1 if books.is_shared else max(1, processes)
        self._requests_per_s = (pace.requests_per_minute or 0.0) / _MINUTE_S / part
        self._tokens_per_s = (pace.tokens_per_minute or 0.0) / _MINUTE_S / part
        cap = pace.max_concurrent_requests
        self._cap = None if cap is None else max(1, -(-cap // part))
        self._books = books
        self._clock = clock
        self._estimate = TokenEstimate()
        self._queue = FairQueue()
        self._under_way = 0
        self._owed_tokens = self._owed_hold_s = 0.0
        """What is to be put into the books as soon as nobody else writes."""
        self._yields_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def turn(self, body: Mapping[str, Any], size: int, *, asks: bool = True) -> Turn:
        """A new call of the session that the running code works for."""
        limits = (body.get(key) for key in ("max_output_tokens", "max_completion_tokens", "max_tokens"))
        most = next((limit for limit in limits if isinstance(limit, int | float)), math.inf)
        return Turn(self, SESSION.get(), size, most, asks=asks)

    async def admit(self, turn: Turn) -> None:
        """Wait for the turn of a call; one that is given up loses nothing for the others."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer = loop, None
        turn.admitted = admitted = loop.create_future()
        self._queue.add(turn)
        if self._timer is None or turn.has_slot:
            self._let_go()
        else:
            self._tell()
        try:
            await admitted
        finally:
            if admitted.cancelled():
                self._queue.discard(turn)
                self._let_go()

    def settle(self, turn: Turn, usage: Any) -> None:
        """Put an estimate right by the usage that an answer reports, if it does."""
        if not turn.asks or not isinstance(usage, Mapping):
            return
        read = _number_in(usage, "input_tokens", "prompt_tokens")
        written = _number_in(usage, "output_tokens", "completion_tokens")
        whole = _number_in(usage, "total_tokens")
        if read is not None and written is not None:
            self._estimate.learn(turn.size, read, written)
            whole = read + written
        if whole is not None:
            self.correct(whole - turn.charged if self._tokens_per_s else 0.0)
            turn.charged = 0.0

    def correct(self, tokens: float) -> None:
        """Count so many tokens more, or fewer."""
        self._owed_tokens += tokens
        self._pay()

    def hear(self, headers: Mapping[str, str], retry_after_s: float = 0.0) -> None:
        """Let nobody go for as long as an endpoint wishes."""
        per_call = {"requests": 1.0, "tokens": max(1.0, self._estimate.typical)}
        wishes = (told_pause_s(headers, kind, amount) for kind, amount in per_call.items())
        pause_s = min(_LONGEST_HOLD_S, max(retry_after_s, *wishes))
        if pause_s > 0:
            self._owed_hold_s = max(self._owed_hold_s, self._clock() + pause_s)
            self._pay()

    def release(self) -> None:
        """Give back the place of a call that is over."""
        self._under_way -= 1
        if self._cap is not None and self._books.went_last and self._books.others()[1]:
            self._yields_until_s = self._clock() + 1.5 * _LOOK_AGAIN_S  # who waits elsewhere finds out by looking
        self._let_go()

    def _pay(self) -> None:
        """Put what is owed into the books, so that other processes know of it, too."""
        if not self._owed_tokens and not self._owed_hold_s:
            return
        if self._books.lock():
            try:
                self._paid()
            finally:
                self._books.unlock()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_later(_BUSY_S, self._pay)

    def _let_go(self) -> None:
        """Let everybody go whose turn has come, and look again when the next one's will."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while len(self._queue):
            turn = self._queue.first()
            if turn.admitted is None or turn.admitted.done():  # cancelled a moment ago
                self._queue.pop()
                continue
            wait_s = self._take(turn)
            if wait_s > 0:
                if wait_s != math.inf and self._loop is not None and not self._loop.is_closed():
                    self._timer = self._loop.call_later(wait_s, self._let_go)
                break
            self._queue.pop()
            self._under_way += not turn.has_slot
            turn.has_slot = True
            turn.admitted.set_result(None)
        self._tell()

    def _tell(self) -> None:
        self._books.tell(self._under_way, len(self._queue))

    def _take(self, turn: Turn) -> float:
        """Take what a call needs, or the seconds after which to look again; infinite: when a call of ours is over."""
        if not self._books.lock():
            return _BUSY_S
        try:
            return self._take_locked(turn)
        finally:
            self._books.unlock()

    def _take_locked(self, turn: Turn) -> float:
        books, now_s = self._books, self._clock()
        requests_s, tokens_s, held_s = self._paid()
        share = books.share
        if share <= 0:
            return _NO_SHARE_S
        if self._cap is not None and not turn.has_slot:
            others, _ = books.others()
            if self._under_way + others >= max(1, int(self._cap * share + _TINY)):
                books.forget_the_dead()
                return _LOOK_AGAIN_S if others else math.inf
            if now_s < self._yields_until_s:
                return self._yields_until_s - now_s
        tokens = self._estimate.of(turn.size, turn.most_output) if self._tokens_per_s and turn.asks else 0.0
        request_takes_s = 1 / (self._requests_per_s * share) if self._requests_per_s else 0.0
        tokens_take_s = tokens / (self._tokens_per_s * share) if tokens else 0.0
        free_s = max(held_s, requests_s if request_takes_s else 0.0, tokens_s if tokens_take_s else 0.0)
        if books.went_last and books.others()[1]:  # or the one who went last would be the first to come again
            free_s += min(_YIELD_S, max(request_takes_s, tokens_take_s) / 4)
        if now_s < free_s:
            return free_s - now_s
        if request_takes_s:
            requests_s = free_again_s(requests_s, now_s, request_takes_s)
        if tokens_take_s:
            tokens_s = free_again_s(tokens_s, now_s, tokens_take_s)
        turn.charged = tokens
        books.write(Times(requests_s, tokens_s, held_s), has_gone=True)
        books.tell(self._under_way + (not turn.has_slot), len(self._queue) - 1)
        return 0.0

    def _paid(self) -> Times:
        """The times in the books, into which what was owed has been put; needs the lock."""
        times, rate = self._books.read(), self._tokens_per_s * self._books.share
        if not self._owed_tokens and not self._owed_hold_s:
            return times
        if self._owed_tokens and rate > 0:
            times = times._replace(tokens_s=times.tokens_s + self._owed_tokens / rate)
        times = times._replace(held_s=max(times.held_s, self._owed_hold_s))
        self._books.write(times, has_gone=False)
        self._owed_tokens = self._owed_hold_s = 0.0
        return times


def told_pause_s(headers: Mapping[str, str], kind: str, per_call: float, now_s: float | None = None) -> float:
    """How long the next call should wait by what `x-ratelimit-*` say of `kind` (requests or tokens); 0: not at all.

    Nothing left: until the limit is reset. Little left: so that it lasts until then, if calls cost `per_call`.
    """
    remaining = _number_of(_header(headers, "remaining", kind))
    reset_s = duration_s(_header(headers, "reset", kind), now_s)
    if remaining is None or reset_s is None:
        return 0.0
    limit = _number_of(_header(headers, "limit", kind))
    if remaining <= 0:
        return reset_s
    if limit is None or remaining >= limit * _SCARCE:
        return 0.0
    return reset_s / (1 + remaining // per_call)


def _header(headers: Mapping[str, str], what: str, kind: str) -> str | None:
    found = headers.get(f"x-ratelimit-{what}-{kind}")
    return headers.get(f"x-ratelimit-{what}") if found is None and kind == "requests" else found


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(?<!\d)(\d++(?:\.\d++)?)(ms|[smhd])")
_AN_EPOCH_S = 1e9


def duration_s(text: str | None, now_s: float | None = None) -> float | None:
    """The seconds that `6m0s`, `200ms`, `1.5` or a time since the epoch (in seconds or milliseconds) stands for."""
    if text is None:
        return None
    number = _number_of(text)
    if number is not None:
        if number < _AN_EPOCH_S:
            return number
        moment_s = number / 1000 if number > _AN_EPOCH_S * 1000 else number
        return max(0.0, moment_s - (time.time() if now_s is None else now_s))
    text = text.strip().lower()
    parts = _PART.findall(text)
    if not parts or "".join(amount + unit for amount, unit in parts) != text:
        return None
    return sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)


def _number_of(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _number_in(usage: Mapping[str, Any], *names: str) -> float | None:
    """The first of these numbers that is there and makes sense."""
    found = (usage.get(name) for name in names)
    return next((float(number) for number in found if isinstance(number, int | float) and 0 <= number < _ABSURD), None)
