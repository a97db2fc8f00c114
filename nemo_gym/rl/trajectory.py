"""One attempt at a prompt on the native path: what it has come to, and the rules by which it grows."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.rl.interfaces import Completion, DatumSpec, EnvironmentReturn, Message, MessageLog
from nemo_gym.rl.tensors import as_list, token_tensor

logger = logging.getLogger(__name__)


@dataclass
class Trajectory:
    """Grows by one assistant message and one observation per turn."""

    message_log: MessageLog
    env_info: Any
    stop_strings: list[str] | None
    max_seq_len: int
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    turn_count: int = 0
    env_tokens: int = 0
    turn_gen_tokens: list[int] = field(default_factory=list)
    turn_input_tokens: list[int] = field(default_factory=list)
    per_worker_token_counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, sample: DatumSpec, max_seq_len: int) -> "Trajectory":
        """A trajectory of its own: nothing in it is shared with the sample."""
        return cls(
            message_log=deepcopy(sample["message_log"]),
            env_info=deepcopy(sample["extra_env_info"]),
            stop_strings=sample.get("stop_strings"),
            max_seq_len=max_seq_len,
        )

    @property
    def has_ended(self) -> bool:
        """Whether no further turn may follow."""
        return self.terminated or self.truncated

    def add_generation(self, message: Message, input_length: int, facts: Mapping[str, Any]) -> None:
        """Append what the policy said, with what the generator told about it."""
        generated = len(message["token_ids"])
        self.message_log.append(message)
        self.truncated = self.truncated or bool(facts.get("truncated"))
        self.turn_gen_tokens.append(generated)
        self.turn_input_tokens.append(input_length)
        worker = facts.get("gen_leader_worker_idx")
        if worker is not None:
            self.per_worker_token_counts[worker] = self.per_worker_token_counts.get(worker, 0) + generated

    def add_step(self, step: EnvironmentReturn, reward: float, observation_ids: Any) -> None:
        """Append what the environment answered; reaching the length limit, even exactly, truncates.

        A step that ends the trajectory changes neither its state nor its stop strings.
        """
        observation = step.observations[0]
        self.reward += reward
        self.terminated = bool(as_list(step.terminateds)[0])
        used = self.turn_input_tokens[-1] + self.turn_gen_tokens[-1]
        if used + len(observation_ids) >= self.max_seq_len:
            observation_ids = observation_ids[: max(0, self.max_seq_len - used)]
            self.truncated = True
        self.message_log.append(
            {"role": observation["role"], "content": observation["content"], "token_ids": token_tensor(observation_ids)}
        )
        self.env_tokens += len(observation_ids)
        if self.has_ended:
            return
        if step.next_stop_strings is not None and step.next_stop_strings[0] is not None:
            self.stop_strings = step.next_stop_strings[0]
        if step.metadata[0] is not None:
            self.env_info = step.metadata[0]

    def completion(self) -> Completion:
        """The trajectory as a trainer gets it."""
        return Completion(self.message_log, self.env_info, self.truncated, self.reward)

    def numbers(self, *, max_turns_reached: bool) -> dict[str, Any]:
        """What enters the metrics of its group."""
        assistant_tokens = sum(self.turn_gen_tokens)
        return {
            "turn_count": self.turn_count,
            "total_tokens": assistant_tokens + self.env_tokens,
            "assistant_tokens": assistant_tokens,
            "env_tokens": self.env_tokens,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "max_turns_reached": max_turns_reached,
            "total_reward": self.reward,
            "turn_gen_tokens": self.turn_gen_tokens,
            "turn_input_tokens": self.turn_input_tokens,
            "turn_total_tokens": [sum(pair) for pair in zip(self.turn_gen_tokens, self.turn_input_tokens, strict=True)],
            "per_worker_token_counts": self.per_worker_token_counts,
        }


def leader_worker(value: Any) -> int | None:
    """The worker that generated a row, given per row as an int or as a list of one; anything else is no worker."""
    if value is None:
        return None
    rows = value.tolist() if hasattr(value, "tolist") else value
    worker = rows[0] if isinstance(rows, list) and rows else rows
    if isinstance(worker, list) and len(worker) == 1:
        worker = worker[0]
    if type(worker) is int:
        return worker
    logger.warning("gen_leader_worker_idx is %r, neither numbers nor lists of one; its tokens are not counted", value)
    return None
