"""What the parts of a large run cost on this machine, in processor seconds: what `simulate_scale.py` reckons with.

    python tests/perf/scale_costs.py > tests/perf/data/scale_costs.json

Every figure is taken from the real code. With Ray installed (`.venv-ray/bin/python`) a report to the board is measured
as a call of a Ray actor, otherwise without the way there.
"""

import asyncio
import importlib.util
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from nemo_gym.collect.progress import ProgressState, RewardTotal
from nemo_gym.combine.aggregation import RolloutAggregationHelper
from nemo_gym.combine.shard_metrics import Hooks
from nemo_gym.executors.caps import TOTAL, Board, Report
from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.runs.options import RolloutAggregationConfig, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.record import Result
from nemo_gym.runs.rows import InputRows
from tests.executors.conftest import write_environment

ROWS, ROW_BYTES = 50_000, 1_000
RECORDS, RECORD_BYTES = 50_000, 2_000
ROLLOUTS_FEW, ROLLOUTS_MANY = 16, 2_016
REPORTING_SHARDS = 1_000
RAY_REPORTS = 2_000


class _Plain:
    def hooks_of(self, agent: str) -> Hooks | None:
        return Hooks()

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        return compute_aggregate_metrics(list(records)).model_dump()


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def row_s() -> float:
    """Reading, checking and numbering one input row, both passes, in a shard that keeps few of them."""
    rows = [{"n": n, "responses_create_params": {"input": "x" * (ROW_BYTES - 60)}} for n in range(ROWS)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "o.jsonl", "agent_name": "a", "shard": "1/1000"}
    config = RolloutCollectionConfig.model_validate(options)
    return _cpu_s(lambda: [None for _ in InputRows(config)]) / ROWS


def aggregate_s() -> float:
    """Merging one record and computing its share of the metrics."""
    for shard in range(4):
        with Path(f"s-{shard}.jsonl").open("w") as file:
            for n in range(shard, RECORDS, 4):
                record = {"_ng_task_index": n // 16, "_ng_rollout_index": n % 16, "agent_ref": {"name": "a"}}
                usage = {"input_tokens": n, "output_tokens": 7, "total_tokens": n + 7}
                content = {"reward": n % 2, "response": {"usage": usage}, "text": "x" * (RECORD_BYTES - 200)}
                file.write(json.dumps({**record, **content}) + "\n")
    given = {"input_glob": "s-*.jsonl", "output_jsonl_fpath": "merged.jsonl", "offline": True}
    config = RolloutAggregationConfig.model_validate(given)
    helper = RolloutAggregationHelper(loader=_Plain)
    return _cpu_s(lambda: asyncio.run(helper.aggregate(config))) / RECORDS


def _run_cpu_s(rollouts: int) -> float:
    """The processor time of a whole `ng_e2e_collect_rollouts`, its servers included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(Path(sys.executable).with_name("ng_e2e_collect_rollouts")), "+config_paths=[config.yaml]"]
    given = ["+split=train", f"+num_repeats={rollouts // 8}", f"+output_jsonl_fpath=r{rollouts}.jsonl"]
    subprocess.run([*command, *given, "+head_server.port=0"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rollout_and_start_s() -> tuple[float, float]:
    """One rollout in a shard, servers and collector together, and the start of a shard."""
    write_environment(Path.cwd())
    few, many = _run_cpu_s(ROLLOUTS_FEW), _run_cpu_s(ROLLOUTS_MANY)
    each = (many - few) / (ROLLOUTS_MANY - ROLLOUTS_FEW)
    return each, few - ROLLOUTS_FEW * each


def _report(shard: int) -> Report:
    state = ProgressState(1_000, 3, 0, 0, 5, 64, {"agent": RewardTotal(500.0, 1_000, 3)})
    return Report(Shard(shard, REPORTING_SHARDS), 1, "node-name", state, {TOTAL: 64}, {TOTAL: 64})


def report_s() -> float:
    """One report of a shard, on the board's processor."""
    if importlib.util.find_spec("ray") is None:
        board = Board({TOTAL: 100_000})
        reports = [_report(shard) for shard in range(REPORTING_SHARDS)]
        return _cpu_s(lambda: [pickle.dumps(board.report(pickle.loads(pickle.dumps(each)))) for each in reports]) / len(
            reports
        )
    ray: Any = importlib.import_module("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    board = ray.remote(num_cpus=0)(Board).remote({TOTAL: 100_000})
    ray.get(board.report.remote(_report(0)))
    started_s = time.perf_counter()
    ray.get([board.report.remote(_report(n % REPORTING_SHARDS)) for n in range(RAY_REPORTS)])
    each = (time.perf_counter() - started_s) / RAY_REPORTS
    ray.shutdown()
    return each


def look_s() -> float:
    """The driver's look at the board, per shard."""
    board = Board({TOTAL: 100_000})
    for shard in range(REPORTING_SHARDS):
        board.report(_report(shard))
    return _cpu_s(lambda: pickle.loads(pickle.dumps(board.look({}, stop=False, at_once=False)))) / REPORTING_SHARDS


def main() -> None:
    """Measure everything and print it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rollout, start = rollout_and_start_s()
        costs = {
            "row_s": row_s(),
            "row_bytes": ROW_BYTES,
            "rollout_cpu_s": rollout,
            "shard_start_s": start,
            "aggregate_s": aggregate_s(),
            "report_s": report_s(),
            "look_s_per_shard": look_s(),
        }
        os.chdir("/")
    print(json.dumps({name: float(f"{value:.3g}") for name, value in costs.items()}, indent=2))


if __name__ == "__main__":
    main()
