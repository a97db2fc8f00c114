"""The whole journey, checked against theory: a model that is right with a given probability scores that probability."""

import json
import re
import subprocess
import sys
from math import comb, sqrt
from pathlib import Path

import pytest
import yaml

PROBABILITY = 0.6
ATTEMPTS = 4
"""As the benchmark asks for."""
TASKS = 50
MODEL = {
    "policy_model": {
        "responses_api_models": {
            "scripted_model": {
                "entrypoint": "app.py",
                "script": {
                    "answers": {
                        "jsonl": "benchmarks/reasoning_gym_mini/data/reasoning_gym_mini_benchmark.jsonl",
                        "template": "<answer>{answer}</answer>",
                        "wrong_template": "<answer>unknown</answer>",
                        "probability_right": PROBABILITY,
                    }
                },
            }
        }
    }
}


def expected_pass_at(k: int) -> float:
    return 1 - (1 - PROBABILITY) ** k


def standard_error(k: int) -> float:
    """Of the mean over tasks of the unbiased estimate of pass@k from `ATTEMPTS` attempts."""
    right = [comb(ATTEMPTS, c) * PROBABILITY**c * (1 - PROBABILITY) ** (ATTEMPTS - c) for c in range(ATTEMPTS + 1)]
    estimates = [1 - comb(ATTEMPTS - c, k) / comb(ATTEMPTS, k) for c in range(ATTEMPTS + 1)]
    mean = sum(weight * value for weight, value in zip(right, estimates, strict=True))
    variance = sum(weight * (value - mean) ** 2 for weight, value in zip(right, estimates, strict=True))
    return sqrt(variance / TASKS)


def test_a_given_probability_of_being_right_is_found_within_the_printed_interval(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ng_e2e_collect_rollouts"),
            "+config_paths=[benchmarks/reasoning_gym_mini/config.yaml,model.yaml]",
            "+split=benchmark",
            "+output_jsonl_fpath=results/mini.jsonl",
            "+num_repeats_add_seed=true",
            "+head_server.port=0",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr

    printed = re.search(r"mean/reward +(\S+) +\[(\S+), (\S+)\] +(\d+)", done.stdout)
    assert printed is not None, done.stdout
    mean, low, high, count = map(float, printed.groups())
    assert count == TASKS * ATTEMPTS
    assert low < PROBABILITY < high
    assert low < mean < high
    assert high - low < 0.2

    ((of_agent),) = json.loads((tmp_path / "results/mini_aggregate_metrics.json").read_text())
    metrics = of_agent["agent_metrics"]
    for k in range(1, ATTEMPTS + 1):
        found = metrics[f"pass@{k}/accuracy"] / 100
        assert found == pytest.approx(expected_pass_at(k), abs=3 * standard_error(k)), k
    assert metrics[f"pass@1[avg-of-{ATTEMPTS}]/accuracy"] == pytest.approx(100 * mean, abs=0.05)

    rewards: dict[int, list[float]] = {}
    for line in (tmp_path / "results/mini.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        rewards.setdefault(rollout["_ng_task_index"], []).append(rollout["reward"])
    assert set(map(len, rewards.values())) == {ATTEMPTS}
    assert any(0 < sum(of_task) < ATTEMPTS for of_task in rewards.values())  # the seeds make the attempts differ
