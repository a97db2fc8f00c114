"""What a run came to: the numbers its last lines, its exit code and `+json=true` are made of."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.keys import RESPONSE_KEY_NAME
from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.failure_table import FailureTable
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.stop_rules import Stop, StopKind

EXIT_OK, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 0, 1, 130
_TOKEN_COUNTS = ("input_tokens", "output_tokens", "total_tokens")


@dataclass
class RunSummary:
    """The end of one run."""

    paths: RolloutPaths
    expected: int = 0
    """Rollouts of the whole run."""
    finished_before: int = 0
    """Rollouts an earlier run had finished."""
    given_up_before: int = 0
    """Rollouts an earlier run had given up."""
    given_up: int = 0
    """Rollouts that a resumed run would not try again, this one's and earlier ones'."""
    owed: int = 0
    """Rollouts this run had to make."""
    counts: Counter[Outcome] = field(default_factory=Counter)
    """Rollouts of this run, by how they ended."""
    failures: FailureTable = field(default_factory=FailureTable)
    """What failed in this run, and why earlier ones gave up on rollouts."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Token counts of this run's rollouts, as the models reported them."""
    wall_time_s: float = 0.0
    stopped: Stop | None = None
    """Why it ended early, if it did."""
    metrics: list[AgentMetrics] = field(default_factory=list)
    metrics_path: Path | None = None
    metrics_problem: str | None = None
    """Why there are no metrics although they were wanted."""
    metrics_unwanted: bool = False

    @property
    def finished(self) -> int:
        """Rollouts in the file."""
        return self.finished_before + self.counts[Outcome.SUCCESS]

    @property
    def missing(self) -> int:
        """Rollouts that are not in the file."""
        return max(0, self.expected - self.finished)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended it."""
        return self.stopped is not None and self.stopped.kind is StopKind.INTERRUPTED

    @property
    def exit_code(self) -> int:
        """0 only when every rollout is in the file, and the metrics are there if they were wanted."""
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        return EXIT_INCOMPLETE if self.missing or self.metrics_problem else EXIT_OK

    def count_tokens(self, result: Mapping[str, Any]) -> None:
        """Add the usage of one result."""
        response = result.get(RESPONSE_KEY_NAME)
        usage = response.get("usage") if isinstance(response, dict) else None
        if isinstance(usage, dict):
            self.tokens.update({name: usage[name] for name in _TOKEN_COUNTS if isinstance(usage.get(name), int)})

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        return {
            "output_jsonl_fpath": str(self.paths.rollouts),
            "materialized_inputs_jsonl_fpath": str(self.paths.materialized_inputs),
            "failures_jsonl_fpath": str(self.paths.failures),
            "aggregate_metrics_fpath": None if self.metrics_path is None else str(self.metrics_path),
            "manifest_fpath": str(self.paths.manifest),
            "expected": self.expected,
            "finished": self.finished,
            "finished_before": self.finished_before,
            "missing": self.missing,
            "failed": self.counts[Outcome.FAILURE] + self.given_up_before,
            "given_up": self.given_up,
            "discarded": self.counts[Outcome.DISCARDED],
            "failures": {
                name: {"attempts": of_class.attempts, "rollouts": of_class.rollouts, "example": of_class.example}
                for name, of_class in self.failures.by_class.items()
            },
            "tokens": dict(self.tokens),
            "wall_time_s": round(self.wall_time_s, 3),
            "stopped": None if self.stopped is None else {"kind": self.stopped.kind, "message": self.stopped.message},
            "exit_code": self.exit_code,
            "key_metrics": {of_agent.agent: of_agent.metrics.key_metrics for of_agent in self.metrics},
            "coverage": {of_agent.agent: of_agent.coverage for of_agent in self.metrics},
            "metrics_problem": self.metrics_problem,
        }
