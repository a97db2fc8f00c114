"""The numbers behind the profile page, taken from a reward profile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.keys import AGENT_REF_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.columns import REWARD
from nemo_gym.metrics.intervals import Estimate, clustered_mean

Floats = NDArray[np.float64]

_TOKEN_FIELDS = ("output_tokens", "completion_tokens", "total_tokens")
"""What a rollout's length is measured in, the first that any rollout has."""
_NO_AGENT = "(no agent)"


@dataclass(frozen=True)
class Failures:
    """The failures of one class."""

    name: str
    attempts: int
    rollouts: int
    """Different rollouts among them."""


@dataclass
class AgentNumbers:
    """One line of the table of agents."""

    name: str
    tasks: int
    scored_tasks: int
    """Those with at least one reward."""
    rollouts: int
    expected_rollouts: int
    reward: Estimate
    never: int
    """Tasks of which no rollout got a reward above 0."""
    always: int
    """Tasks of which every rollout got a reward of 1 or more."""
    mean_tokens: float | None

    @property
    def sometimes(self) -> int:
        """Scored tasks in between."""
        return self.scored_tasks - self.never - self.always


@dataclass
class ProfileNumbers:
    """Everything the page shows."""

    agents: list[AgentNumbers]
    task_means: Floats
    """The mean reward of each task."""
    rewards: Floats
    """Of each rollout that has one."""
    token_field: str | None
    """What tokens are counted in; None when no rollout says."""
    tokens: Floats
    """Of each rollout that tells."""
    scored_tokens: Floats
    scored_rewards: Floats
    """Tokens and reward of each rollout that has both."""
    output_items: Floats
    """How many items each rollout's response has."""
    failures: list[Failures] = field(default_factory=list)

    @property
    def is_binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(np.all((self.rewards == 0) | (self.rewards == 1)))


def numbers_of(
    profiles: Sequence[Mapping[str, Any]],
    output_items: Iterable[float] = (),
    failures: Iterable[Failures] = (),
) -> ProfileNumbers:
    """The numbers of a profile: one entry per task, as `RewardProfiler.profile_from_data` makes them."""
    infos = [info for profile in profiles for info in profile["rollout_infos"]]
    token_field = next((name for name in _TOKEN_FIELDS if any(name in info for info in infos)), None)
    both = [info for info in infos if _is_number(info.get(REWARD)) and _is_number(info.get(token_field))]
    return ProfileNumbers(
        agents=_agents(profiles, token_field),
        task_means=_floats(profile.get(f"mean/{REWARD}") for profile in profiles),
        rewards=_floats(info.get(REWARD) for info in infos),
        token_field=token_field,
        tokens=_floats(info.get(token_field) for info in infos),
        scored_tokens=_floats(info[token_field] for info in both),
        scored_rewards=_floats(info[REWARD] for info in both),
        output_items=_floats(output_items),
        failures=sorted(failures, key=lambda of_class: (-of_class.attempts, of_class.name)),
    )


def _agents(profiles: Sequence[Mapping[str, Any]], token_field: str | None) -> list[AgentNumbers]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for profile in profiles:
        by_name.setdefault(_agent_name(profile), []).append(profile)
    return [_agent(name, of_agent, token_field) for name, of_agent in sorted(by_name.items())]


def _agent(name: str, profiles: list[Mapping[str, Any]], token_field: str | None) -> AgentNumbers:
    infos = [info for profile in profiles for info in profile["rollout_infos"]]
    scored = [info for info in infos if _is_number(info.get(REWARD))]
    tokens = _floats(info.get(token_field) for info in infos)
    return AgentNumbers(
        name=name,
        tasks=len(profiles),
        scored_tasks=sum(f"mean/{REWARD}" in profile for profile in profiles),
        rollouts=len(infos),
        expected_rollouts=sum(profile["expected_num_rollouts"] for profile in profiles),
        reward=clustered_mean([info[REWARD] for info in scored], [info[TASK_INDEX_KEY_NAME] for info in scored]),
        never=sum(profile.get(f"max/{REWARD}", 1) <= 0 for profile in profiles),
        always=sum(profile.get(f"min/{REWARD}", 0) >= 1 for profile in profiles),
        mean_tokens=float(tokens.mean()) if len(tokens) else None,
    )


def _agent_name(profile: Mapping[str, Any]) -> str:
    agent_ref = profile["sample"].get(AGENT_REF_KEY_NAME)
    name = agent_ref.get("name") if isinstance(agent_ref, Mapping) else None
    return name if isinstance(name, str) else _NO_AGENT


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _floats(values: Iterable[Any]) -> Floats:
    return np.array([float(value) for value in values if _is_number(value)], np.float64)
