import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import RolloutKey
from nemo_gym.runs.resume import Plan, load_from_cache, plan_resumed, read_gate


@pytest.fixture
def paths(tmp_path: Path) -> RolloutPaths:
    """Eight rollouts: two finished, some failed in different ways."""
    found = RolloutPaths(tmp_path / "out.jsonl")
    keys = [(task, rollout) for task in range(4) for rollout in range(2)]
    _write(found.materialized_inputs, *({**_key(*key), "agent_ref": {"name": "z"}} for key in keys))
    _write(found.rollouts, {**_key(0, 1), "reward": 1.0}, {**_key(0, 0), "reward": 0.0})
    _write(
        found.failures,
        {**_key(1, 0), "_ng_failure_class": "transient"},
        {**_key(1, 0), "_ng_failure_class": "transient"},
        {**_key(1, 1), "_ng_failure_class": "skipped", "_ng_failure_terminal": True},
        {**_key(2, 0), "_ng_failure_class": "legitimate"},
        {**_key(2, 0), "_ng_failure_class": "legitimate"},
        {**_key(2, 0), "_ng_failure_class": "legitimate"},
        {**_key(0, 0), "_ng_failure_class": "transient"},
        {"_ng_failure_class": "orphan"},
    )
    with found.failures.open("a") as file:
        file.write("\n")
    return found


def _key(task: Any, rollout: int) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout}


def _write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _plan(paths: RolloutPaths, cap: int = 3, *, retry_exhausted: bool = False) -> Plan:
    return plan_resumed(paths, read_gate(paths, cap, retry_exhausted=retry_exhausted))


def _owed(rows: Any) -> list[tuple[Any, int, int | None]]:
    return [(*RolloutKey.of(row), row.get("_ng_attempt_index")) for row in rows]


GATING = [
    (3, [(1, 0, 2), (2, 1, None), (3, 0, None), (3, 1, None)], 1),
    (2, [(2, 1, None), (3, 0, None), (3, 1, None)], 2),
    (1, [(2, 1, None), (3, 0, None), (3, 1, None)], 4),
]


@pytest.mark.parametrize(("cap", "owed", "at_cap"), GATING)
def test_what_is_finished_terminal_or_tried_too_often_is_not_owed(
    paths: RolloutPaths, caplog: pytest.LogCaptureFixture, cap: int, owed: list[Any], at_cap: int
) -> None:
    plan = _plan(paths, cap)
    assert _owed(plan) == owed
    assert _owed(plan) == owed, "a plan can be read again"
    assert (plan.total, plan.done, plan.owed, plan.given_up) == (8, 2, len(owed), 6 - len(owed))
    assert plan.owed_by_agent == {"z": len(owed)}
    assert {agent: (asked.tasks, asked.rollouts) for agent, asked in plan.expected.items()} == {"z": (4, 8)}
    assert (
        f"8 rollouts in all, 2 finished; 7 failed attempts at 4 rollouts, of which 1 must not be tried again "
        f"and {at_cap} were tried {cap} times or more; {len(owed)} to run"
    ) in caplog.text


@pytest.mark.parametrize(("cap", "owed", "at_cap"), GATING)
def test_the_same_in_memory(paths: RolloutPaths, cap: int, owed: list[Any], at_cap: int) -> None:
    rows_to_run, done_rows, done_results, done_lines = load_from_cache(paths, cap)
    assert _owed(rows_to_run) == owed
    assert [RolloutKey.of(row) for row in done_rows] == [(0, 1), (0, 0)]
    assert all(row["agent_ref"] == {"name": "z"} for row in done_rows)
    assert done_results == [{**_key(0, 1), "reward": 1.0}, {**_key(0, 0), "reward": 0.0}]
    assert done_lines == [[line] for line in paths.rollouts.read_bytes().splitlines()]


def test_infrastructure_failures_number_the_next_attempt_but_do_not_count(paths: RolloutPaths) -> None:
    with paths.failures.open("a") as file:
        for _ in range(5):
            record = {**_key(3, 0), "_ng_failure_class": "connect", "_ng_counts_as_attempt": False}
            file.write(json.dumps(record) + "\n")
    plan = _plan(paths)
    assert (3, 0, 5) in _owed(plan)
    assert plan.attempts_left(_key(3, 0)) == 3
    assert plan.attempts_left(_key(1, 0)) == 1
    assert plan.attempts_left(_key(3, 1)) == 3


