"""Rollouts as data sets: which are taken, what becomes of them, and where each came from."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.export import ExportSummary, export_rollouts
from nemo_gym.runs.record import RolloutKey
from nemo_gym.schemas.cli_config import ExportConfig

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def rollout(task: int, index: int, reward: Any, *output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "agent_ref": {"name": "agent_a"},
        "responses_create_params": {"input": [{"role": "user", "content": f"question {task}"}]},
        "response": {"output": list(output) or [said(f"answer {task}:{index}")]},
        "reward": reward,
        **more,
    }


def export(folder: Path, records: list[Any], *, to: str = "out.jsonl", **options: Any) -> ExportSummary:
    source = folder / "rollouts.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"rollouts_jsonl_fpath": str(source), "output_fpath": str(folder / to), "format": "sft", **options}
    return export_rollouts(ExportConfig.model_validate(given))


def examples(summary: ExportSummary) -> list[dict[str, Any]]:
    return [json.loads(line) for line in summary.path.read_text().splitlines()]


def keys(summary: ExportSummary) -> list[RolloutKey]:
    return [RolloutKey.of(example["provenance"]) for example in examples(summary)]


RUN = [
    rollout(1, 1, 1.0),
    rollout(0, 0, 0.0),
    rollout(0, 1, 1.0),
    rollout(1, 0, 1.0),
    rollout(0, 2, 0.5),
    rollout(2, 0, 0.0),
]


def test_prompt_and_completion_apart(tmp_path: Path) -> None:
    summary = export(tmp_path, [rollout(4, 2, 0.5)])

    assert examples(summary) == [
        {
            "prompt": [{"role": "user", "content": "question 4"}],
            "completion": [{"role": "assistant", "content": "answer 4:2"}],
            "reward": 0.5,
            "provenance": {
                "file": "rollouts.jsonl",
                "line": 1,
                "_ng_task_index": 4,
                "_ng_rollout_index": 2,
                "agent": "agent_a",
            },
        }
    ]
    assert summary.as_json() == {
        "output_fpath": str(tmp_path / "out.jsonl"),
        "examples": 1,
        "tasks": 1,
        "left_out": {},
    }


def test_a_conversation_with_instructions_thoughts_and_tools(tmp_path: Path) -> None:
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        said("done"),
    ]
    params = {"input": "go", "instructions": "Be brief.", "tools": [TOOL], "temperature": 0.5}
    summary = export(tmp_path, [rollout(0, 0, 1.0, *output, responses_create_params=params)], format="messages")

    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    (example,) = examples(summary)
    assert example["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "c"},
        {"role": "assistant", "content": "done"},
    ]
    assert example["tools"] == [{"type": "function", "function": {"name": "look", "parameters": TOOL["parameters"]}}]


def test_examples_come_in_task_order_and_lead_back_to_their_lines(tmp_path: Path) -> None:
    summary = export(tmp_path, RUN)
    assert keys(summary) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    for example in examples(summary):
        origin = json.loads(lines[example["provenance"]["line"] - 1])
        assert RolloutKey.of(origin) == RolloutKey.of(example["provenance"])
        assert origin["response"]["output"][0]["content"][0]["text"] == example["completion"][0]["content"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"filter": "0 < mean < 1"}, [(0, 0), (0, 1), (0, 2)]),
        ({"filter": "0 < mean < 1 or num_rollouts == 1"}, [(0, 0), (0, 1), (0, 2), (2, 0)]),
        ({"min_reward": 0.5}, [(0, 1), (0, 2), (1, 0), (1, 1)]),
        ({"max_per_task": 1}, [(0, 1), (1, 0), (2, 0)]),
        ({"filter": "mean > 0", "min_reward": 1, "max_per_task": 1}, [(0, 1), (1, 0)]),
        ({"filter": "mean > 5"}, []),
        ({"filter": "mean > 0 and agent_ref.name == 'math_agent'"}, []),
        ({"filter": "agent_ref.name != null and num_rollouts in [1, 2]"}, [(1, 0), (1, 1), (2, 0)]),
    ],
)
def test_tasks_and_rollouts_can_be_chosen(
    tmp_path: Path, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert keys(export(tmp_path, RUN, **options)) == expected


def pairs(summary: ExportSummary) -> list[tuple[int, int, int]]:
    return [
        (
            example["provenance"]["chosen"]["_ng_task_index"],
            example["provenance"]["chosen"]["_ng_rollout_index"],
            example["provenance"]["rejected"]["_ng_rollout_index"],
        )
        for example in examples(summary)
    ]


def test_the_best_and_the_worst_rollout_of_a_task_make_a_pair(tmp_path: Path) -> None:
    summary = export(tmp_path, RUN, format="dpo")

    (example,) = examples(summary)
    assert example["prompt"] == [{"role": "user", "content": "question 0"}]
    assert (example["chosen"][0]["content"], example["rejected"][0]["content"]) == ("answer 0:1", "answer 0:0")
    assert (example["chosen_reward"], example["rejected_reward"]) == (1.0, 0.0)
    assert pairs(summary) == [(0, 1, 0)]


def test_more_pairs_of_a_task_as_long_as_one_is_better(tmp_path: Path) -> None:
    records = [rollout(0, index, reward) for index, reward in enumerate([0.0, 1.0, 0.5, 0.5, 0.2])]
    assert pairs(export(tmp_path, records, format="dpo", max_per_task=9)) == [(0, 1, 0), (0, 2, 4)]
    assert pairs(export(tmp_path, records, format="dpo", max_per_task=9, min_reward=0.6, to="few.jsonl")) == [(0, 1, 0)]


def test_a_pair_must_have_been_asked_the_same(tmp_path: Path) -> None:
    other = rollout(0, 1, 0.0, responses_create_params={"input": "something else"})
    summary = export(tmp_path, [rollout(0, 0, 1.0), other], format="dpo")
    assert summary.examples == 0
    assert summary.left_out == {"has another prompt than its sibling": 1}


def test_what_cannot_be_used_is_counted_by_reason(tmp_path: Path) -> None:
    records = [
        rollout(0, 0, 0.0, _ng_failure_class="timeout"),
        rollout(0, 1, None),
        rollout(0, 2, float("1e999")) | {"reward": "high"},
        {"reward": 1.0},
        rollout(0, 3, 1.0),
        rollout(0, 3, 0.0),
        rollout(0, 4, 1.0, {"type": "web_search_call", "id": "w"}),
        rollout(0, 5, 1.0) | {"response": {"output": []}},
        rollout(0, 6, 1.0) | {"response": None},
    ]
    summary = export(tmp_path, records)

    assert keys(summary) == [(0, 3)]
    assert summary.left_out == {
        "failed": 1,
        "no reward": 2,
        "no _ng_task_index and _ng_rollout_index": 1,
        "repeats a rollout key": 1,
        "has no form as chat messages": 2,
        "says nothing": 1,
    }


@pytest.mark.parametrize("form", ["sft", "dpo", "messages"])
def test_parquet_holds_the_same_as_jsonl(tmp_path: Path, form: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": {"x": [1, 2.5]}}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    params = {"input": "go", "tools": [TOOL]}
    late = [rollout(9, index, float(index), call, output, responses_create_params=params) for index in range(2)]
    records = [*RUN, *late]

    lines = examples(export(tmp_path, records, format=form))
    rows = read_parquet(export(tmp_path, records, format=form, to="out.parquet").path)

    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == lines


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """As `datasets` reads it: columns of JSON become objects."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows:
        for name, value in row.items():
            if name == "tools" and value is not None:
                row[name] = json.loads(value)
            elif isinstance(value, list):
                row[name] = [json.loads(message) for message in value]
    return rows


