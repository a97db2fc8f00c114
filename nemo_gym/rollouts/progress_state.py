"""How far a run is, as numbers that can be sent elsewhere and added up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class RewardTotal(NamedTuple):
    """What one agent's rollouts of a run come to."""

    reward: float
    rollouts: int
    failures: int


@dataclass(frozen=True)
class ProgressState:
    """The numbers of one run, or of several together."""

    finished: int = 0
    """Rollouts in the file, earlier ones included."""
    failed: int = 0
    given_up_before: int = 0
    discarded: int = 0
    retries: int = 0
    in_flight: int = 0
    rewards: Mapping[str, RewardTotal] = field(default_factory=dict)
    """By agent, of the rollouts since the run was started or resumed."""

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> "ProgressState":
        """What `dataclasses.asdict` made of one, after a journey as JSON."""
        rewards = {agent: RewardTotal(*total) for agent, total in data["rewards"].items()}
        return cls(**{**data, "rewards": rewards})


def total_of(states: Iterable[ProgressState]) -> ProgressState:
    """The numbers of all of them together."""
    listed = list(states)
    rewards: dict[str, RewardTotal] = {}
    for state in listed:
        for agent, total in state.rewards.items():
            so_far = rewards.get(agent, RewardTotal(0.0, 0, 0))
            rewards[agent] = RewardTotal(
                so_far.reward + total.reward, so_far.rollouts + total.rollouts, so_far.failures + total.failures
            )
    return ProgressState(
        finished=sum(state.finished for state in listed),
        failed=sum(state.failed for state in listed),
        given_up_before=sum(state.given_up_before for state in listed),
        discarded=sum(state.discarded for state in listed),
        retries=sum(state.retries for state in listed),
        in_flight=sum(state.in_flight for state in listed),
        rewards=rewards,
    )
