"""Where running shards report and read what to do, and the driver reads how they are doing.

Under Ray it is an actor. A board that was lost and started anew learns everything from the next reports, and the
driver repeats with every look what it wants.
"""

from collections.abc import Collection, Mapping

from nemo_gym.distributed.messages import Instruction, Report
from nemo_gym.distributed.shares import CapShares
from nemo_gym.rollouts.sharding import Shard


class Board:
    """The latest word of every shard."""

    def __init__(self, caps: Mapping[str, int]) -> None:
        self._shares = CapShares(caps)
        self._reports: dict[Shard, Report] = {}
        self._over: dict[Shard, int] = {}
        """The last attempt at each shard that is over."""
        self._stop = self._at_once = False

    def report(self, report: Report) -> Instruction:
        """Take a shard's report; what it is to do."""
        if report.attempt <= self._over.get(report.shard, 0):
            return Instruction(stop=True, at_once=True)  # it was given up for lost, and another one is on its way
        self._reports[report.shard] = report
        caps = self._shares.exchange(report.shard, report.caps, report.in_flight, is_draining=report.is_draining)
        return Instruction(caps, self._stop, self._at_once)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Collection[Report]:
        """The latest reports, for the driver, which says what it knows: attempts that are over, and whether to stop."""
        self._stop, self._at_once = stop, at_once
        for shard, attempt in over.items():
            if attempt > self._over.get(shard, 0):
                self._over[shard] = attempt
                self._shares.leave(shard)
        return list(self._reports.values())