def test_what_was_given_up_can_be_asked_for_again(paths: RolloutPaths) -> None:
    plan = _plan(paths, retry_exhausted=True)
    assert _owed(plan) == [(1, 0, 2), (1, 1, 1), (2, 0, 3), (2, 1, None), (3, 0, None), (3, 1, None)]
    assert plan.given_up == 0
    assert plan.attempts_left(_key(2, 0)) == 3
    assert _owed(load_from_cache(paths, 3, retry_exhausted=True).rows_to_run) == _owed(plan)


def test_torn_lines_are_run_again(paths: RolloutPaths) -> None:
    whole = paths.rollouts.read_bytes()
    paths.rollouts.write_bytes(whole[:-10])
    paths.failures.write_bytes(paths.failures.read_bytes() + b'{"_ng_task_index":3,"_ng_rol')
    plan = _plan(paths)
    assert (0, 0, 1) in _owed(plan)
    assert plan.done == 1
    assert paths.rollouts_corrupt.exists()
    assert paths.failures_corrupt.read_bytes() == b'{"_ng_task_index":3,"_ng_rol\n'


def test_rollouts_of_other_rows_are_left_out_and_kept(paths: RolloutPaths, caplog: pytest.LogCaptureFixture) -> None:
    with paths.rollouts.open("a") as file:
        file.write(json.dumps({**_key(77, 0), "reward": 1.0}) + "\n")
    assert _plan(paths).done == 2
    assert "1 rollouts that belong to no row of this run" in caplog.text
    cached = load_from_cache(paths, 3)
    assert len(cached.done_rows) == len(cached.done_results) == len(cached.done_result_lines) == 2
    assert len(paths.rollouts.read_text().splitlines()) == 3


def test_a_rollout_that_is_there_twice_counts_once(paths: RolloutPaths, caplog: pytest.LogCaptureFixture) -> None:
    with paths.rollouts.open("a") as file:
        file.write(json.dumps({**_key(0, 1), "reward": 0.0}) + "\n")
    assert _plan(paths).done == 2
    assert [result["reward"] for result in load_from_cache(paths, 3).done_results] == [1.0, 0.0]
    assert "more than once" in caplog.text


def test_rows_may_have_indices_that_are_no_numbers(tmp_path: Path) -> None:
    paths = RolloutPaths(tmp_path / "out.jsonl")
    _write(paths.materialized_inputs, _key(None, 0), _key("a", 0), _key("a", 1))
    _write(paths.rollouts, _key("a", 0))
    assert _owed(_plan(paths)) == [(None, 0, None), ("a", 1, None)]


def test_everything_may_be_finished(paths: RolloutPaths) -> None:
    rows = [json.loads(line) for line in paths.materialized_inputs.read_text().splitlines()]
    _write(paths.rollouts, *rows)
    plan = _plan(paths)
    assert (plan.owed, plan.given_up, list(plan)) == (0, 0, [])


def test_repeats_of_a_task_are_read_as_they_are_written(tmp_path: Path) -> None:
    paths = RolloutPaths(tmp_path / "out.jsonl")
    starts = ['{"a":{"_ng_rollout_index":7},"_ng_task_index":0', '{"_ng_task_index":1', '{"_ng_task_index":1,"b":","']
    lines = [f'{start},"_ng_rollout_index":{index}}}' for start in starts for index in (0, 10, 9)]
    lines += ['{"_ng_rollout_index":3,"_ng_task_index":4}', '{"_ng_task_index":5, "_ng_rollout_index": 11}']
    paths.materialized_inputs.write_text("\n".join(lines))
    _write(paths.failures, {**_key(1, 10), "_ng_failure_class": "transient"})
    paths.rollouts.touch()
    expected = [json.loads(line) for line in lines]
    expected[4]["_ng_attempt_index"] = expected[7]["_ng_attempt_index"] = 1

    rows = list(_plan(paths))

    assert rows == expected
    assert [list(row) for row in rows] == [list(row) for row in expected]
    assert all(row is not other for row in rows for other in rows if row != other)
