import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.manifest import RunFacts
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.record import Result, RolloutKey, Row
from nemo_gym.runs.rows import materialized
from nemo_gym.runs.run import check_input, open_run

FOUR_CASES = """\
{"agent_ref": {"name": "alpha"}, "responses_create_params": {"input": "good"}, "case": "good"}
{"agent_ref": {"name": "beta"}, "responses_create_params": {"input": "flaky"}, "case": "flaky"}
{"agent_ref": {"name": "alpha"}, "responses_create_params": {"input": "killed"}, "case": "killed"}
{"agent_ref": {"name": "beta"}, "responses_create_params": {"input": "timeout"}, "case": "timeout"}
"""
ANSWERS: dict[str, Result] = {
    "good": {"reward": 1.0, "response": {"usage": {"total_tokens": 21}}},
    "flaky": {"reward": 0.0, "_ng_failure_class": "transient"},
    "killed": {"reward": 0.0, "_ng_failure_class": "kill_shaped", "_ng_no_persist": True},
    "timeout": {"reward": 0.0, "_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True},
}
KeyAndAttempt = tuple[Any, int, int | None]


def _config(**options: Any) -> RolloutCollectionConfig:
    files = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl"}
    return RolloutCollectionConfig.model_validate(files | options)


def _collect(
    config: RolloutCollectionConfig,
    answer: Callable[[Row], Result] = lambda row: {"reward": 1.0},
    stop_after: int = 999,
) -> list[KeyAndAttempt]:
    """Run what is owed, without servers; returns what was dispatched."""
    dispatched: list[KeyAndAttempt] = []
    with open_run(config) as run:
        plan = run.plan()
        with run.store as store:
            for row in plan:
                if len(dispatched) == stop_after:
                    break
                dispatched.append((*RolloutKey.of(row), row.get("_ng_attempt_index")))
                store.append(row, answer(row))
    return dispatched


def _input(content: str) -> None:
    Path("in.jsonl").write_text(content)


def _rows(count: int, **extra: Any) -> str:
    rows = [{"responses_create_params": {"input": f"q{n}"}, "agent_ref": {"name": "a"}, **extra} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _keys(path: str = "out.jsonl") -> list[tuple[Any, int]]:
    return [RolloutKey.of(json.loads(line)) for line in Path(path).read_text().splitlines()]


def _manifest() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out_manifest.json").read_text())
    return content


def _files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_a_fresh_run_and_three_resumes_attempt_exactly_what_they_should() -> None:
    _input(FOUR_CASES)

    def answer(row: Row) -> Result:
        return dict(ANSWERS[row["case"]])

    assert _collect(_config(), answer) == [(0, 0, None), (1, 0, None), (2, 0, None), (3, 0, None)]
    assert Path("out_materialized_inputs.jsonl").read_text().splitlines() == [
        f'{{"agent_ref":{{"name":"{agent}"}},"responses_create_params":{{"input":"{case}"}},"case":"{case}",'
        f'"_ng_task_index":{task},"_ng_rollout_index":0}}'
        for task, (agent, case) in enumerate(
            [("alpha", "good"), ("beta", "flaky"), ("alpha", "killed"), ("beta", "timeout")]
        )
    ]
    resume = _config(resume_from_cache=True)
    assert _collect(resume, answer) == [(1, 0, 1), (2, 0, None)]
    assert _collect(resume, answer) == [(1, 0, 2), (2, 0, None)]
    assert _collect(resume, answer) == [(2, 0, None)]
    assert Path("out.jsonl").read_text() == (
        '{"reward":1.0,"response":{"usage":{"total_tokens":21}},"_ng_task_index":0,"_ng_rollout_index":0,'
        '"agent_ref":{"name":"alpha"}}\n'
    )
    flaky = (
        '{"reward":0.0,"_ng_failure_class":"transient","_ng_task_index":1,"_ng_rollout_index":0,'
        '"agent_ref":{"name":"beta"}'
    )
    assert Path("out_failures.jsonl").read_text() == (
        flaky + "}\n"
        '{"reward":0.0,"_ng_failure_class":"timeout_exceeded","_ng_failure_terminal":true,"_ng_task_index":3,'
        '"_ng_rollout_index":0,"agent_ref":{"name":"beta"}}\n'
        + flaky + ',"_ng_attempt_index":1}\n'
        + flaky + ',"_ng_attempt_index":2}\n'
    )  # fmt: skip


def test_a_fresh_run_moves_the_earlier_one_away_and_deletes_nothing() -> None:
    _input(_rows(2))
    _collect(_config())
    Path("out_aggregate_metrics.json").write_text("[]")
    before = {name: Path(name).read_bytes() for name in _files() if name.startswith("out")}
    _input(_rows(1))
    _collect(_config())
    (folder,) = Path("out.previous").iterdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert _keys() == [(0, 0)]
    assert _files() == [
        "in.jsonl",
        "out.jsonl",
        "out.previous",
        "out_failures.jsonl",
        "out_manifest.json",
        "out_materialized_inputs.jsonl",
    ]


@pytest.mark.parametrize("resume", [False, True])
def test_nothing_is_touched_when_the_input_is_unusable(resume: bool) -> None:
    _input(_rows(2))
    _collect(_config())
    before = {name: Path(name).read_bytes() for name in _files() if name != "in.jsonl"}
    _input(_rows(1) + "oops\n")
    with pytest.raises(ConfigError):
        _collect(_config(resume_from_cache=resume))
    assert {name: Path(name).read_bytes() for name in _files() if name != "in.jsonl"} == before


def test_a_missing_nested_folder_is_created() -> None:
    _input(_rows(1))
    config = _config(output_jsonl_fpath="deep/er/out.jsonl", resume_from_cache=True)
    assert _collect(config) == [(0, 0, None)]
    assert _collect(config) == []
    assert _keys("deep/er/out.jsonl") == [(0, 0)]


def test_an_output_folder_that_cannot_be_written_is_the_users_to_fix() -> None:
    _input(_rows(1))
    Path("file").touch()
    with pytest.raises(ConfigError, match="output_jsonl_fpath"):
        _collect(_config(output_jsonl_fpath="file/out.jsonl"))


@pytest.mark.parametrize("output", ["in.jsonl", "in.txt"])
def test_an_input_is_never_taken_for_the_output(output: str) -> None:
    own = "in.jsonl" if output == "in.jsonl" else "in_materialized_inputs.jsonl"
    Path(own).write_text(_rows(1))
    with pytest.raises(ConfigError, match="another"):
        _collect(_config(input_jsonl_fpath=own, output_jsonl_fpath=output))
    assert Path(own).read_text() == _rows(1)


def test_two_runs_cannot_write_to_one_output() -> None:
    _input(_rows(1))
    with open_run(_config()), pytest.raises(ConfigError, match="already collecting"), open_run(_config()):
        pass
    assert not Path("out.lock").exists()


def test_the_manifest_tells_what_was_run() -> None:
    _input(FOUR_CASES)
    facts = RunFacts(
        command=["ng_collect_rollouts", "+policy_api_key=s3cret", "+a.hf_token=s3cret", "+limit=3"],
        config={"policy_api_key": "s3cret", "url": "http://user:s3cret@host/", "n": 1},
        models=["my-model"],
    )
    config = _config(limit=3, num_repeats=2, responses_create_params={"temperature": 0.5})
    with open_run(config, facts) as run:
        assert _manifest()["ended_at"] is None
        plan = run.plan()
        with run.store as store:
            for row, answer in zip(plan, ["good", "good", "flaky", "killed"], strict=False):
                store.append(row, dict(ANSWERS[answer]))
    manifest = _manifest()
    assert "s3cret" not in json.dumps(manifest)
    assert manifest["command"] == ["ng_collect_rollouts", "+policy_api_key=****", "+a.hf_token=****", "+limit=3"]
    assert manifest["options"]["responses_create_params"] == {"temperature": 0.5}
    assert manifest["input"]["sha256"] == hashlib.sha256(FOUR_CASES.encode()).hexdigest()
    assert manifest["input_rows"] == 3
    assert manifest["agents"] == {"alpha": {"tasks": 2, "rollouts": 4}, "beta": {"tasks": 1, "rollouts": 2}}
    assert manifest["models"] == ["my-model"]
    assert manifest["config"]["n"] == 1
    assert manifest["started_at"] <= manifest["ended_at"]
    assert set(manifest["versions"]) == {"nemo_gym", "python"}
    assert manifest["counts"] == {
        "expected": 6,
        "success": 2,
        "failed_attempts": 1,
        "discarded_attempts": 1,
        "missing": 4,
    }


def test_the_manifest_counts_over_all_starts() -> None:
    _input(_rows(5))
    _collect(_config(), stop_after=2)
    _collect(_config(resume_from_cache=True), stop_after=1)
    manifest = _manifest()
    assert (manifest["counts"]["success"], manifest["counts"]["missing"]) == (3, 2)
    assert len(manifest["resumed_at"]) == 1


def test_a_fresh_run_is_started_when_there_is_nothing_to_resume(caplog: pytest.LogCaptureFixture) -> None:
    _input(_rows(2))
    assert _collect(_config(resume_from_cache=True)) == [(0, 0, None), (1, 0, None)]
    assert "Nothing to resume" in caplog.text


def test_a_finished_run_owes_nothing() -> None:
    _input(_rows(2))
    _collect(_config())
    assert _collect(_config(resume_from_cache=True)) == []


def test_rows_may_come_from_elsewhere() -> None:
    rows = [{"agent_ref": {"name": "b"}, "_ng_task_index": 3, "_ng_rollout_index": 0}]
    with open_run(_config(), rows=materialized(rows)) as run:
        assert list(run.plan()) == rows
        with run.store as store:
            store.append(rows[0], {"reward": 1.0})
    assert _manifest()["agents"] == {"b": {"tasks": 1, "rollouts": 1}}
    assert _keys() == [(3, 0)]


def test_the_end_is_recorded_even_when_the_run_fails() -> None:
    _input(_rows(2))
    answers = iter([{"reward": 1.0}])
    with pytest.raises(StopIteration):
        _collect(_config(), lambda row: next(answers))
    assert _manifest()["ended_at"] is not None
    assert _manifest()["counts"]["success"] == 1


COLLECT = """
import sys
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.run import check_input, open_run

config = RolloutCollectionConfig(
    input_jsonl_fpath="in.jsonl", output_jsonl_fpath="out.jsonl", num_repeats=20, resume_from_cache=True
)
with open_run(config) as run:
    plan = run.plan()
    with run.store as store:
        for row in plan:
            print("x", flush=True)
            sys.stdin.read(1)
            store.append(row, {"reward": 1.0, "text": "y" * 20_000})
"""


def _collectors(folder: Path) -> Iterator[subprocess.Popen[str]]:
    for _ in range(100):
        yield subprocess.Popen(
            [sys.executable, "-c", COLLECT],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def test_nothing_is_lost_or_doubled_however_often_the_collector_is_killed(tmp_path: Path) -> None:
    _input(_rows(20))
    moments = random.Random(7)
    kills = 0
    for process in _collectors(tmp_path):
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            lines_before_death = moments.randrange(0, 120) if kills < 8 else 10_000
            process.stdin.write("x" * (lines_before_death + 20))  # so far it may get ahead of the kill
            process.stdin.flush()
            for number, _ in enumerate(process.stdout):
                if number >= lines_before_death:
                    process.send_signal(signal.SIGKILL)
                    break
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    assert sorted(_keys()) == [(task, rollout) for task in range(20) for rollout in range(20)]


def test_the_input_is_read_before_anything_is_touched() -> None:
    _input(_rows(2))
    inputs = check_input(_config(num_repeats=2))
    assert inputs is not None
    assert inputs.scan.rows == 2
    assert _files() == ["in.jsonl"]
    with open_run(_config(num_repeats=2), rows=inputs) as run:
        assert run.plan().owed == 4
    assert _manifest()["input_rows"] == 2
    _input("oops\n")
    with pytest.raises(ConfigError, match="line 1"):
        check_input(_config())


def test_the_rows_of_a_run_to_resume_are_on_disk() -> None:
    _input(_rows(1))
    _collect(_config())
    assert check_input(_config(resume_from_cache=True)) is None


def test_reading_and_writing_a_run_needs_nothing_of_a_server() -> None:
    probe = (
        "import sys, nemo_gym.runs.run, nemo_gym.prompt; "
        "print(sorted({'fastapi', 'uvicorn', 'ray', 'wandb', 'aiohttp', 'numpy', 'omegaconf'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "[]\n"


def test_a_row_that_was_damaged_between_whole_lines_is_made_again() -> None:
    _input(FOUR_CASES)
    _collect(_config(), stop_after=1)
    materialized_file = Path("out_materialized_inputs.jsonl")
    lines = materialized_file.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * (len(lines[2]) - 1) + b"\n"
    materialized_file.write_bytes(b"".join(lines))

    dispatched = _collect(_config(resume_from_cache=True))

    assert [key[:2] for key in dispatched] == [(1, 0), (2, 0), (3, 0)]
    assert len(materialized_file.read_bytes().splitlines()) == 4
