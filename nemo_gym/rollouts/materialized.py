"""The materialized file: every row a run sends, complete before the first request.

It is written aside and renamed, so it is never seen half written. When a run is extended, the rows it
already had must come out unchanged: their results are in the rollouts file.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from nemo_gym.jsonl import count_lines, ends_torn, write_aside
from nemo_gym.rollouts.changes import RunChangedError
from nemo_gym.rollouts.compact import IntSet
from nemo_gym.rollouts.manifest import Expected
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.repair import sound_records
from nemo_gym.rollouts.rows import Repeats
from nemo_gym.rollouts.scan import line_hash

logger = logging.getLogger(__name__)

ExpectedByAgent = dict[str, Expected]


def write_rows(rows: Iterable[Repeats], file: BinaryIO, former: IntSet | None = None) -> ExpectedByAgent:
    """Write every row and count what the run asks of each agent.

    Raises:
        RunChangedError: a row of `former`, hashes of lines, is not among them.
    """
    rollouts: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    found = 0
    for agent, first_rollout_index, lines in rows:
        file.write(b"".join(lines))
        rollouts[agent] += len(lines)
        tasks[agent] += first_rollout_index == 0
        if former is not None:
            found += sum(line_hash(line.strip()) in former for line in lines)
    if former is not None and found < len(former):
        raise RunChangedError(
            f"{len(former) - found} of the {len(former)} rows of the earlier run would come out differently now (rows "
            "that share one _ng_task_index, perhaps), so their results would be taken for those of other rows. "
            "Start afresh without +resume_from_cache=true, or accept it with +allow_changed_config=true"
        )
    return {agent: Expected(tasks=tasks[agent], rollouts=count) for agent, count in rollouts.items()}


def rewrite_rows(rows: Iterable[Repeats], paths: RolloutPaths, *, must_keep: bool) -> ExpectedByAgent:
    """Replace the materialized file; with `must_keep`, only if every row that was in it stays."""
    former = _hashes_of_rows(paths) if must_keep else None
    with write_aside(paths.materialized_inputs) as file:
        expected = write_rows(rows, file, former)
    logger.info("%s was written anew", paths.materialized_inputs)
    return expected


def is_complete(path: Path, expected_rollouts: int) -> bool:
    """Whether the file has exactly the lines it should have, as far as can be told without parsing them."""
    return path.exists() and not ends_torn(path) and count_lines(path) == expected_rollouts


def _hashes_of_rows(paths: RolloutPaths) -> IntSet:
    hashes = IntSet()
    for record in sound_records(paths.materialized_inputs, paths.materialized_inputs_corrupt):
        hashes.add(line_hash(record.content))
    return hashes
