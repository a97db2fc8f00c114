"""A budget on real servers whose answers differ widely in length: the run ends close to it, whatever is in flight."""

import json
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection.fakes import Row, lines_in, write_rows
from tests.ports import free_port
from tests.programs import run_program

MATCHING = "resources_servers/string_match/configs/string_match.yaml"
TASKS = 800
IN_FLIGHT = 64
LATENCIES = {
    "the longer the answer the later": {"fixed": 0.05, "per_output_token": 0.0005},
    "no answer shows how long it will be": {"uniform": [0.05, 0.15]},
}


def question(task: int) -> Row:
    """A task that is unlike all others, so that its answer is, too."""
    asked = [{"role": "user", "content": f"Question {task}: what is the chemical symbol of gold?"}]
    return {"responses_create_params": {"input": asked}, "expected_answer": "Au", "match": "exact"}


def config(rows: Path, latency_s: Row | None) -> Row:
    """A model whose answers are mostly short, a few thirty times as long as most."""
    script: Row = {"seed": 3, "usage": {"input_tokens": 50, "output_tokens": {"lognormal": [100, 1.5], "max": 9000}}}
    if latency_s is not None:
        script["latency_s"] = latency_s
    rows_of_agent = {"datasets": [{"name": "example", "type": "example", "jsonl_fpath": str(rows), "num_repeats": 1}]}
    return {
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py", "script": script}}},
        "string_match_simple_agent": {"responses_api_agents": {"simple_agent": rows_of_agent}},
    }


def collect(folder: Path, name: str, latency_s: Row | None, *options: str) -> tuple[int, Row, list[int]]:
    """Exit code, summary, and the tokens of each rollout on disk."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config(folder / "in.jsonl", latency_s)))
    done = run_program(
        "ng_e2e_collect_rollouts",
        f"+config_paths=[{MATCHING},{folder / name}.yaml]",
        "+split=example",
        f"+output_jsonl_fpath={folder / name}.jsonl",
        f"+head_server.port={free_port()}",
        f"+num_samples_in_parallel={IN_FLIGHT}",
        "+json=true",
        *options,
        folder=folder,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stderr
    records: list[dict[str, Any]] = lines_in(folder / f"{name}.jsonl")
    records.sort(key=lambda it: it["_ng_task_index"])
    return done.returncode, json.loads(done.stdout), [it["response"]["usage"]["total_tokens"] for it in records]


def with_the_longest_amid(used: list[int], budget: int) -> list[int]:
    """The tasks in another order: the two longest start when half of the budget is used up, and last to its end."""
    *others, second, longest = sorted(range(TASKS), key=lambda task: used[task])
    others.sort()
    place = bisect_left(list(accumulate(used[task] for task in others)), budget // 2)
    return [*others[:place], longest, second, *others[place:]]


@pytest.mark.parametrize("latency_s", LATENCIES.values(), ids=LATENCIES.keys())
def test_half_the_tokens_end_a_run_of_skewed_lengths_within_5_percent(tmp_path: Path, latency_s: Row) -> None:
    write_rows(tmp_path / "in.jsonl", [question(task) for task in range(TASKS)])
    _, _, used = collect(tmp_path, "whole", None)
    assert len(used) == TASKS
    assert max(used) > 20 * sum(used) / TASKS
    budget = sum(used) // 2
    write_rows(tmp_path / "in.jsonl", [question(task) for task in with_the_longest_amid(used, budget)])

    exit_code, summary, half = collect(tmp_path, "half", latency_s, f"+max_total_tokens={budget}")

    assert exit_code == 1
    assert summary["stopped"]["kind"] == "budget"
    assert summary["budgets"]["max_total_tokens"] == {"limit": budget, "used": sum(half)}
    assert 0.9 * budget <= sum(half) <= 1.05 * budget