def test_parquet_keeps_custom_tool_calls_and_content_that_is_more_than_text(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": "data:,", "detail": "low"}
    params = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}]}
    call = {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"}
    summary = export(tmp_path, [rollout(0, 0, 1.0, call, responses_create_params=params)], to="out.parquet")

    (row,) = read_parquet(summary.path)
    assert [part["type"] for part in row["prompt"][0]["content"]] == ["text", "image_url"]
    (kept,) = row["completion"][0]["tool_calls"]
    assert kept == {"id": "c", "type": "custom", "function": {"name": "sh", "arguments": {"input": "ls"}}}


@pytest.mark.parametrize("to", ["out.jsonl", "out.parquet"])
def test_arguments_are_objects_unless_text_is_asked_for(tmp_path: Path, to: str) -> None:
    calls = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
        for arguments in ('{"deep": {"er": null}}', "", "{broken", "[1]")
    ]

    def arguments(summary: ExportSummary) -> list[Any]:
        (example,) = read_parquet(summary.path) if to.endswith("parquet") else examples(summary)
        (message,) = example["completion"]
        return [call["function"]["arguments"] for call in message["tool_calls"]]

    summary = export(tmp_path, [rollout(0, 0, 1.0, *calls)], to=to)
    assert arguments(summary) == [{"deep": {"er": None}}, {}, "{broken", "[1]"]
    assert summary.notes == {"arguments of tool calls that are no JSON object stayed text": 1}
    assert summary.as_json()["notes"] == dict(summary.notes)

    as_text = export(tmp_path, [rollout(0, 0, 1.0, *calls)], to=to, tool_arguments="text", overwrite=True)
    assert arguments(as_text) == ['{"deep": {"er": null}}', "", "{broken", "[1]"]
    assert not as_text.notes


