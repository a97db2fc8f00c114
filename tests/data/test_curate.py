"""Tasks chosen by how they went: the same filters for exports and profiles, a new input file, and the hub."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.runs.input_check import RowRules, scan_input
from nemo_gym.runs.options import RolloutCollectionConfig

export = command_named("export")
profile = command_named("reward_profile")


REWARDS = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [0.5, 1.0]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four tasks with two rollouts each; the records say nothing about the rows' level."""
    monkeypatch.chdir(tmp_path)
    rows, records = [], []
    for task, rewards in REWARDS.items():
        for repeat, reward in enumerate(rewards):
            key = {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": "alpha"}}
            params = {"input": f"question {task}"}
            usage = {"input_tokens": 3, "output_tokens": 100 * (task + 1), "total_tokens": 100 * (task + 1) + 3}
            message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
            level = "hard" if task % 2 else "easy"
            rows.append({"responses_create_params": params, "level": level, "answer": task, **key})
            response = {"output": [message], "usage": usage}
            records.append({"responses_create_params": params, "response": response, "reward": reward, **key})
    for name, lines in (("out_materialized_inputs.jsonl", rows), ("out.jsonl", records)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "out.jsonl"


def ended(command: Any, *options: str) -> int:
    try:
        command.run(options)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def written(name: str = "new.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def to_dataset(*options: str) -> int:
    source = ["+rollouts_jsonl_fpath=out.jsonl", "+output_fpath=new.jsonl", "+format=dataset"]
    return ended(export, *source, *options)


def test_chosen_tasks_become_a_new_input_with_their_solve_rates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_dataset("+filter=0 < mean < 1") == 0
    assert "2 tasks are in new.jsonl" in capsys.readouterr().out
    first, second = written()
    assert first == {
        "responses_create_params": {"input": "question 1"},
        "level": "hard",
        "answer": 1,
        "_ng_task_index": 1,
        "agent_ref": {"name": "alpha"},
        "solve_rate": 0.5,
        "mean_reward": 0.5,
        "num_rollouts": 2,
    }
    assert (second["solve_rate"], second["mean_reward"]) == (0.5, 0.75)
    config = RolloutCollectionConfig(input_jsonl_fpath="new.jsonl", output_jsonl_fpath="again.jsonl")
    assert scan_input(RowRules.of(config)).rows == 2


def test_where_chooses_the_rollouts_that_solve_rates_are_made_of(run: Path) -> None:
    assert to_dataset("+where=repeat == 1 and output_tokens < 400") == 0
    assert [(row["answer"], row["solve_rate"], row["num_rollouts"]) for row in written()] == [
        (0, 1.0, 1),
        (1, 1.0, 1),
        (2, 0.0, 1),
    ]


def test_where_is_for_every_format(run: Path) -> None:
    source = ["+rollouts_jsonl_fpath=out.jsonl", "+output_fpath=new.jsonl", "+format=sft"]
    assert ended(export, *source, "+where=reward >= 0.5 and task > 0") == 0
    keys = [(row["provenance"]["_ng_task_index"], row["provenance"]["_ng_rollout_index"]) for row in written()]
    assert keys == [(1, 1), (3, 0), (3, 1)]


def test_a_profile_takes_the_same_filter_also_on_fields_that_only_rows_have(run: Path) -> None:
    source = ["+rollouts_jsonl_fpath=out.jsonl", "+materialized_inputs_jsonl_fpath=out_materialized_inputs.jsonl"]
    where = '+where=level == "hard" and repeat == 1 or task == 2'
    assert ended(profile, *source, where, "+select=mean > 0.5") == 0
    profiles = written("out_reward_profiling.jsonl")
    assert [(each["_ng_task_index"], each["num_rollouts"], each["mean/reward"]) for each in profiles] == [
        (1, 1, 1.0),
        (2, 2, 0.0),
        (3, 1, 1.0),
    ]
    assert [row["answer"] for row in written("out_selected.jsonl")] == [1, 3]


def test_rollouts_that_are_missing_count_if_their_row_is_wanted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run.read_text().splitlines(keepends=True)
    run.write_text("".join(lines[1:7]))
    source = ["+rollouts_jsonl_fpath=out.jsonl", "+materialized_inputs_jsonl_fpath=out_materialized_inputs.jsonl"]
    assert ended(profile, *source, '+where=level == "hard"') == 2
    assert ended(profile, *source, '+where=level == "hard"', "+allow_partial_rollouts=true", "+json=true") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["completed_rollout_rows"], told["expected_rollout_rows"]) == (3, 4)


def test_a_data_set_goes_to_the_hub(hub: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["+push_to_hub=me/hard-tasks", "+hub_split=validation", "+hf_token=good_token", "+json=true"]
    assert to_dataset("+filter=mean < 1", *options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tasks"] == 3
    assert told["pushed_to"].startswith(f"{hub.url}/datasets/me/hard-tasks/commit/")
    [made] = hub.created
    assert (made["organization"], made["name"]) == ("me", "hard-tasks")
    assert made.get("private") is True or made.get("visibility") == "private"
    [commit] = hub.commits
    [file] = [line["value"] for line in commit["lines"] if line["key"] == "file"]
    assert file["path"] == "validation.jsonl"
    assert base64.b64decode(file["content"]) == Path("new.jsonl").read_bytes()
    assert hub.collected == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["+min_reward=1"], "+min_reward chooses examples"),
        (["+output_fpath=new.parquet"], "its output is JSONL"),
        (["+format=sft", "+push_to_hub=me/x"], "+push_to_hub is for +format=dataset"),
        (["+push_to_hub=nowhere"], "push_to_hub"),
        (["+where=lavel == 1"], "there is no 'lavel'"),
        (["+materialized_inputs_jsonl_fpath=gone.jsonl"], "gone.jsonl does not exist"),
    ],
)
def test_mistakes_are_refused_and_leave_no_file(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert to_dataset(*options) == 2
    assert said in capsys.readouterr().err
    assert not list(run.parent.glob("new*"))


def test_rows_of_another_run_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run.with_name("out_materialized_inputs.jsonl")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))
    assert to_dataset() == 2
    assert "2 of the 4 tasks have no row in out_materialized_inputs.jsonl" in capsys.readouterr().err
    assert not Path("new.jsonl").exists()
