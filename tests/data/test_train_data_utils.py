import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.data.declared import DeclaredDataset
from nemo_gym.errors import ConfigError
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.rows import preprocess
from nemo_gym.schemas.data_config import DatasetConfig
from nemo_gym.train_data_utils import (
    MissingDatasetError,
    OffendingRowsError,
    TrainDataProcessor,
    examine,
    validate_backend_credentials,
)

WriteRows = Callable[..., Path]
AgentConfig = Callable[..., dict[str, Any]]

FIRST = (
    '{"responses_create_params": {"input": [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": '
    '"yo"}, {"role": "user", "content": "again"}], "tools": [{"type": "function", "name": "f", "parameters": {}, '
    '"strict": true}], "temperature": 0.5}, "score": 1, "tags": ["a", "b"], "ok": true, "nested": {"x": 1}, '
    '"none": null}'
)
SECOND = '{"responses_create_params": {"input": "plain string"}, "score": 4, "tags": ["a"], "ok": false}'
OFFENDING = '{"bad": 1}'
AGENT = '"agent_ref": {"type": "responses_api_agents", "name": "%s"}}'


def stats(total: int, average: float, least: float, most: float, std: float) -> dict[str, Any]:
    return {
        "Total # non-null values": total,
        "Average": average,
        "Min": least,
        "Max": most,
        "Standard deviation": std,
    }


DEMO_METRICS = {
    "Number of examples": 4,
    "Number of tools": stats(2, 1.0, 1.0, 1.0, 0.0),
    "Json-dumped number of words (proxy for token count)": stats(4, 14.0, 3.0, 25.0, 12.7),
    "Number of turns": stats(4, 1.5, 1.0, 2.0, 0.577),
    "Temperature": stats(2, 0.5, 0.5, 0.5, 0.0),
    "score": stats(4, 2.5, 1.0, 4.0, 1.73),
    "tags": {"unique_count": 2, "total_count": 6},
    "ok": stats(4, 0.5, 0.0, 1.0, 0.577),
}


def prepare(config: dict[str, Any], **options: Any) -> list[Path]:
    chosen = {"output_dirpath": "out", "mode": "train_preparation"} | options
    return TrainDataProcessor().run(OmegaConf.create(config | chosen))


def example(path: Path | str, **more: Any) -> dict[str, Any]:
    return {"name": "demo", "type": "example", "jsonl_fpath": str(path), **more}


def train(path: Path | str, **more: Any) -> dict[str, Any]:
    return {"name": "demo", "type": "train", "jsonl_fpath": str(path), "license": "MIT", **more}