def test_developers_become_the_system_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    user = {"role": "user", "content": "go"}
    params = {"input": [user, {"role": "developer", "content": "be brief"}, user]}
    records = [rollout(0, 0, 1.0, responses_create_params=params), rollout(1, 0, 1.0)]

    summary = export(tmp_path, records)
    assert [message["role"] for message in examples(summary)[0]["prompt"]] == ["user", "system", "user"]
    assert summary.notes.total() == 1
    assert "developer messages became system messages" in next(iter(summary.notes))

    kept = export(tmp_path, records, developer_role="keep", overwrite=True)
    assert [message["role"] for message in examples(kept)[0]["prompt"]] == ["user", "developer", "user"]
    assert not kept.notes


def test_a_message_has_no_key_that_says_nothing(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    (row,) = read_parquet(export(tmp_path, [rollout(0, 0, 1.0, call, output, said("done"))], to="out.parquet").path)

    assert [set(message) for message in row["completion"]] == [
        {"role", "content", "tool_calls"},
        {"role", "content", "tool_call_id"},
        {"role", "content"},
    ]


def test_nothing_to_export_is_an_empty_file(tmp_path: Path) -> None:
    assert export(tmp_path, []).path.read_text() == ""
    assert pyarrow.parquet.read_table(export(tmp_path, [], to="out.parquet").path).num_rows == 0


def test_many_examples_go_to_parquet_in_portions(tmp_path: Path) -> None:
    summary = export(tmp_path, [rollout(task, 0, 1.0) for task in range(1_100)], to="out.parquet")
    tasks = [row["provenance"]["_ng_task_index"] for row in pyarrow.parquet.read_table(summary.path).to_pylist()]
    assert tasks == list(range(1_100))


def test_mistakes_are_named_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\+filter, position 1: there is no 'meen' \(did you mean 'mean'\?\)"):
        export(tmp_path, RUN, filter="meen > 0")
    with pytest.raises(ConfigError, match="belongs to the run that is to be exported"):
        export(tmp_path, RUN, to="rollouts.jsonl", overwrite=True)
    with pytest.raises(ConfigError, match=r"rollouts_jsonl_fpath=.*nowhere.*does not exist"):
        export(tmp_path, RUN, rollouts_jsonl_fpath=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"rollouts.jsonl, line 2: expected a JSON object"):
        export(tmp_path, [RUN[0], 5])
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_a_data_set_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    first = export(tmp_path, RUN).path.read_text()
    with pytest.raises(ConfigError, match=r"out\.jsonl exists; name another file, or replace it with \+overwrite=true"):
        export(tmp_path, RUN, min_reward=1)
    assert (tmp_path / "out.jsonl").read_text() == first

    assert export(tmp_path, RUN, min_reward=1, overwrite=True).examples == 3


def test_a_run_that_was_stopped_in_the_middle_of_a_line_is_used_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "rollouts.jsonl"
    source.write_text(json.dumps(RUN[0]) + "\n" + json.dumps(RUN[1])[:-9])
    options = {"rollouts_jsonl_fpath": str(source), "output_fpath": str(tmp_path / "out.jsonl"), "format": "sft"}

    assert keys(export_rollouts(ExportConfig.model_validate(options))) == [(1, 1)]
    assert "ends in the middle of line 2, which is left out" in caplog.text
