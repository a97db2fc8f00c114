"""What comparing two runs costs, next to parsing every line of them once with orjson and throwing the result away.

Two runs of 100,000 rollouts of 2 KB, with their materialized inputs: at most 2.5 x in processor time, and 300 MB in a
process of its own.
"""

import subprocess
import sys
import time
from pathlib import Path

import orjson

from tests.perf.side_by_side.estimates import Target, hold

ROLLOUTS, REPEATS, ROUNDS = 100_000, 4, 3
MOST_TIMES, MOST_MB = 2.5, 300
PROGRAM = """
import sys, time
from nemo_gym.compare.comparison import compare_runs
from nemo_gym.compare import CompareConfig
config = CompareConfig(runs=sys.argv[1:])
start = time.process_time()
found = compare_runs(config).main("new").found
print(time.process_time() - start, found.tasks, found.delta)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write_run(path: Path, offset: int) -> None:
    text = "The quick brown fox jumps over the lazy dog and thinks about it. " * 26
    rollouts, rows = [], []
    for number in range(ROLLOUTS):
        task, repeat = divmod(number, REPEATS)
        asked = {"input": [{"role": "user", "content": f"{task}: {text[:500]}"}]}
        row = {"responses_create_params": asked, "_ng_task_index": task, "_ng_rollout_index": repeat, "id": f"t{task}"}
        rows.append(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        answer = {
            "output": [{"type": "message", "content": [{"type": "output_text", "text": text[: 1100 + task % 9]}]}]
        }
        answer["usage"] = {"input_tokens": 90, "output_tokens": 7 + task % 50, "total_tokens": 97 + task % 50}  # type: ignore[assignment]
        result = {**row, "response": answer, "reward": float((number * 7919 + offset) % 10 < 5 + offset)}
        rollouts.append(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
    path.write_bytes(b"".join(rollouts))
    path.with_name(f"{path.stem}_materialized_inputs.jsonl").write_bytes(b"".join(rows))


def bare_pass(paths: list[Path]) -> float:
    start = time.process_time()
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)
    return time.process_time() - start


def test_comparing_costs_little_more_than_reading(tmp_path: Path) -> None:
    paths = [tmp_path / "base.jsonl", tmp_path / "new.jsonl"]
    for offset, path in enumerate(paths):
        write_run(path, offset)

    def compared() -> list[float]:
        floor = bare_pass(paths)
        printed = subprocess.check_output([sys.executable, "-c", PROGRAM, *map(str, paths)], text=True).split()
        assert int(printed[1]) == ROLLOUTS // REPEATS
        return [float(printed[0]) / floor, int(printed[3]) / 1024]

    passes, memory = Target("orjson passes over both files", most=MOST_TIMES), Target("MB", most=MOST_MB)
    hold(compared, passes, memory, rounds=ROUNDS)