def row(content: str = "q", **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": content}]}, **fields}


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_kept_offending_rows_are_written_but_not_measured(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    path = write_rows("demo.jsonl", FIRST, SECOND, OFFENDING)
    config = agent_config(demo_agent=[example(path, num_repeats=2)])

    prepare(config, mode="example_validation", keep_offending_rows=True)
    examined = examine(DeclaredDataset("demo_agent", DatasetConfig.model_validate(example(path, num_repeats=2))))
    assert examined.offending_indices(2) == [4, 5]

    assert files_below(tmp_path) == [
        "demo.jsonl",
        "demo_metrics.json",
        "demo_prepare.jsonl",
        "out/example.jsonl",
        "out/example_metrics.json",
    ]
    declared = {
        "name": "demo",
        "type": "example",
        "jsonl_fpath": str(path),
        "num_repeats": 2,
        "source": None,
        "gitlab_identifier": None,
        "huggingface_identifier": None,
        "license": None,
    }
    expected = json.dumps(declared | DEMO_METRICS, indent=4)
    assert (tmp_path / "demo_metrics.json").read_text() == expected
    assert (tmp_path / "out/example_metrics.json").read_text() == expected
    lines = [f"{text[:-1]}, {AGENT % 'demo_agent'}" for text in (FIRST, SECOND, OFFENDING) for _ in range(2)]
    assert (tmp_path / "out/example.jsonl").read_text().splitlines() == lines
    assert (tmp_path / "demo_prepare.jsonl").read_bytes() == (tmp_path / "out/example.jsonl").read_bytes()


def test_offending_rows_are_listed_with_file_and_line_and_nothing_is_written(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    good = write_rows("good.jsonl", row())
    bad = write_rows(
        "bad.jsonl",
        row(),
        "",
        OFFENDING,
        '{"torn": ',
        "[1]",
        {"responses_create_params": {"input": "q", "temprature": 1}},
        {"responses_create_params": {"input": [{"role": "nobody", "content": "q"}]}},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        '{"messages": [{"role": "user", "content": "half \\ud83d"}]}',
        f'{{"prompt": "q", "deep": {"[" * 900}{"]" * 900}}}',
    )
    config = agent_config(one=[train(good)], other=[train(bad)])

    with pytest.raises(OffendingRowsError) as caught:
        prepare(config)

    message = str(caught.value)
    assert message.startswith("8 rows cannot be rolled out")
    for line, reason in (
        (3, "no responses_create_params"),
        (4, "not valid JSON"),
        (5, "expected a JSON object, found an array"),
        (6, "responses_create_params.temprature: there is no such parameter; did you mean 'temperature'?"),
        (7, "responses_create_params.input"),
        (8, "ends with the assistant's turn"),
        (9, "half of a surrogate pair"),
        (10, "nested in more than 200 levels"),
    ):
        (listed,) = [text for text in message.splitlines() if f"{bad}, line {line}: " in text]
        assert reason in listed
    assert "good.jsonl" not in message
    assert "+keep_offending_rows=true" in message
    assert isinstance(caught.value, ConfigError)
    assert files_below(tmp_path) == ["bad.jsonl", "good.jsonl"]


def test_lines_that_are_no_objects_cannot_be_kept(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    path = write_rows("t.jsonl", row(), OFFENDING, "nonsense")
    with pytest.raises(OffendingRowsError, match=r"1 row cannot.*\n.*line 3: not valid JSON.*\n.*cannot be kept"):
        prepare(agent_config(a=[train(path)]), keep_offending_rows=True)
    assert files_below(tmp_path) == ["t.jsonl"]


def test_benchmark_rows_are_measured_and_written_with_their_prompt(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    path = write_rows("b.jsonl", '{"question":"1+1","expected_answer":"2"}', '{"question":"2+2","expected_answer":"4"}')
    (tmp_path / "p.yaml").write_text("user: 'Q: {question}'\n")
    dataset = {
        "name": "arith",
        "type": "benchmark",
        "jsonl_fpath": str(path),
        "prepare_script": "x/prepare.py",
        "prompt_config": "p.yaml",
        "num_repeats": 2,
    }

    prepare(agent_config(bench_agent=[dataset]))

    content = json.loads((tmp_path / "b_metrics.json").read_text())
    assert list(content)[:6] == ["name", "type", "jsonl_fpath", "prepare_script", "prompt_config", "num_repeats"]
    assert content["Number of examples"] == 4
    assert content["Number of turns"] == stats(4, 1.0, 1.0, 1.0, 0.0)
    assert content["question"] == {"unique_count": 2, "total_count": 4}

    def prepared(question: str, answer: str) -> str:
        return (
            f'{{"question": "{question}", "expected_answer": "{answer}", "responses_create_params": {{"input": '
            f'[{{"role": "user", "content": "Q: {question}"}}]}}, {AGENT % "bench_agent"}'
        )

    lines = (tmp_path / "out/benchmark.jsonl").read_text().splitlines()
    assert lines == [prepared("1+1", "2")] * 2 + [prepared("2+2", "4")] * 2
    collected = preprocess(
        RolloutCollectionConfig(input_jsonl_fpath="out/benchmark.jsonl", output_jsonl_fpath="o.jsonl", num_repeats=2)
    )
    assert [(each["question"], each["_ng_task_index"], each["_ng_rollout_index"]) for each in collected] == [
        (question, task, rollout) for task, question in enumerate(["1+1", "2+2"]) for rollout in range(4)
    ]


def test_a_prompt_that_does_not_fit_a_row_is_an_offence(write_rows: WriteRows, agent_config: AgentConfig) -> None:
    write_rows("b.jsonl", {"problem": "1+1"}, {"question": "q", "responses_create_params": {"input": "own"}})
    Path("p.yaml").write_text("user: 'Q: {question}'\n")
    dataset = {
        "name": "b",
        "type": "benchmark",
        "jsonl_fpath": "b.jsonl",
        "prepare_script": "x",
        "prompt_config": "p.yaml",
    }
    with pytest.raises(
        OffendingRowsError, match=r"line 1: the prompt names the field 'question'(.|\n)*line 2: it has a"
    ):
        prepare(agent_config(a=[dataset]))


def test_combined_metrics_are_those_of_all_rows_together(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    first = write_rows("t1.jsonl", row("a", v=1, w="x"), row("b", v=1, w="y"))
    second = write_rows("t2.jsonl", row("c", v=10, w="y"))

    prepare(agent_config(one=[train(first, name="t1")], two=[train(second, name="t2")]))

    content = json.loads((tmp_path / "out/train_metrics.json").read_text())
    assert (content["name"], content["Number of examples"]) == ("t1", 3)
    assert content["Number of turns"]["Total # non-null values"] == 3
    assert content["v"] == stats(3, 4.0, 1.0, 10.0, 5.2)
    assert content["w"] == {"unique_count": 2, "total_count": 3}
    names = [json.loads(line)["agent_ref"]["name"] for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]
    assert names == ["one", "one", "two"]


def test_fields_of_mixed_type_or_with_a_name_that_is_taken_are_all_measured(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    path = write_rows("t.jsonl", row(level=3, name="x", temperature=2), row(level="hard", name="y", Temperature=7))

    prepare(agent_config(a=[train(path)]))

    content = json.loads((tmp_path / "t_metrics.json").read_text())
    assert content["level"] == stats(1, 3.0, 3.0, 3.0, 0.0) | {"unique_count": 1, "total_count": 1}
    assert content["name"] == "demo"
    assert content["name (field)"] == {"unique_count": 2, "total_count": 2}
    assert content["temperature"]["Average"] == 2.0
    assert content["Temperature"]["Total # non-null values"] == 0
    assert content["Temperature (field)"]["Average"] == 7.0


def test_agents_that_share_a_file_do_not_overwrite_each_other(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    write_rows("shared.jsonl", row())
    config = agent_config(one=[train("shared.jsonl", name="a")], two=[train("shared.jsonl", name="b", num_repeats=2)])

    prepare(config)
    prepare(config)  # and their metrics files do not contradict each other either

    assert [json.loads(line)["agent_ref"]["name"] for line in Path("out/train.jsonl").read_text().splitlines()] == [
        "one",
        "two",
        "two",
    ]
    assert "shared_two_prepare.jsonl" in files_below(tmp_path)


def test_only_data_sets_of_the_mode_count_and_agents_without_one_are_left_out(
    write_rows: WriteRows, agent_config: AgentConfig
) -> None:
    path = write_rows("t.jsonl", row())
    config = agent_config(
        mixed=[train(path), example("nowhere.jsonl")], examples_only=[example("nowhere.jsonl")], empty=[]
    )

    prepare(config)

    assert [json.loads(line)["agent_ref"]["name"] for line in Path("out/train.jsonl").read_text().splitlines()] == [
        "mixed"
    ]
    with pytest.raises(ConfigError, match="no data set of the type example"):
        prepare(agent_config(a=[train(path)]), mode="example_validation")


def test_types_are_written_to_files_of_their_own(write_rows: WriteRows, agent_config: AgentConfig) -> None:
    config = agent_config(
        a=[
            train(write_rows("v.jsonl", row("v")), type="validation"),
            train(write_rows("t.jsonl", row("t"), row("u"))),
        ]
    )
    prepare(config)
    assert len(Path("out/train.jsonl").read_text().splitlines()) == 2
    assert len(Path("out/validation.jsonl").read_text().splitlines()) == 1


def test_rows_in_chat_format_and_other_files_are_accepted(agent_config: AgentConfig) -> None:
    Path("t.csv").write_text('prompt,expected_answer\n"What is 1+1?",2\n')
    prepare(agent_config(a=[train("t.csv")]))
    (written,) = [json.loads(line) for line in Path("out/train.jsonl").read_text().splitlines()]
    assert written == {
        "prompt": "What is 1+1?",
        "expected_answer": "2",
        "responses_create_params": {"input": "What is 1+1?"},
        "agent_ref": {"type": "responses_api_agents", "name": "a"},
    }
    assert Path("t_prepare.jsonl").exists()


def test_a_missing_data_set_is_refused_with_what_to_do(agent_config: AgentConfig) -> None:
    with pytest.raises(MissingDatasetError, match="must provide the above missing example jsonl files"):
        prepare(agent_config(a=[example("gone.jsonl")]), mode="example_validation")
    with pytest.raises(MissingDatasetError, match=r"Missing local datasets(.|\n)*\+should_download=true"):
        prepare(agent_config(a=[train("gone.jsonl")]))
    with pytest.raises(MissingDatasetError, match=r"nothing says where to get it.*source"):
        prepare(agent_config(a=[train("gone.jsonl")]), should_download=True)
    benchmark = {"name": "b", "type": "benchmark", "jsonl_fpath": "gone.jsonl", "prepare_script": "no.py"}
    with pytest.raises(MissingDatasetError, match="ng_prepare_benchmark"):
        prepare(agent_config(a=[benchmark]))
    with pytest.raises(ConfigError, match=r"missing a valid prepare script(.|\n)*no\.py"):
        prepare(agent_config(a=[benchmark]), should_download=True)
    gitlab = {"type": "gitlab", "dataset_name": "d", "version": "1", "artifact_fpath": "a"}
    with pytest.raises(MissingDatasetError, match="GitLab is not supported"):
        prepare(agent_config(a=[train("gone.jsonl", source=gitlab)]), should_download=True)


def test_a_missing_benchmark_is_prepared_when_that_is_allowed(agent_config: AgentConfig) -> None:
    Path("prepare.py").write_text(
        "from pathlib import Path\n"
        "def prepare():\n"
        "    Path('b.jsonl').write_text('{\"prompt\": \"q\"}\\n')\n"
        "    return 'b.jsonl'\n"
    )
    benchmark = {"name": "b", "type": "benchmark", "jsonl_fpath": "b.jsonl", "prepare_script": "prepare.py"}
    prepare(agent_config(a=[benchmark]), should_download=True)
    assert len(Path("out/benchmark.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "source",
    [
        {"source": {"type": "huggingface", "repo_id": "o/d", "artifact_fpath": "rows/a.jsonl"}},
        {"source": {"type": "huggingface", "repo_id": "o/d"}},
        {
            "huggingface_identifier": {"repo_id": "o/d"},
            "gitlab_identifier": {"dataset_name": "d", "version": "1", "artifact_fpath": "a"},
        },
    ],
    ids=["one file", "a split", "of two sources the chosen one"],
)
def test_a_missing_data_set_is_downloaded_from_its_source(
    source: dict[str, Any], hub: Any, agent_config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub_home").absolute()))
    rows = json.dumps(row("downloaded")) + "\n"
    hub.publish("o/d", {"rows/a.jsonl": rows, "train.jsonl": rows})

    prepare(agent_config(a=[train("data/t.jsonl", **source)]), should_download=True)

    assert json.loads(Path("data/t.jsonl").read_text()) == row("downloaded")
    assert len(Path("out/train.jsonl").read_text().splitlines()) == 1


def test_what_belongs_beside_installed_data_goes_below_the_current_folder(
    agent_config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    (installed / "env/data").mkdir(parents=True)
    (installed / "env/data/t.jsonl").write_text(json.dumps(row(v=1)) + "\n")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(installed))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = agent_config(a=[train("env/data/t.jsonl")])

    prepare(config)

    assert files_below(installed) == ["env/data/t.jsonl"]
    assert files_below(here) == [
        "env/data/t_metrics.json",
        "env/data/t_prepare.jsonl",
        "out/train.jsonl",
        "out/train_metrics.json",
    ]

    os.renames(here / "env/data/t_metrics.json", installed / "env/data/t_metrics.json")
    prepare(config)  # metrics that came with the data are compared with, not written again
    assert "env/data/t_metrics.json" not in files_below(here)


def test_a_folder_that_cannot_be_written_to_is_named(write_rows: WriteRows, agent_config: AgentConfig) -> None:
    path = write_rows("t.jsonl", row())
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write file/out/train_metrics\.json"):
        prepare(agent_config(a=[train(path)]), output_dirpath="file/out")


def test_credentials_are_there_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ok, message = validate_backend_credentials("huggingface")
    assert not ok
    assert "HuggingFace backend selected but missing credentials" in message
    assert "hf_token" in message
    assert "mlflow_tracking_uri" in validate_backend_credentials("gitlab")[1]
    monkeypatch.setattr("nemo_gym.global_config._GLOBAL_CONFIG_DICT", OmegaConf.create({"hf_token": "t"}))
    assert validate_backend_credentials("huggingface") == (True, "")
