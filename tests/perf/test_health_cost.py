"""What looking for odd rollouts costs: memory that a million rollouts fit into, time far below that of reading them."""

import json
import time
import tracemalloc
from pathlib import Path

from nemo_gym.collect.health import HealthCounts, HealthScan
from nemo_gym.runs.read import plain_records
from tests.perf.side_by_side.estimates import Target, hold

FEW, MANY = 2_000, 22_000
MOST_BYTES_PER_ROLLOUT = 250
"""Of which arrays that double as they grow may hold half in reserve; a million rollouts then take a quarter of a GB."""


def write(path: Path, rollouts: int) -> Path:
    text = "The answer follows from the facts that are given. " * 20
    with path.open("w") as file:
        for number in range(rollouts):
            message = {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": f"{text}{number}"}],
            }
            params = {"input": f"task {number // 4}", "temperature": 1.0}
            key = {"_ng_task_index": number // 4, "_ng_rollout_index": number % 4, "agent_ref": {"name": "alpha"}}
            record = {"responses_create_params": params, "response": {"output": [message]}, "reward": number % 2, **key}
            file.write(json.dumps(record) + "\n")
    return path


def peak_of(path: Path) -> int:
    tracemalloc.start()
    try:
        scan = HealthScan()
        scan.read(path)
        assert not any(finding.count for finding in scan.findings())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_by_numbers_not_by_texts(tmp_path: Path) -> None:
    few, many = write(tmp_path / "few.jsonl", FEW), write(tmp_path / "many.jsonl", MANY)

    def per_rollout() -> list[float]:
        return [(peak_of(many) - peak_of(few)) / (MANY - FEW)]

    hold(per_rollout, Target("bytes of memory per rollout", most=MOST_BYTES_PER_ROLLOUT), rounds=1, more=2)


def test_looking_at_rollouts_as_they_are_stored_costs_less_than_reading_them(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", MANY)

    def looked_over_read() -> list[float]:
        began_s = time.process_time()
        records = [record for _, _, record in plain_records(path, "skip")]
        read_s = time.process_time() - began_s
        began_s = time.process_time()
        counts = HealthCounts()
        for record in records:
            counts.add(record)
        return [(time.process_time() - began_s) / read_s]

    hold(looked_over_read, Target("looking at rollouts over reading them", most=1.5))
