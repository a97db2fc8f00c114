import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.rows import InputRows, preprocess

ROW = '{"responses_create_params": {"input": "q"}, "agent_ref": {"name": "a"}}'
AGENTLESS = '{"responses_create_params": {"input": "q"}}'
Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    """The message with which an input is refused."""

    def message(*lines: str, **options: Any) -> str:
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        files = {"input_jsonl_fpath": str(tmp_path / "in.jsonl"), "output_jsonl_fpath": "out.jsonl"}
        with pytest.raises(ConfigError) as caught:
            preprocess(RolloutCollectionConfig.model_validate(files | options))
        assert isinstance(caught.value, ValueError)
        assert str(tmp_path / "in.jsonl") in str(caught.value)
        return str(caught.value)

    return message


@pytest.mark.parametrize("limit", [None, 10])
def test_rows_without_an_agent_are_named_by_their_line_numbers(refusal: Refusal, limit: int | None) -> None:
    message = refusal("", ROW, "  ", AGENTLESS, AGENTLESS, limit=limit)
    assert "No agent specified for rows [4, 5]" in message
    assert "+agent_name=" in message
    assert "agent_ref" in message


@pytest.mark.parametrize("reference", ["null", "{}", '{"name": null}', '{"name": ""}', '{"type": "t"}'])
def test_an_empty_reference_names_no_agent(refusal: Refusal, reference: str) -> None:
    message = refusal(f'{{"responses_create_params": {{}}, "agent_ref": {reference}}}')
    assert "No agent specified for rows [1]" in message


@pytest.mark.parametrize("reference", ['"a"', '["a"]', "5", '{"name": 5}', '{"name": {}}'])
def test_an_odd_reference_is_explained_even_when_there_is_a_default_agent(refusal: Refusal, reference: str) -> None:
    message = refusal(ROW, f'{{"responses_create_params": {{}}, "agent_ref": {reference}}}', agent_name="x")
    assert "rows [2]: agent_ref must be an object" in message


def test_agents_without_a_repeat_count_are_named_together_and_once(refusal: Refusal) -> None:
    rows = [json.dumps({"responses_create_params": {}, "agent_ref": {"name": name}}) for name in "cbcab"]
    message = refusal(*rows, num_repeats={"b": 1, "z": 2})
    assert "['a', 'c'] and has no '_default'" in message
    assert "it lists ['b', 'z']" in message


def test_an_empty_mapping_covers_nobody(refusal: Refusal) -> None:
    assert "['a']" in refusal(ROW, num_repeats={})


def test_everything_wrong_is_said_at_once(refusal: Refusal) -> None:
    message = refusal(
        ROW,
        '{"broken": ',
        "[1]",
        AGENTLESS,
        '{"agent_ref": {"name": "a"}}',
        '{"agent_ref": {"name": "a"}, "responses_create_params": []}',
        '{"agent_ref": {"name": "a"}, "responses_create_params": {}, "_ng_task_index": [1]}',
        '{"agent_ref": {"name": "stranger"}, "responses_create_params": {}}',
        num_repeats={"a": 1},
    )
    assert "7 problems" in message
    assert "line 2: not valid JSON" in message
    assert "rows [3]: expected a JSON object, found an array" in message
    assert "No agent specified for rows [4]" in message
    assert "rows [5] have no responses_create_params" in message
    assert "rows [6]: responses_create_params must be an object" in message
    assert "rows [7]: _ng_task_index must be a number" in message
    assert "['stranger']" in message


def test_a_malformed_line_is_one_error_naming_file_and_line(refusal: Refusal) -> None:
    message = refusal(ROW, "", "oops", ROW)
    assert "line 3: not valid JSON" in message
    assert "oops" in message
    assert "problems" not in message


def test_rows_without_parameters_are_a_key_error_too(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"agent_ref": {"name": "a"}}\n')
    config = RolloutCollectionConfig(input_jsonl_fpath=str(tmp_path / "in.jsonl"), output_jsonl_fpath="out.jsonl")
    with pytest.raises(KeyError, match=r"rows \[1\] have no responses_create_params"):
        preprocess(config)


def test_a_long_list_of_lines_is_cut_short(refusal: Refusal) -> None:
    message = refusal(*[AGENTLESS] * 250)
    assert "99, 100] and 150 more" in message


def test_a_file_of_another_kind_is_given_up_on_early(refusal: Refusal) -> None:
    message = refusal(*[f"line {number} of a novel" for number in range(5_000)])
    assert "has 1000 problems" in message
    assert message.count("\n") == 21


