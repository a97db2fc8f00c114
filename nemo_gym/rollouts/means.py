"""The running mean reward of each agent, with its 95 % interval.

A failure has no reward and does not enter the mean. What the mean would be if failures were worth 0 is
shown beside it, so that nobody has to guess which of the two a number is.
"""

from collections import Counter
from collections.abc import Mapping

from nemo_gym.metrics.intervals import Estimate, RunningMean
from nemo_gym.rollouts.progress_state import RewardTotal
from nemo_gym.terminal import shown

REWARD = "reward"
_NAME_LENGTH = 40


class AgentMeans:
    """Rewards as they come in; memory grows with the number of tasks, not of rollouts."""

    def __init__(self) -> None:
        self._means: dict[str, RunningMean] = {}
        self._rollouts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, agent: str, task: object, reward: object) -> None:
        """Count a successful rollout; one whose reward is no number is left out."""
        if not isinstance(reward, int | float):
            return
        self._rollouts[agent] += 1
        if agent not in self._means:
            self._means[agent] = RunningMean()
        # A rollout that belongs to no task counts as one of its own.
        number = task if isinstance(task, int) else -self._rollouts[agent]
        self._means[agent].add(number, float(reward))

    def add_failure(self, agent: str) -> None:
        """Count a rollout that failed for good."""
        self._failures[agent] += 1

    def totals(self) -> dict[str, RewardTotal]:
        """What the means of several runs can be added up from."""
        return {agent: RewardTotal(*mean.total(), self._failures[agent]) for agent, mean in sorted(self._means.items())}

    @classmethod
    def of_totals(cls, totals: Mapping[str, RewardTotal]) -> "AgentMeans":
        """The means that totals come to; they have no intervals."""
        means = cls()
        for agent, total in totals.items():
            means._means[agent] = RunningMean.of_total(total.reward, total.rollouts)
            means._rollouts[agent], means._failures[agent] = total.rollouts, total.failures
        return means

    def estimates(self, count: int) -> dict[str, Estimate]:
        """The means of the agents with most rollouts, by name."""
        most = sorted(agent for agent, _ in self._rollouts.most_common(count))
        return {agent: self._means[agent].estimate() for agent in most}

    def text(self, count: int = 3) -> str:
        """`agent_a 0.61 [0.52, 0.7] (0.55 if failures were 0), agent_b 0.4, 2 more`; empty without rewards."""
        parts = [
            f"{shown(agent, _NAME_LENGTH)} {_numbers(estimate, self._failures[agent])}"
            for agent, estimate in self.estimates(count).items()
        ]
        if len(self._means) > count:
            parts.append(f"{len(self._means) - count} more")
        return ", ".join(parts)


def _numbers(estimate: Estimate, failures: int) -> str:
    if estimate.mean is None:
        return "?"
    text = f"{estimate.mean:.3g}"
    if estimate.ci95 is not None:
        text += f" [{estimate.ci95[0]:.3g}, {estimate.ci95[1]:.3g}]"
    if failures:
        text += f" ({estimate.mean * estimate.rollouts / (estimate.rollouts + failures):.3g} if failures were 0)"
    return text
