"""What a run in shards came to, added up from what its shards say and from what lies on disk."""

from collections.abc import Iterable
from pathlib import Path

from nemo_gym.distributed.driver import ShardRecord
from nemo_gym.rollouts.failure_table import FailuresOfClass
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.stop_rules import Stop
from nemo_gym.rollouts.summary import RunSummary


def summary_of(
    output: Path, records: Iterable[ShardRecord], *, expected: int, finished_before: int, stopped: Stop | None
) -> RunSummary:
    """The summary of the whole run; a shard that has none of its own counts with its file."""
    summary = RunSummary(
        RolloutPaths(output),
        expected=expected,
        finished_before=finished_before,
        owed=expected - finished_before,
        stopped=stopped,
    )
    finished = 0
    for record in records:
        own = record.end.summary if record.end is not None else None
        if own is None:
            finished += record.rollouts_on_disk()
            continue
        finished += own["finished"]
        summary.counts[Outcome.FAILURE] += own["failed"]
        summary.counts[Outcome.DISCARDED] += own["discarded"]
        summary.given_up += own["given_up"]
        summary.tokens.update(own["tokens"])
        for name, failures in own["failures"].items():
            of_class = summary.failures.by_class.setdefault(name, FailuresOfClass(failures["example"]))
            of_class.attempts += failures["attempts"]
            of_class.rollouts += failures["rollouts"]
    summary.counts[Outcome.SUCCESS] = max(0, finished - finished_before)
    return summary
