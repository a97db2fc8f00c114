import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.benchmarks import list_benchmarks
from nemo_gym.cli.command import command_named
from nemo_gym.prompt import load_prompt_config
from nemo_gym.train_data_utils import complete

main = command_named("prepare_benchmark")


Rows = list[dict[str, Any]]
NAMES = ["aime24", "gsm8k", "gpqa", "mmlu_pro"]


def prepare(name: str, *options: str) -> Rows:
    main.run([f"+config_paths=[benchmarks/{name}/config.yaml]", *options])
    path = list_benchmarks()[name].dataset.jsonl_fpath
    assert not path.is_absolute()
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt_of(name: str, row: dict[str, Any]) -> str:
    prompt_config = list_benchmarks()[name].dataset.prompt_config
    assert prompt_config is not None
    completed, problem = complete(row, load_prompt_config(prompt_config))
    assert problem is None
    (message,) = completed["responses_create_params"]["input"]
    return str(message["content"])


def test_gsm8k_has_answers_that_are_text(hub_with_benchmarks: Any) -> None:
    first, second = prepare("gsm8k")
    assert first == {
        "question": "Ann has 3 pens and buys 4.  How many has she?",
        "expected_answer": "7",
        "reference_solution": "She has 3+4=7 pens.",
    }
    assert second["expected_answer"] == "2000"
    asked = prompt_of("gsm8k", first)
    assert "\\boxed{}" in asked
    assert asked.endswith(first["question"])


def test_aime_has_answers_without_leading_zeros(hub_with_benchmarks: Any) -> None:
    assert prepare("aime24") == [
        {"question": "Find the number of sides of a square.", "expected_answer": "4"},
        {"question": "Find $20^2+20$.", "expected_answer": "420"},
    ]


def test_gpqa_mixes_the_options_the_same_way_every_time(hub_with_benchmarks: Any) -> None:
    hub_with_benchmarks.private.add("Idavidrein/gpqa")
    rows = prepare("gpqa", "+hf_token=good_token")
    assert rows == prepare("gpqa", "+hf_token=good_token")
    for row, right in zip(rows, ["a cat", "an oak", "tin"], strict=True):
        options = {letter: text for option in row["options"] for letter, text in option.items()}
        assert sorted(options) == ["A", "B", "C", "D"]
        assert options[row["expected_answer"]] == right
        assert row["problem"] == f"{row['question']}\n\n{row['options_text']}"
        assert f"{row['expected_answer']}) {right}" in row["options_text"]
    assert len({row["uuid"] for row in rows}) == 3
    assert len({row["expected_answer"] for row in rows}) > 1
    asked = prompt_of("gpqa", rows[0])
    assert "Answer: X" in asked
    assert asked.endswith(rows[0]["problem"])


def test_gpqa_without_permission_says_what_to_do(hub_with_benchmarks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hub_with_benchmarks.private.add("Idavidrein/gpqa")
    with pytest.raises(SystemExit) as ended:
        prepare("gpqa")
    assert ended.value.code == 2
    assert "accept its terms" in capsys.readouterr().err


def test_mmlu_pro_has_up_to_ten_options(hub_with_benchmarks: Any) -> None:
    first, second = prepare("mmlu_pro")
    assert len(first["options"]) == 10
    assert (first["expected_answer"], first["options"][4], first["category"]) == ("E", {"E": "5"}, "math")
    assert second["options"] == [{"A": "The buyer"}, {"B": "The seller"}]
    assert second["expected_answer"] == "B"
    assert "A to J" in prompt_of("mmlu_pro", first)


def test_reasoning_gym_mini_is_the_same_everywhere() -> None:
    rows = prepare("reasoning_gym_mini")
    assert len(rows) == 50
    assert len({row["question"] for row in rows}) == 50
    assert len({row["metadata"]["source_dataset"] for row in rows}) == 10
    assert rows[1]["question"].startswith("Your task is to convert a number between two different bases.")
    assert rows == prepare("reasoning_gym_mini")
    assert len(prepare("reasoning_gym_mini", "+prepare_script_args={rows_per_task: 1, seed: 3}")) == 10
    assert "<answer>" in prompt_of("reasoning_gym_mini", rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_local_copy_gives_the_same_rows(
    name: str, hub_with_benchmarks: Any, published: dict[str, Rows], as_file: Callable[[str, Rows], bytes]
) -> None:
    downloaded = prepare(name)
    ending = "csv" if name == "gpqa" else "parquet"
    Path(f"mine.{ending}").write_bytes(as_file(f"mine.{ending}", published[name]))
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in published[name]))
    hub_with_benchmarks.files.clear()
    assert prepare(name, f"+source=mine.{ending}") == downloaded
    assert prepare(name, "+source=mine.jsonl") == downloaded


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_something_else_is_refused_with_what_it_has(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.jsonl").write_text('{"colour": "red"}\n')
    with pytest.raises(SystemExit) as ended:
        prepare(name, "+source=mine.jsonl")
    assert ended.value.code == 2
    assert "its fields are colour" in capsys.readouterr().err
    assert not list_benchmarks()[name].dataset.jsonl_fpath.exists()


def test_a_source_that_is_not_there_or_empty_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare("gsm8k", "+source=gone.jsonl")
    assert "+source=gone.jsonl: there is no such file" in capsys.readouterr().err
    Path("empty.jsonl").write_text("")
    with pytest.raises(SystemExit):
        prepare("gsm8k", "+source=empty.jsonl")
    assert "no rows" in capsys.readouterr().err


def test_odd_published_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.jsonl").write_text('{"question": "q", "answer": "no mark"}\n')
    with pytest.raises(SystemExit):
        prepare("gsm8k", "+source=mine.jsonl")
    assert "####" in capsys.readouterr().err
    Path("mine.jsonl").write_text('{"question": "q", "options": ["a", "b"], "answer": "C", "category": "c"}\n')
    with pytest.raises(SystemExit):
        prepare("mmlu_pro", "+source=mine.jsonl")
    assert "the letter of the right one" in capsys.readouterr().err
