"""Caps that adapt, where a run is worked on in shards: the driver decides for all of them, each only measures.

A shard says with every report what has become of its attempts. Added up over all shards, that is what a run in one
process would know of itself.
"""

import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import reduce

from nemo_gym.collect.adaptive import AdaptiveConcurrency, Load, controllers_for, notice_of, with_adaptive_caps
from nemo_gym.collect.dispatch import Dispatch
from nemo_gym.executors.caps import Report
from nemo_gym.runs.options import Concurrency, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.options.steering import Bounds
from nemo_gym.runs.rows import InputRows


class Leader:
    """Decides on the caps of all shards together."""

    def __init__(self, bounds: Mapping[str, Bounds], agents: Iterable[str], now_s: float) -> None:
        self._controllers = controllers_for(bounds, agents, now_s)
        self._loads: dict[Hashable, Mapping[str, Load]] = {}

    @classmethod
    def of(cls, config: RolloutCollectionConfig) -> "Leader | None":
        """One for all agents that the rows of a run name; None where no cap adapts."""
        if not config.adaptive:
            return None
        return cls(config.adaptive, InputRows(config).scan.rows_of_agent, time.monotonic())

    @property
    def caps(self) -> dict[str, int]:
        """The caps that adapt, over all shards together."""
        return {agent: controller.cap for agent, controller in self._controllers.items()}

    def most(self, concurrency: Concurrency) -> Concurrency:
        """The caps of a run, those that adapt as high as they may become."""
        highest = {agent: controller.bounds.high for agent, controller in self._controllers.items()}
        return with_adaptive_caps(concurrency, highest)

    def look(self, reports: Iterable[Report], running: Collection[Shard]) -> dict[str, int]:
        """The caps to go by after these reports, of which those of `running` shards tell what is in flight."""
        in_flight: Counter[str] = Counter()
        for report in reports:
            self.note((report.shard, report.attempt), report.loads)
            if report.shard in running:
                in_flight.update(report.in_flight)
        self.step(time.monotonic(), in_flight)
        return self.caps

    def note(self, shard: Hashable, loads: Mapping[str, Load]) -> None:
        """What a shard says has become of its attempts; one that was started again counts as another."""
        self._loads[shard] = loads

    def step(self, now_s: float, in_flight: Mapping[str, int]) -> None:
        """Decide anew by what all shards have said."""
        for agent, controller in self._controllers.items():
            told = [loads[agent] for loads in self._loads.values() if agent in loads]
            controller.step(now_s, reduce(Load.plus, told, Load()), in_flight.get(agent, 0))

    def notice(self) -> str:
        """For the progress line."""
        return notice_of(self.caps)


def led_by_the_driver(dispatch: Dispatch) -> AdaptiveConcurrency | None:
    """What measures in this shard, if any cap adapts; from now on it decides nothing."""
    adaptive = next((each for each in dispatch.policies if isinstance(each, AdaptiveConcurrency)), None)
    if adaptive is not None:
        adaptive.is_led = True
    return adaptive
