"""A clock that jumps: Python loads this before anything else when its folder is on the path.

The wall clock is off by as many seconds as the file CHAOS_CLOCK says, read at every look at it; the monotonic
clock, which no administrator can set, goes on as it does. (libfaketime cannot tell them apart in the sleeps of
Python 3.11 and newer.)
"""

import datetime
import os
import time
from pathlib import Path

_CLOCK = Path(os.environ["CHAOS_CLOCK"])
_TRUE_TIME_NS = time.time_ns


def _time_ns() -> int:
    return _TRUE_TIME_NS() + int(_CLOCK.read_text() or 0) * 10**9


def _time() -> float:
    return _time_ns() / 1e9


class _JumpingDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_JumpingDatetime":
        """The time that everybody else sees."""
        return cls.fromtimestamp(_time(), tz)


time.time, time.time_ns = _time, _time_ns
datetime.datetime = _JumpingDatetime  # type: ignore[misc]
