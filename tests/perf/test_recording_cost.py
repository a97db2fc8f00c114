"""A thousand rollouts of several steps, recorded and replayed by the command: all the same, and at what price.

The CPU is that of the whole run: servers, agent, environment, collector. The endpoint answers at random, in a process
of its own, and is gone when its answers are replayed.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.recording.upkeep import take_inventory
from tests.perf.side_by_side.estimates import Others, Target, hold
from tests.ports import free_port
from tests.readmes import clean_environment
from tests.recording.harness import GONE, noisy_endpoint

ROLLOUTS = 1000
ROUNDS = 5
MOST_TO_RECORD = 1.10
"""1.04 to 1.07 was measured in six rounds on two cores, and 1.11 to 1.16 while each call was recorded by itself."""
COMMAND = Path(sys.executable).with_name("ng_e2e_collect_rollouts")


def collect(folder: Path, name: str, port: int, *options: str) -> tuple[float, list[dict[str, Any]]]:
    """CPU seconds of a run, and its rollouts in the order of their tasks, without times."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = [
        "+environment=example_multi_step",
        f"+model=openai:http://127.0.0.1:{port}/v1#noisy",
        "+policy_api_key=none",
        f"+num_repeats={ROLLOUTS // 5}",
        "+num_samples_in_parallel=32",
        f"+output_jsonl_fpath={name}.jsonl",
        f"+head_server.port={free_port()}",
        *options,
    ]
    subprocess.run([COMMAND, *given], cwd=folder, env=clean_environment(), check=True, capture_output=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    for record in records:
        del record["_ng_timing"]
    records.sort(key=lambda record: (record["_ng_task_index"], record["_ng_rollout_index"]))
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, records


def test_a_thousand_rollouts_are_the_same_again_and_recording_them_is_cheap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Others()
    plain, kept = [], []
    recorded: list[dict[str, Any]] = []
    with noisy_endpoint() as endpoint:
        for number in range(ROUNDS):  # in turn, so that a busy moment of the machine hits both alike
            plain.append(collect(tmp_path, f"plain{number}", endpoint.port)[0])
            recording = f"+recording_folder=recorded{number}", "+recording_mode=record"
            seconds, recorded = collect(tmp_path, f"kept{number}", endpoint.port, *recording)
            kept.append(seconds)
    replay_s, replayed = collect(tmp_path, "replayed", GONE, recording[0], "+recording_mode=replay")
    ratios = [recorded_s / plain_s for recorded_s, plain_s in zip(kept, plain, strict=True)]
    with capsys.disabled():
        (policy,) = take_inventory(tmp_path / f"recorded{ROUNDS - 1}").servers
        print(
            f"\n{policy.calls:,} calls of {len(recorded):,} rollouts, {policy.bytes / policy.calls:,.0f} bytes each\n"
            f"not recorded {min(plain):.2f} s of CPU, recorded {min(kept):.2f} s, "
            f"replayed {replay_s:.2f} s"
        )
    assert len(recorded) == ROLLOUTS
    assert replayed == recorded
    in_turn = iter(ratios)
    with capsys.disabled():
        hold(
            lambda: [next(in_turn)],
            Target("recorded over not recorded", most=MOST_TO_RECORD),
            rounds=ROUNDS,
            others=others,
        )
