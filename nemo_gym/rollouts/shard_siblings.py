"""What lies beside the rollouts of a run cut into shards, put together like the rollouts themselves.

With it the merged output is what the run would have written in one piece, and other commands can go on from there.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from nemo_gym.jsonl import to_line, write_aside
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.shard_index import ShardIndex
from nemo_gym.rollouts.shard_merge import write_merged
from nemo_gym.rollouts.sidecar import readable_records

logger = logging.getLogger(__name__)


def merge_siblings(shards: Iterable[Path], output: RolloutPaths) -> None:
    """Write the materialized inputs and the failures of all shards beside the merged output.

    Those of a run that was collected there are left alone, as are materialized inputs of which a part is missing.
    """
    if output.manifest.exists():
        return
    of_shards = [RolloutPaths(path) for path in shards]
    with write_aside(output.failures) as file:
        for paths in of_shards:
            file.writelines(to_line(record) for record in readable_records(paths.failures))
    absent = [paths.materialized_inputs for paths in of_shards if not paths.materialized_inputs.exists()]
    if absent:
        logger.warning("%s is not written: %s is not there", output.materialized_inputs, absent[0])
        return
    index = ShardIndex([paths.materialized_inputs for paths in of_shards])
    index.read()
    write_merged(index, index.in_key_order(), output.materialized_inputs)