@pytest.mark.parametrize("extra_body", ['"no json"', '"[1]"', "[1]", "5"])
def test_a_seed_cannot_be_added_to_just_anything(refusal: Refusal, extra_body: str) -> None:
    row = f'{{"responses_create_params": {{"metadata": {{"extra_body": {extra_body}}}}}, "agent_ref": {{"name": "a"}}}}'
    message = refusal(ROW, row, num_repeats_add_seed=True)
    assert "rows [2]" in message
    assert "extra_body" in message


def test_a_seed_cannot_be_added_to_metadata_that_is_no_object(refusal: Refusal) -> None:
    row = '{"responses_create_params": {"metadata": "m"}, "agent_ref": {"name": "a"}}'
    assert "rows [1]: a seed cannot be added, metadata must be an object" in refusal(row, num_repeats_add_seed=True)


def test_rows_with_an_input_of_their_own_exclude_a_prompt(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("user: hi\n")
    empty = '{"responses_create_params": {"input": []}, "agent_ref": {"name": "a"}}'
    message = refusal(ROW, "", empty, ROW, prompt_config=str(tmp_path / "p.yaml"))
    assert "mutually exclusive" in message
    assert "lines [1, 4]" in message
    assert message.endswith("Violating rows: [0, 2]")


def test_a_prompt_field_that_rows_lack_is_named_with_the_lines(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("user: '{question}'\n")
    message = refusal(
        '{"question": "?"}', '{"q": 1}', '{"q": 2}', agent_name="a", prompt_config=str(tmp_path / "p.yaml")
    )
    assert "rows [2, 3]: the prompt names the field 'question'" in message
    assert "['q']" in message
    assert "responses_create_params" not in message


def _missing(name: str, **options: Any) -> None:
    files = {"input_jsonl_fpath": name, "output_jsonl_fpath": "out.jsonl"}
    InputRows(RolloutCollectionConfig.model_validate(files | options))


def test_a_missing_input_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigPathNotFoundError) as caught:
        _missing("none.jsonl")
    assert "+input_jsonl_fpath=none.jsonl" in str(caught.value)
    assert str(tmp_path / "none.jsonl") in str(caught.value)
    assert "--" not in str(caught.value).replace(str(tmp_path), "")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rosw.jsonl", "rows.jsonl"),
        ("rows.json", "rows.jsonl"),
        ("dta/train/t.jsonl", "data/train/t.jsonl"),
        ("data/rows.jsonl", "rows.jsonl"),
        ("train/t.jsonl", "data/t.jsonl"),
        ("./data/trian/t.jsonl", "data/train/t.jsonl"),
        ("{tmp}/rosw.jsonl", "{tmp}/rows.jsonl"),
    ],
)
def test_a_missing_input_comes_with_the_file_that_was_probably_meant(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "data/train/t.jsonl", "data/t.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    with pytest.raises(ConfigPathNotFoundError, match="there is no such file; did you mean ") as caught:
        _missing(given.format(tmp=tmp_path))
    assert f"did you mean {meant.format(tmp=tmp_path)!r}?" in str(caught.value)


def test_a_folder_as_input_is_answered_with_the_files_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.csv", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"=\. is a folder; name a file in it: a\.jsonl, b\.csv$"):
        _missing(".")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"=empty is a folder; name a file$"):
        _missing("empty")


def test_the_prompt_is_loaded_before_the_input_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigPathNotFoundError, match="prompt file"):
        _missing("none.jsonl", prompt_config=str(tmp_path / "none.yaml"))


def test_an_input_that_cannot_be_read_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="regular file"):
        _missing("/dev/null")


def test_a_relative_input_is_looked_for_in_the_current_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(ROW + "\n")
    config = RolloutCollectionConfig(input_jsonl_fpath="in.jsonl", output_jsonl_fpath="out.jsonl")
    assert len(preprocess(config)) == 1


def test_the_options_that_shape_the_rows_are_announced_without_their_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="nemo_gym")
    (tmp_path / "p.yaml").write_text("user: hi\n")
    (tmp_path / "in.jsonl").write_text("{}\n")
    config = RolloutCollectionConfig(
        input_jsonl_fpath=str(tmp_path / "in.jsonl"),
        output_jsonl_fpath="out.jsonl",
        agent_name="my_agent",
        limit=5,
        num_repeats_add_seed=True,
        prompt_config=str(tmp_path / "p.yaml"),
        responses_create_params={"temperature": 0.25, "metadata": {"api_key": "s3cret"}},
    )
    preprocess(config)
    for words in ("first 5 rows", "extra_body", "0.25", "p.yaml"):
        assert words in caplog.text
    assert "s3cret" not in caplog.text
    preprocess(config.model_copy(update={"num_repeats": {"my_agent": 2}}))
    assert "{'my_agent': 2}" in caplog.text
