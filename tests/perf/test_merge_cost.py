"""What merging shards costs, next to parsing every line of them once with orjson and throwing the result away.

Over 100,000 records of 2 KB in four shards: the merge alone within 3 x, with metrics computed here within 6 x, be the
agent's class plain (only numbers are kept) or one with a hook (which gets every record; what the hook itself does is
its author's business, so pass@k and majority@k are shown, not judged). Processor time counts, so that neighbours on the
machine do not. Memory is that of a process of its own, at 25,000 and at 100,000 records: what the larger merge needs
more is the index, not the records.
"""

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.combine.aggregation import RolloutAggregationHelper
from nemo_gym.combine.merge import settle_duplicates, write_merged
from nemo_gym.combine.shard_metrics import Hooks
from nemo_gym.metrics.hooks import ComputeMetrics, Metrics
from nemo_gym.reward_profile import compute_pass_majority_metrics
from nemo_gym.runs.index import RecordIndex
from nemo_gym.runs.options import RolloutAggregationConfig
from nemo_gym.runs.record import Result
from tests.perf.side_by_side.estimates import Target, hold

RECORDS, SHARDS, ROLLOUTS = 100_000, 4, 32
MOST_FOR_MERGE, MOST_WITH_METRICS = 3.0, 6.0
MOST_BYTES_PER_RECORD = 200
ROUNDS = 3
PEAK = """
import sys
from pathlib import Path
from nemo_gym.runs.index import RecordIndex
from nemo_gym.combine.merge import settle_duplicates, write_merged
index = RecordIndex(sorted(Path(sys.argv[1]).glob("shard-*.jsonl")))
index.read()
write_merged(index, settle_duplicates(index, "error").order, Path(sys.argv[1]) / "merged.jsonl")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


class Source:
    """An agent's class, built in this process."""

    def __init__(self, compute_metrics: ComputeMetrics | None) -> None:
        self._hooks = Hooks(compute_metrics)

    def hooks_of(self, agent: str) -> Hooks:
        return self._hooks

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        raise AssertionError("its class is here")


def pass_at_k(tasks: list[list[Result]]) -> Metrics:
    return compute_pass_majority_metrics(tasks, answer_key="answer")[0]


def write_shards(folder: Path, records: int) -> list[Path]:
    """Shards in the order rollouts finish: tasks one after the other, their rollouts shuffled a little."""
    text = "The quick brown fox jumps over the lazy dog and thinks about it. " * 26
    paths = []
    for shard in range(SHARDS):
        first, last = (records // ROLLOUTS * place // SHARDS for place in (shard, shard + 1))
        lines = []
        for task in range(first, last):
            for rollout in sorted(range(ROLLOUTS), key=lambda rollout: rollout * 13 % 32):
                lines.append(orjson.dumps(record(task, rollout, text), option=orjson.OPT_APPEND_NEWLINE))
        paths.append(folder / f"shard-{shard}.jsonl")
        paths[-1].write_bytes(b"".join(lines))
    return paths


def record(task: int, rollout: int, text: str) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": text[:500]}]},
        "response": {
            "id": f"resp_{task}_{rollout}",
            "output": [{"type": "message", "content": [{"type": "output_text", "text": text[: 1100 + rollout]}]}],
            "usage": {"input_tokens": 90 + task % 50, "output_tokens": rollout * 7, "total_tokens": 90 + rollout * 7},
        },
        "reward": float((task + rollout) % 3 == 0),
        "answer": str(rollout % 5),
        "parsed": rollout % 7 > 0,
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    }


def bare_pass(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)


def merge(paths: list[Path]) -> None:
    index = RecordIndex(paths)
    index.read()
    write_merged(index, settle_duplicates(index, "error").order, paths[0].with_name("merged.jsonl"))


def aggregate(paths: list[Path], compute_metrics: ComputeMetrics | None = None) -> None:
    config = RolloutAggregationConfig(
        input_glob=",".join(map(str, paths)),
        output_jsonl_fpath=str(paths[0].with_name("aggregated.jsonl")),
        offline=True,
    )
    source = Source(compute_metrics)
    asyncio.run(RolloutAggregationHelper(loader=lambda: source).run_from_config(config))


def test_merging_costs_little_more_than_parsing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shards(tmp_path, RECORDS)
    size = sum(path.stat().st_size for path in paths)
    tries: dict[str, Callable[[], None]] = {
        "a bare orjson pass": lambda: bare_pass(paths),
        "merge": lambda: merge(paths),
        "merge and metrics": lambda: aggregate(paths),
        "the same with a hook": lambda: aggregate(paths, lambda tasks: {"tasks": len(tasks)}),
        "the same with pass@k": lambda: aggregate(paths, pass_at_k),
    }

    def over_a_pass() -> list[float]:  # in turn, so that a busy moment of the machine hits all alike
        seconds = []
        for run in tries.values():
            started = time.process_time()
            run()
            seconds.append(time.process_time() - started)
        return [each / seconds[0] for each in seconds[1:]]

    most = (MOST_FOR_MERGE, MOST_WITH_METRICS, MOST_WITH_METRICS, math.inf)
    targets = [Target(name, most=bound) for name, bound in zip(list(tries)[1:], most, strict=True)]
    with capsys.disabled():
        sys.stdout.write(f"\n{RECORDS:,} records of {size / RECORDS:,.0f} bytes")
        hold(over_a_pass, *targets, rounds=ROUNDS)


def test_the_memory_of_a_merge_does_not_grow_with_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {records: tmp_path / str(records) for records in (RECORDS // 4, RECORDS)}
    for records, folder in folders.items():
        folder.mkdir()
        write_shards(folder, records)

    def more_per_record() -> list[float]:
        peaks = {records: peak_bytes(folder) for records, folder in folders.items()}
        shown = ", ".join(f"{peak / 2**20:.0f} MB for {records:,} records" for records, peak in peaks.items())
        sys.stdout.write(f"\npeak memory: {shown}")
        return [(peaks[RECORDS] - peaks[RECORDS // 4]) / (RECORDS - RECORDS // 4)]

    with capsys.disabled():
        target = Target("bytes of memory for each record more", most=MOST_BYTES_PER_RECORD)
        hold(more_per_record, target, rounds=1, more=2)


def peak_bytes(folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout) * 1024
